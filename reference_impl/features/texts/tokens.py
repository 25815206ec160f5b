"""The text of a single token, and where tokens begin in a text."""

from __future__ import annotations

import builtins
import functools
import itertools
from collections.abc import Sequence

from tokenizers import Tokenizer

from reference_impl.core.detokenizer import special_and_bytes


class TokenText:
    """The text of a token within a text: SentencePiece's ▁true is " true", word pieces' ##ing is "ing"."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        special, _, self._byte_tokens = special_and_bytes(tokenizer)
        self.special = frozenset(special)
        self._byte_of = _bytes_of_characters()
        self._character_of = {byte: character for character, byte in self._byte_of.items()}
        self._before, self._length = self._token_before()
        self._behind = len(self._decode([*self._before, *self._before])) - self._length
        self._known: dict[int, builtins.bytes] = {}

    def bytes(self, token: int) -> builtins.bytes:
        """The bytes of a token's text. The bytes of several tokens, joined, are those of their text."""
        if token not in self._known:
            self._known[token] = self._bytes(token)
        return self._known[token]

    def text(self, token: int) -> str:
        """A text that stands for this token only. A part of a character shows its bytes like OpenAI's, bytes:\\xNN, and
        so does a token of a byte if another token has that text. Of other tokens with the same text, all but the first
        show the vocabulary's name, or token_id:N where it has none, or its name is another token's text."""
        raw = self.bytes(token)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            return _shown(raw)
        if token in self._byte_tokens:
            return _shown(raw) if self._has_other(text, token) else text
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return f"token_id:{token}"
        if token in self.special or not self._has_earlier(text, token):
            return text
        return f"token_id:{token}" if self._has_other(name, token) else name

    def readable(self, token: int) -> str:
        """The token's text, with U+FFFD for bytes that are no character."""
        return self.bytes(token).decode("utf-8", "replace")

    def _bytes(self, token: int) -> builtins.bytes:
        if token in self._byte_tokens:
            return bytes([self._byte_tokens[token]])
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self.special:
            return (name or "").encode()
        # Between two tokens, since the end of a word may be a space only where another follows (GPT-1).
        text = self._decode([*self._before, token, *self._before])[self._length :]
        text = text[: len(text) - self._behind]
        if "\ufffd" in text and all(character in self._byte_of for character in name):  # a byte-level vocabulary
            return bytes(self._byte_of[character] for character in name)
        return text.encode()

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def _token_before(self) -> tuple[list[int], int]:
        """A token behind which another decodes as within a text, and the length of its text; an empty list and 0 if
        there is none. Best is one that adds no space to another: a vocabulary may begin with thousands that are
        reserved, have no Latin letters, or leave ids out."""
        found: tuple[list[int], int] = [], 0
        for token in sorted(self._tokenizer.get_vocab().values()):
            text = "" if token in self.special else self._decode([token])
            if not text or not text.isprintable() or " " in text or "\ufffd" in text:
                continue
            if self._decode([token, token]) == text + text:
                return [token], len(text)
            found = found if found[0] else ([token], len(text))
        return found

    def _others(self, text: str, token: int) -> list[int]:
        """The tokens that may have this text, the token among them, by the names that vocabularies give them."""
        in_bytes = "".join(map(self._character_of.__getitem__, text.encode()))  # an added token may have that text, too
        names = (
            text,
            text.replace(" ", "▁"),
            text.removeprefix(" "),
            f"##{text}",
            f"{text.removesuffix(' ')}</w>",
            in_bytes,
        )
        found = [self._tokenizer.token_to_id(name) for name in names]
        found += self._alike.get(_without_spaces(self._tokenizer.id_to_token(token) or ""), [])
        return [token for token in dict.fromkeys(found) if token is not None]

    @functools.cached_property
    def _alike(self) -> dict[str, list[int]]:
        """The tokens whose names differ in spaces alone, which vocabularies write in two ways: "▁ a" and " ▁a" have one
        text, and a decoder may strip "▁a" to "a"."""
        found: dict[str, list[int]] = {}
        for name, token in self._tokenizer.get_vocab().items():
            found.setdefault(_without_spaces(name), []).append(token)
        return {key: sorted(tokens) for key, tokens in found.items() if len(tokens) > 1}

    def _has_other(self, text: str, token: int) -> bool:
        return any(other != token and self.bytes(other) == text.encode() for other in self._others(text, token))

    def _has_earlier(self, text: str, token: int) -> bool:
        """Whether an earlier token in `_others` has this text; the first of them keeps it."""
        same = [other for other in self._others(text, token) if self.bytes(other) == text.encode()]
        return token in same[1:]


token_text = functools.lru_cache(maxsize=4)(TokenText)  # it remembers what tokens are


class TextPlaces:
    """Where tokens begin in a text, in characters. A token that goes on within a character has that character's place;
    if another comes instead, what there was of the character is one U+FFFD before it, like in `TextStream`.

    skips_special: whether special tokens of an answer are left out of its text.
    """

    def __init__(self, tokens: TokenText, skips_special: bool = False):
        self._tokens, self._skips, self._begun = tokens, skips_special, 0
        self._part = b""  # of a character that is not whole yet
        self._of_prompt = False  # where it began: its U+FFFD is then no text of the answer

    def of_prompt(self, tokens: Sequence[int], text: str = "") -> list[int]:
        """The places of a prompt's tokens in its text. The text lacks what tokens have at its beginning: a first token,
        and the space of SentencePiece's first word. An answer's text comes behind it."""
        places = [self._place(token) for token in tokens]
        self._of_prompt = bool(self._part)
        missing = max(0, self._begun + self._of_prompt - len(text))
        self._begun = len(text)
        return [max(0, place - missing) for place in places]

    def of(self, tokens: Sequence[int], ended: bool = False) -> list[int]:
        """The places of an answer's next tokens. ended: no others come, so the last tokens that are not text stand
        behind all of it."""
        skipped = [self._skips and token in self._tokens.special for token in tokens]
        places = [self._begun if skips else self._place(token) for token, skips in zip(tokens, skipped, strict=True)]
        if ended and self._part and not self._of_prompt:
            for at in itertools.takewhile(skipped.__getitem__, reversed(range(len(tokens)))):
                places[at] += 1
        return places

    def _place(self, token: int) -> int:
        raw = self._tokens.bytes(token)
        if raw and self._part and len((self._part + raw[:1]).decode("utf-8", "replace")) > 1:  # no character's bytes
            self._begun += not self._of_prompt
            self._part, self._of_prompt = b"", False
        place, bytes_so_far = self._begun, self._part + raw
        self._part = _incomplete(bytes_so_far)
        self._begun += len(bytes_so_far.removesuffix(self._part).decode("utf-8", "replace"))
        self._of_prompt = self._of_prompt and self._part == bytes_so_far
        return place


def _incomplete(raw: bytes) -> bytes:
    """The end of the bytes that may still become a character. (A codec's incremental decoder would also hold halves of
    surrogate pairs.)"""
    for length in (3, 2, 1):
        try:
            raw[-length:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return raw[-length:]
    return b""


def _without_spaces(name: str) -> str:
    return name.replace("▁", "").replace(" ", "")


def _shown(raw: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _bytes_of_characters() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
