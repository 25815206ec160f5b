"""What a token is called in answers, its bytes, and where it begins: with tokenizers of several shapes."""

from __future__ import annotations

import codecs
import itertools
import math
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from reference_impl.assembly.outputs import logprob_dicts
from reference_impl.core.detokenizer import TextStream, text_of
from reference_impl.features.texts.tokens import TextPlaces, TokenText
from reference_impl.interfaces import TokenLogprobs
from reference_impl.serving.answers import ChatShape, CompletionShape
from reference_impl.serving.runner import Piece
from tests.tokenizer_shapes import SHAPES, TEXTS, tokenizer


def report(token: int, top: Any = ()) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, tuple(top))


def shape(tokens: TokenText, prompt: list[int], logprobs: int = 0, **fields: Any) -> CompletionShape:
    return CompletionShape(
        "m", "text_completion", "text_completion", "cmpl", tokens, logprobs, prompts=[prompt], **fields
    )


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_bytes_are_those_of_their_text(name: str) -> None:
    made = tokenizer(name)
    tokens = TokenText(made)
    for text in TEXTS:
        hello, ids = made.encode("hello").ids, made.encode(text).ids
        behind = made.decode([*hello, *ids]).removeprefix(made.decode(hello))
        assert b"".join(map(tokens.bytes, ids)).decode() == behind


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_where_tokens_begin_in_the_answers_text(name: str, echo: bool) -> None:
    made = tokenizer(name)
    tokens, end = TokenText(made), made.token_to_id("<|end|>")
    for text in TEXTS:
        ids = made.encode(f"hello {text}").ids
        for cut in range(1, len(ids)):
            stream = TextStream(made, ids[:cut])
            answer = [end, *ids[cut:], end]
            given = [stream.push(token) for token in answer]
            given[-1] += stream.finish()
            before = made.decode(ids[:cut])
            if "\ufffd" in before:
                continue
            shown = shape(tokens, ids[:cut], echo=[before] if echo else None)
            pieces = [Piece(0, part, [token], [report(token)]) for part, token in zip(given, answer, strict=True)]
            if echo:
                pieces[0].prompt_logprobs = [report(token) for token in ids[1:cut]]
            told = [shown.delta(piece) for piece in pieces]
            whole = "".join(one["text"] for one in told)
            names = [token for one in told for token in one["logprobs"]["tokens"]]
            places = [place for one in told for place in one["logprobs"]["text_offset"]]
            all_ids = [*(ids[:cut] if echo else []), *answer]
            assert len(places) == len(names) == len(all_ids)
            assert places[-1] == len(whole)
            for at, token in enumerate(all_ids):
                if token != end and (at or not echo):
                    raw = tokens.bytes(token)
                    assert whole[places[at] :].encode().startswith(raw) or not _is_text(raw), (whole, names, places)


INVALID = (
    b"h\xe2h", b"\xe2\xe2\x82h", b"h\xf0\x9f\x98", b"\xe2\x82\xach\xff\x80o\xe2", b"h\xef\xbf\xf0h",
    b"\x80\xc3\xa9h\xed\xa0\x80h",
)  # fmt: skip


@pytest.mark.parametrize("name", ["byte-level", "byte fallback", "byte fallback, no prefix"])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_around_bytes_that_are_no_character(name: str, echo: bool) -> None:
    made = tokenizer(name)
    tokens, end = TokenText(made), made.token_to_id("<|end|>")
    of_byte = {tokens.bytes(token): token for token in reversed(range(made.get_vocab_size())) if token != end}
    for raw in INVALID:
        ids = [*made.encode("lo", add_special_tokens=False).ids, *(of_byte[bytes([byte])] for byte in raw)]
        for cut in range(1, len(ids)):
            stream = TextStream(made, ids[:cut])
            answer = [*ids[cut:], end]
            given = [stream.push(token) for token in answer]
            given[-1] += stream.finish()
            shown = shape(tokens, ids[:cut], echo=[made.decode(ids[:cut])] if echo else None)
            pieces = [Piece(0, part, [token], [report(token)]) for part, token in zip(given, answer, strict=True)]
            pieces[-1].finish_reason = "stop"
            if echo:
                pieces[0].prompt_logprobs = [report(token) for token in ids[1:cut]]
            told = [shown.delta(piece) for piece in pieces]
            whole = "".join(one["text"] for one in told)
            places = [place for one in told for place in one["logprobs"]["text_offset"]][-len(answer) :]
            assert places[-1] == len(whole), (raw, cut, whole, places)
            assert places == sorted(places)
            for token, place in zip(answer, places, strict=True):
                if (one := tokens.bytes(token)).isalpha():
                    assert whole[place:].encode().startswith(one), (raw, cut, whole, places)


def places_of_bytes(raw: bytes) -> tuple[str, list[int]]:
    """Text as Python decodes it, and for each byte the character that it is part of."""
    wrong: dict[int, int] = {}  # where bytes that are one U+FFFD begin, and their number

    def replace(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        wrong[error.start] = error.end - error.start
        return "\ufffd", error.end

    codecs.register_error("noted", replace)
    text, places = raw.decode("utf-8", "noted"), []
    for at, character in enumerate(text):
        places += [at] * wrong.get(len(places), len(character.encode()))
    return text, places


@pytest.mark.parametrize("name", ["byte-level", "byte fallback", "byte fallback, no prefix"])
def test_an_echoed_prompts_text_and_offsets_where_several_bytes_are_no_character(name: str) -> None:
    """The letter h is a byte here, too: bytes beside it that are none must not swallow it."""
    made = tokenizer(name)
    tokens, end = TokenText(made), made.token_to_id("<|end|>")
    of_byte = {tokens.bytes(token): token for token in reversed(range(made.get_vocab_size())) if token != end}
    draw = random.Random(1)
    parts = [*(bytes([byte]) for byte in b"h\xef\xbf\xbd\xe6\x97\xa5\xff\xf0\x9f"), b"lo"]
    for number in range(300):
        drawn = INVALID[number] if number < len(INVALID) else b"".join(draw.choices(parts, k=draw.randint(1, 9)))
        ids = [of_byte[bytes([byte])] for byte in drawn]
        text, expected = places_of_bytes(drawn)
        assert text_of(made, ids) == text
        shown = shape(tokens, ids, echo=[text])
        told = shown.delta(Piece(0, "", [end], [report(end)], prompt_logprobs=[report(token) for token in ids[1:]]))
        assert told["logprobs"]["text_offset"][: len(ids)] == expected, drawn


def _is_text(raw: bytes) -> bool:
    return raw.decode("utf-8", "ignore").encode() == raw


def test_a_word_with_its_space_and_one_without_are_two_entries() -> None:
    vocabulary = {"<unk>": 0, "▁a": 1, "a": 2, "▁true": 3, "true": 4, "<0x61>": 5, "x": 6}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.decoder = decoders.Metaspace()
    tokens = TokenText(made)
    assert [tokens.text(token) for token in (1, 2, 3, 4)] == [" a", "a", " true", "true"]
    top = [(1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0)]
    for asked in range(1, 5):
        told = shape(tokens, [6], asked).delta(Piece(0, "a", [2], [TokenLogprobs(2, -2.0, tuple(top))]))
        [found] = told["logprobs"]["top_logprobs"]
        assert found == {tokens.text(token): value for token, value in {*top[:asked], (2, -2.0)}}


@pytest.mark.parametrize("name", SHAPES)
def test_no_two_tokens_have_one_text(name: str) -> None:
    """Also where one is a byte and the other a letter, and for ids that the tokenizer does not have."""
    made = tokenizer(name)
    tokens, size = TokenText(made), made.get_vocab_size() + 3
    assert len({tokens.text(token) for token in range(size)}) == size


MIXED = ["▁ ", " ▁", "  ", "▁▁", " ", "▁", "▁ a", " ▁a", "a", "▁a", " a", "▁ ▁", " ▁ ", "a ▁", "a▁ ", "x"]
REPLACE = decoders.Replace("▁", " ")
OF_SPACES = {
    "Metaspace": decoders.Metaspace(), "as written": decoders.Fuse(), "Replace": REPLACE,
    "Llama's": decoders.Sequence([REPLACE, decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "each token is stripped": decoders.Sequence([REPLACE, decoders.Strip(" ", 1, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_SPACES)
@pytest.mark.parametrize("turned", [False, True])
def test_so_it_is_where_a_vocabulary_writes_spaces_in_two_ways(name: str, turned: bool) -> None:
    pieces = MIXED[::-1] if turned else MIXED
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.decoder = OF_SPACES[name]
    texts = TokenText(made)
    assert len({texts.text(token) for token in range(len(pieces))}) == len(pieces)
    draw, x = random.Random(1), made.token_to_id("x")
    for _ in range(100):
        answer = draw.choices(range(len(pieces)), k=draw.randint(1, 9))
        behind = made.decode([x, *answer, x])[1:-1]
        assert b"".join(map(texts.bytes, answer)).decode() == behind
        stream = TextStream(made, [x])
        assert "".join(map(stream.push, answer)) + stream.finish() == made.decode([x, *answer])[1:]


def test_so_it_is_where_tokens_say_that_a_word_ends() -> None:
    """GPT-1's BPE. A word's end is a space where another token follows."""
    pieces = {"true": 0, "true</w>": 1, "t": 2, "t</w>": 3}
    made = Tokenizer(models.BPE(pieces, [], end_of_word_suffix="</w>"))
    made.decoder = decoders.BPEDecoder("</w>")
    texts = TokenText(made)
    assert [texts.text(token) for token in range(4)] == ["true", "true ", "t", "t "]
    answer = [2, 1, 3, 0, 3]
    assert b"".join(map(texts.bytes, answer)).decode() == made.decode(answer) + " "
    assert TextPlaces(texts).of(answer) == [0, 1, 6, 8, 12]


RESERVED = [f"<extra_{i}>" for i in range(1200)]
LATE = {
    "SentencePiece": (RESERVED, ["▁", "日", "▁true", "true"], decoders.Metaspace()),
    "SentencePiece without Latin letters": ([], ["▁", "日", "▁日", "▁!", "!"], decoders.Metaspace()),
    "word pieces": (RESERVED, ["true", "##true", "日"], decoders.WordPiece()),
    "word pieces and a full stop": ([".", *RESERVED], ["true", "##true", "日"], decoders.WordPiece()),
    "ends of words first": (["t</w>", *RESERVED], ["t", "true</w>", "true"], decoders.BPEDecoder("</w>")),
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("step", [1, 700])
def test_tokens_texts_do_not_depend_on_where_a_vocabulary_has_its_letters(name: str, step: int) -> None:
    """BERT's has 999 reserved tokens first, and some have ids that no token has."""
    reserved, pieces, decoder = LATE[name]
    made = Tokenizer(models.WordLevel({piece: step * i for i, piece in enumerate([*reserved, *pieces])}, pieces[0]))
    made.decoder = decoder
    texts, ids = TokenText(made), [made.token_to_id(piece) for piece in pieces]
    assert len({texts.text(token) for token in ids}) == len(ids)
    for answer in itertools.permutations(ids, 3):
        whole = made.decode([ids[1], *answer, ids[1]])
        assert b"".join(map(texts.bytes, answer)).decode() in whole


def test_an_added_token_may_have_the_text_of_a_token_in_bytes() -> None:
    """As the runs of spaces of CodeGen and Phi-2 do, which stand behind GPT-2's vocabulary."""
    pieces = {character: i for i, character in enumerate([*sorted(ByteLevel.alphabet()), "ĠĠ"])}
    made = Tokenizer(models.BPE(pieces, []))
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(text, normalized=False) for text in ("  ", "\n", "ä", "日")])
    texts = TokenText(made)
    shown = [texts.text(token) for token in range(made.get_vocab_size())]
    assert len({*shown}) == len(shown)
    assert [made.token_to_id(text) for text in ("  ", "\n", "日")] == [shown.index(text) for text in ("  ", "\n", "日")]
    assert texts.text(made.token_to_id("ĠĠ")) == "ĠĠ"


def test_bytes_of_a_chats_tokens() -> None:
    made = tokenizer("byte fallback")
    chat = ChatShape("m", "chat.completion", "chat.completion.chunk", "chatcmpl", TokenText(made), 1)
    ids = [made.token_to_id(name) for name in ("<0xF0>", "<0x0A>", "▁h", "<|end|>")]
    entries = chat.delta(Piece(0, "", ids, [report(token, [(token, -1.0)]) for token in ids]))["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[240], [10], [32, 104], list(b"<|end|>")]
    assert [entry["token"] for entry in entries] == ["bytes:\\xf0", "\n", " h", "<|end|>"]
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)


def test_a_decoded_token_is_what_it_is_within_a_text() -> None:
    class Texts:
        tokenizer = tokenizer("byte fallback")

    ids = [Texts.tokenizer.token_to_id(name) for name in ("▁h", "lo", "<0xF0>")]
    dicts: Any = logprob_dicts([report(token) for token in ids], Texts)  # type: ignore[arg-type]
    assert [found[token].decoded_token for found, token in zip(dicts, ids, strict=True)] == [" h", "lo", "\ufffd"]
    shown = shape(TokenText(Texts.tokenizer), ids, prompt_logprobs=0)
    told = shown.prompt_report(Piece(0, prompt_logprobs=[report(token) for token in ids[1:]]))
    assert told[0] is None
    assert [entry[token]["decoded_token"] for entry, token in zip(told[1:], ids[1:], strict=True)] == ["lo", "\ufffd"]
    assert math.isclose(told[1][ids[1]]["logprob"], -1.0)
