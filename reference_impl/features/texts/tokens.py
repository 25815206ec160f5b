"""The text of a single token, and where tokens begin in a text."""

from __future__ import annotations

import builtins
import codecs
import functools
from collections.abc import Sequence

from tokenizers import Tokenizer

from reference_impl.core.detokenizer import special_and_bytes

_LOOKED_AT = 1_000  # tokens, for one that others can stand behind


class TokenText:
    """What a token is within a text: SentencePiece's ▁true is " true", word pieces' ##ing "ing"."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        special, _, self._byte_tokens = special_and_bytes(tokenizer)
        self.special = frozenset(special)
        self._byte_of = _bytes_of_characters()
        self._before, self._length = self._token_before()
        self._known: dict[int, builtins.bytes] = {}

    def bytes(self, token: int) -> builtins.bytes:
        """Several tokens' bytes, one behind the other, are the bytes of their text."""
        if token not in self._known:
            self._known[token] = self._bytes(token)
        return self._known[token]

    def text(self, token: int) -> str:
        """A part of a character shows its bytes as OpenAI's do, bytes:\\xNN. So does a token of a byte that another
        token is the text of, since a text stands for one token; others of one text have the vocabulary's name, or
        token_id:N where it has none."""
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
        return name if token not in self.special and self._has_earlier(text, token) else text

    def readable(self, token: int) -> str:
        """U+FFFD for bytes that are no character."""
        return self.bytes(token).decode("utf-8", "replace")

    def _bytes(self, token: int) -> builtins.bytes:
        if token in self._byte_tokens:
            return bytes([self._byte_tokens[token]])
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self.special:
            return (name or "").encode()
        text = self._decode([*self._before, token])[self._length :]
        if "\ufffd" in text and all(character in self._byte_of for character in name):  # a byte-level vocabulary
            return bytes(self._byte_of[character] for character in name)
        return text.encode()

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def _token_before(self) -> tuple[list[int], int]:
        """A letter or digit, behind which a token is as in a text, and the length of its text; none where none is."""
        for token in range(min(_LOOKED_AT, self._tokenizer.get_vocab_size())):
            if token not in self.special and (text := self._decode([token])).isascii() and text.isalnum():
                return [token], len(text)
        return [], 0

    def _others(self, text: str) -> list[int]:
        """Tokens that may have this text, by the names that vocabularies give them."""
        names = (text, text.replace(" ", "▁"), text.removeprefix(" "), f"##{text}")
        found = [self._tokenizer.token_to_id(name) for name in names]
        return [token for token in dict.fromkeys(found) if token is not None]

    def _has_other(self, text: str, token: int) -> bool:
        return any(other != token and self.bytes(other) == text.encode() for other in self._others(text))

    def _has_earlier(self, text: str, token: int) -> bool:
        """The first of those with one text keeps it."""
        same = [other for other in self._others(text) if self.bytes(other) == text.encode()]
        return token in same[1:]


token_text = functools.lru_cache(maxsize=4)(TokenText)  # it remembers what tokens are


class TextPlaces:
    """Where tokens begin in a text, in characters. One that goes on within a character has its place.

    skips_special: special tokens of an answer are not in its text.
    """

    def __init__(self, tokens: TokenText, skips_special: bool = False):
        self._tokens, self._skips, self._begun = tokens, skips_special, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of_prompt(self, tokens: Sequence[int], text: str = "") -> list[int]:
        """Of a prompt's tokens in its text, which lacks what tokens have at its beginning: a first token, and the space
        of SentencePiece's first word. An answer's text comes behind it."""
        places = [self._place(token) for token in tokens]
        missing = max(0, self._begun - len(text))
        self._begun = len(text)
        return [max(0, place - missing) for place in places]

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Of an answer's next ones."""
        return [
            self._begun if self._skips and token in self._tokens.special else self._place(token) for token in tokens
        ]

    def _place(self, token: int) -> int:
        place = self._begun
        self._begun += len(self._decoder.decode(self._tokens.bytes(token)))
        return place


def _shown(raw: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _bytes_of_characters() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
