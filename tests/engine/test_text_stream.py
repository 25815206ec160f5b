"""Text from tokens as they come: TextStream against decoding everything at once."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from reference_impl.assembly.config import course_model
from reference_impl.core.detokenizer import TextStream
from tests.examples import examples

PROPERTY = settings(max_examples=examples(150), deadline=None, derandomize=True, database=None)


@functools.cache
def course() -> Tokenizer:
    return Tokenizer.from_file(str(course_model("target") / "tokenizer.json"))


@functools.cache
def alphabet() -> dict[str, str]:
    """Byte -> the character that stands for it in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def as_bytes(text: str | bytes) -> list[int]:
    """One token for each byte: the worst that a model can do."""
    data = text.encode() if isinstance(text, str) else text
    return [course().token_to_id(alphabet()[byte]) for byte in data]


def decode(ids: list[int]) -> str:
    return course().decode(ids, skip_special_tokens=True)


def stream(ids: list[int], prompt: list[int] | None = None, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    s = TextStream(course(), prompt or as_bytes("x"), stop)
    pieces = [s.push(token) for token in ids] + [s.finish()]
    assert "".join(pieces) == s.text
    return pieces, s


ANY_TOKENS = st.lists(st.integers(0, 4095), max_size=60)
WILD_TEXT = st.text(st.sampled_from("aé日本語😀👩‍👩‍👧 \n\ufffd"), max_size=20)
TOKENS = st.one_of(
    ANY_TOKENS,
    WILD_TEXT.map(as_bytes),
    st.binary(max_size=40).map(as_bytes),
    st.lists(st.one_of(st.integers(0, 4095).map(lambda t: [t]), WILD_TEXT.map(as_bytes))).map(
        lambda parts: list(itertools.chain(*parts))
    ),
)


@PROPERTY
@given(ids=TOKENS)
def test_the_pieces_join_to_the_text_of_all_tokens(ids: list[int]) -> None:
    assert stream(ids)[1].text == decode(ids)


@PROPERTY
@given(prompt=TOKENS.filter(bool), ids=TOKENS)
def test_prompt_and_output_join_to_the_text_of_both_wherever_the_prompt_ends(prompt: list[int], ids: list[int]) -> None:
    """Also inside a character: then the output starts with that character, and nothing of the prompt is repeated."""
    before, after = decode(prompt), decode(prompt + ids)
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    assert stream(ids, prompt)[1].text == after[same:]


@PROPERTY
@given(text=WILD_TEXT)
def test_no_piece_holds_half_a_character(text: str) -> None:
    for piece in stream(as_bytes(text.replace("\ufffd", "?")))[0]:
        assert "\ufffd" not in piece


@pytest.mark.parametrize("text", ["日本語", "👩‍👩‍👧", "naïve café", "a😀b"])
def test_a_character_split_over_tokens_comes_out_once_and_whole(text: str) -> None:
    pieces, s = stream(as_bytes(text))
    assert s.text == text
    assert [p for p in pieces if p] == list(text)


def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_output() -> None:
    sun = as_bytes("日")
    assert stream([*sun[2:], *as_bytes("!")], as_bytes("secret") + sun[:2])[1].text == "日!"
    assert stream(as_bytes("!"), as_bytes("secret") + sun[:2])[1].text == "!"
    assert stream(sun[1:2], as_bytes("secret") + sun[:1])[1].text == ""
    assert stream(as_bytes("!"), as_bytes("secret\ufffd"))[1].text == "!"


def test_u_fffd_that_is_a_character_of_the_text_is_given_once_wherever_the_prompt_ends() -> None:
    """Its bytes are text like any other; before they are complete they look like it, and so nothing is to be added."""
    raw = as_bytes("a\ufffd\ufffdb")
    for cut in range(1, len(raw)):
        before = decode(raw[:cut])
        assert stream(raw[cut:], raw[:cut])[1].text == decode(raw).removeprefix(before), cut
    half = as_bytes("日")[:2]
    assert stream(as_bytes("\ufffd!"), as_bytes("x") + half)[1].text == "\ufffd!", (
        "behind a character that is broken off"
    )


def test_an_unfinished_character_at_the_end_is_shown_as_one() -> None:
    assert stream(as_bytes("ok😀")[:-1])[1].text == "ok\ufffd"


def test_special_tokens_are_no_text() -> None:
    specials = [course().token_to_id(t) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
    ids = [*as_bytes("a"), *specials, *as_bytes("b"), *specials * 9, *as_bytes("c"), *specials]
    assert stream(ids)[1].text == "abc"


def test_a_leading_space_is_kept_where_the_tokenizer_strips_it_from_the_start_of_a_text() -> None:
    """As Llama 2's tokenizer does: ▁ is a space, and the first one of a text is dropped."""
    vocabulary = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "!": 3, "</s>": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    s = TextStream(tokenizer, [1])
    assert [s.push(2), s.push(3), s.push(2), s.finish()] == [" world", "!", " world", ""]
    s = TextStream(tokenizer, [1])
    assert "".join([s.push(t) for t in (*[4] * 30, 2, 3)]) == " world!"


class CountingDecoder:
    """Byte-level decoding that counts the tokens it is given."""

    def __init__(self) -> None:
        self.decoded = 0
        self.byte = {c: b for b, c in alphabet().items()}

    def decode_chain(self, tokens: list[str]) -> list[str]:
        self.decoded += len(tokens)
        return [bytes(self.byte[c] for token in tokens for c in token).decode("utf-8", "replace")]


@pytest.mark.parametrize(
    "data", [b"plain text ", "日本語".encode(), b"\xff", b"\xe6", b"\xf0\x9f", "\ufffd".encode()], ids=repr
)
@pytest.mark.parametrize("prompt_length", [1, 2000])
def test_the_cost_of_a_token_does_not_grow_with_the_text_or_the_prompt(data: bytes, prompt_length: int) -> None:
    vocabulary = {c: b for b, c in alphabet().items()}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    counter = CountingDecoder()
    tokenizer.decoder = decoders.Decoder.custom(counter)
    ids = list((data * 600)[:600])
    s = TextStream(tokenizer, [ord("p")] * prompt_length)
    pieces = "".join([s.push(token) for token in ids]) + s.finish()
    assert pieces == bytes(ids).decode("utf-8", "replace")
    assert counter.decoded <= 60 * len(ids), "tokens are decoded again and again"


# ---- stop strings


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True).map(tuple)


@PROPERTY
@given(cuts=st.lists(st.text("ab", min_size=1, max_size=5), max_size=12), stop=STOPS)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(cuts: list[str], stop: tuple[str, ...]) -> None:
    """However the text is cut into tokens."""
    text = "".join(cuts)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    expected = text
    if ends:
        expected = text[: ends[0] - max(len(s) for s in stop if text[: ends[0]].endswith(s))]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*cuts, "x"]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="x"))
    tokenizer.decoder = decoders.Fuse()
    s = TextStream(tokenizer, [vocabulary["x"]], stop)
    pieces = [s.push(vocabulary[piece]) for piece in cuts] + [s.finish()]
    assert "".join(pieces) == s.text == expected
    assert (s.stopped_by is not None) == bool(ends)
    assert not any(x in s.text for x in stop)


def test_a_stop_string_across_tokens_is_found_and_nothing_of_it_is_shown() -> None:
    pieces, s = stream(as_bytes("value: 42\n\nnext"), stop=("\n\n",))
    assert s.text == "value: 42"
    assert s.stopped_by == "\n\n"
    assert not any("\n" in p for p in pieces)


def test_what_only_looked_like_a_stop_string_is_shown_after_all() -> None:
    assert stream(as_bytes("one STO two STOP"), stop=("STOP",))[1].text == "one STO two "
    assert stream(as_bytes("end STO"), stop=("STOP",))[1].text == "end STO"


def test_a_stop_string_may_overlap_itself_and_another() -> None:
    assert stream(as_bytes("aaab"), stop=("aab",))[1].text == "a"
    assert stream(as_bytes("xabcd"), stop=("abcd", "bc"))[1].text == "xa"
    assert stream(as_bytes("xabcd"), stop=("bcd", "abcd"))[1].text == "x"
    # Of two that may have begun, the longer decides what is held back, in whichever order they are named.
    for stop in (("aab", "ab"), ("ab", "aab")):
        assert stream(as_bytes("xaab"), stop=stop)[0] == stream(as_bytes("xaab"), stop=("aab",))[0]


def test_a_stop_string_of_a_split_character_is_found() -> None:
    assert stream(as_bytes("ok😀more"), stop=("😀",))[1].text == "ok"


def test_a_stop_string_in_the_prompt_does_not_stop() -> None:
    assert stream(as_bytes("Pno"), as_bytes("STO"), stop=("STOP",))[1].text == "Pno"


def test_nothing_comes_after_a_stop() -> None:
    s = TextStream(course(), as_bytes("x"), ("b",))
    assert [s.push(t) for t in as_bytes("abab")] == ["a", "", "", ""]
    assert s.finish() == ""
