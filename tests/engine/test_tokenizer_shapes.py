"""What an answer's text is, with tokenizers of the shapes that checkpoints have: decode(prompt + answer) without the
prompt's characters, wherever the prompt ends."""

from __future__ import annotations

import itertools
import random

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from reference_impl.core.detokenizer import TextStream
from tests.tokenizer_shapes import SHAPES, TEXTS, tokenizer


def streamed(made: Tokenizer, prompt: list[int], answer: list[int], stop: tuple[str, ...] = ()) -> TextStream:
    s = TextStream(made, prompt, stop)
    pieces = [s.push(token) for token in answer] + [s.finish()]
    assert "".join(pieces) == s.text
    return s


def common(left: str, right: str) -> str:
    """What both begin with."""
    pairs = zip(left, right, strict=False)
    return left[: sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_answer_is_the_text_of_both_without_the_prompts(shape: str, text: str) -> None:
    """Inside a character the answer begins with that character."""
    made = tokenizer(shape)
    end = made.token_to_id("<|end|>")
    ids = made.encode(text).ids
    whole = made.decode(ids)
    before = ""
    for cut in range(1, len(ids) + 1):
        before = max(before, common(made.decode(ids[:cut]), whole), key=len)
        expected, answer = whole[len(before) :], ids[cut:]
        assert streamed(made, ids[:cut], answer).text == expected
        assert streamed(made, [*ids[:cut], end], [end, *answer, end]).text == expected
        if expected:
            stopped = streamed(made, ids[:cut], answer, (expected[-1],))
            assert stopped.stopped_by == expected[-1]
            assert stopped.text == expected.partition(expected[-1])[0]


def test_a_prompt_of_characters_in_bytes_leaves_the_answers_first_token() -> None:
    made = tokenizer("byte fallback")
    prompt = made.encode("hello 日本日本").ids
    assert streamed(made, prompt, [made.token_to_id(".")]).text == "."
    assert streamed(made, prompt, [made.token_to_id(t) for t in "o.k"], (".",)).stopped_by == "."


@pytest.mark.parametrize("shape", ["byte fallback", "byte fallback, no prefix"])
def test_bytes_that_are_no_text_are_replaced_and_nothing_else(shape: str) -> None:
    """The oracle: a run of bytes is decoded by Python, whose rule for what is not UTF-8 is Unicode's."""
    made = tokenizer(shape)
    names = ["<0x0A>", "<0xE2>", "<0xE6>", "<0x97>", "<0xA5>", "<0xFF>", "<0xF0>", "<0x9F>", "<|end|>", "t", "▁h"]
    draw = random.Random(1)
    for names in [["<0x0A>", "<0xE2>", "t"], *(draw.choices(names, k=draw.randint(1, 40)) for _ in range(300))]:
        expected, run = "", b""
        for name in [*names, ""]:
            if name.startswith("<0x"):
                run += bytes([int(name[3:5], 16)])
            elif name != "<|end|>":
                expected += run.decode("utf-8", "replace") + name.replace("▁", " ")
                run = b""
        assert streamed(made, made.encode("hello").ids, [made.token_to_id(name) for name in names]).text == expected


def test_a_token_named_like_a_byte_is_text_where_the_tokenizer_takes_it_for_text() -> None:
    made = Tokenizer(models.WordLevel({f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256}, unk_token="x"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    assert streamed(made, [256], [0xFF, 256]).text == "<0xFF>x"


def test_ids_beyond_the_tokenizer_are_no_text_and_lose_none() -> None:
    """Models have rows for more tokens than their tokenizers."""
    made = tokenizer("byte fallback")
    hello = made.encode("hello").ids
    assert streamed(made, [*hello, *[100_000] * 12], [100_000] * 12 + hello).text == " hello"
