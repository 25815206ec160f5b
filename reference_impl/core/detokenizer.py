"""Text from tokens as they come: no half characters, no prompt text, nothing after a stop string."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from tokenizers import Tokenizer

_CONTEXT = 4  # tokens that the text of the next one may depend on: three of a split character, and one before it
_BAD = "\ufffd"  # stands for bytes that are no character, or not yet


@functools.lru_cache(maxsize=4)  # a server makes a stream for every request
def special_and_bytes(tokenizer: Tokenizer) -> tuple[set[int], list[int | None], dict[int, int]]:
    """The special tokens; the tokens <0x00> to <0xFF>; {token: byte} where these stand for bytes (SentencePiece)."""
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    stand_for_bytes = tokenizer.decode([ids[byte] or 0 for byte in _BAD.encode()]) == _BAD
    return special, ids, {token: byte for byte, token in enumerate(ids) if stand_for_bytes and token is not None}


def text_of(tokenizer: Tokenizer, tokens: Sequence[int], skips_special: bool = False) -> str:
    """The text of tokens. Later tokens change nothing in it but a split character at its end. The tokenizers library
    turns every byte of a run that is not valid UTF-8 into U+FFFD, also the bytes of its whole characters; so here
    invalid bytes alone are replaced by those of U+FFFD before it decodes."""
    _, ids, in_bytes = special_and_bytes(tokenizer)
    if in_bytes and not in_bytes.keys().isdisjoint(tokens):
        found: list[int | None] = []
        for are_bytes, run in itertools.groupby(tokens, in_bytes.__contains__):
            if are_bytes:
                text = bytes(map(in_bytes.__getitem__, run)).decode("utf-8", "replace")
                found += [ids[byte] for byte in text.encode()]
            else:
                found += run
        tokens = [token for token in found if token is not None]
    try:
        return tokenizer.decode(tokens, skip_special_tokens=skips_special)
    except BaseException as error:  # a panic of Rust is no Exception, and would end more than one request
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(f"the tokenizers library cannot decode tokens {list(tokens)}: {error}") from None


class TextStream:
    """Takes one request's output tokens and says which new text is certain.

    A character may span several tokens (they are held until it is complete), and text that may turn out
    to be the start of a stop string is held until it cannot be one any more.
    """

    skips_special = True  # tokens, such as an end token, are no text

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, stop
        self._special, _, _ = special_and_bytes(tokenizer)
        self._window = [*itertools.islice(filter(self._has_text, reversed(prompt)), _CONTEXT)][::-1]  # the last tokens
        text = self._decode(self._window)
        self._after_split = text.endswith(_BAD)  # of the prompt: no output, unless a token completes the character
        self._shown = len(text) - self._after_split  # characters of the window's text that are prompt, or were shown
        self._held = ""  # decoded, but maybe the start of a stop string
        self.text = ""  # everything given out so far
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """New text that is certain after this token; "" if there is none yet."""
        if self.stopped_by is not None or not self._has_text(token):
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        piece = self._new(text, len(text) - text.endswith(_BAD))
        if len(self._window) > 2 * _CONTEXT:
            left = len(text) - self._shown  # at most a split character: the same at the end of a shorter window
            del self._window[:-_CONTEXT]
            self._shown = len(self._decode(self._window)) - left
        return self.give(self._held + piece, final=False) if piece else ""

    def finish(self) -> str:
        """The text that was held back: the output has ended, so it is certain now."""
        if self.stopped_by is not None:
            return ""
        text = self._decode(self._window)
        return self.give(self._held + self._new(text, len(text)), final=True)

    def _new(self, text: str, end: int) -> str:
        """The part of the window's text, up to `end`, that was not shown yet."""
        piece, self._shown = text[self._shown : end], max(self._shown, end)
        if piece and self._after_split:
            piece, self._after_split = piece.removeprefix(_BAD), False
        return piece

    def _has_text(self, token: int) -> bool:
        """Whether the token gives text: not a special one, nor one of the model that its tokenizer does not have."""
        return not (self.skips_special and token in self._special) and self._tokenizer.id_to_token(token) is not None

    def _decode(self, tokens: list[int]) -> str:
        return text_of(self._tokenizer, tokens, self.skips_special)

    def give(self, text: str, final: bool) -> str:
        """The certain part of a text: all before a stop string, or before what may become one. final: no more comes."""
        # The stop string that is complete first, or of two the longer: however the tokens cut the text, the same one.
        found = [(text.find(s) + len(s), -len(s), s) for s in self._stop if s in text]
        if found:
            end, _, self.stopped_by = min(found)
            cut = end - len(self.stopped_by)
            given, self._held = text[:cut], ""
        else:
            keep = 0 if final else self._possible_stop(text)
            given, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += given
        return given

    def _possible_stop(self, text: str) -> int:
        """The length of the longest end of the text that a stop string begins with."""
        ends = ((stop, n) for stop in self._stop for n in range(1, min(len(stop), len(text) + 1)))
        return max((n for stop, n in ends if text.endswith(stop[:n])), default=0)
