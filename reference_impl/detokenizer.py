"""Text from tokens as they come: no half characters, no prompt text, nothing after a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Feeds one request's output tokens and says which new text is certain.

    A character may span several tokens (they are held until it is complete), and text that may turn out
    to be the start of a stop string is held until it cannot be one any more.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], stop: Sequence[str] = ()):
        # The stream sees the prompt's ids, so that a leading space or a split character decodes as it
        # would in the middle of the text; it returns only what comes after them.
        self._stream = DecodeStream(ids=prompt, skip_special_tokens=True)
        self._tokenizer, self._stop = tokenizer, stop
        self._undecoded: list[int] = []  # tokens whose character is not complete
        self._held = ""  # decoded, but maybe the start of a stop string
        self.text = ""  # everything given out so far
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """New text that is certain after this token; "" if there is none yet."""
        if self.stopped_by is not None:
            return ""
        self._undecoded.append(token)
        piece = self._stream.step(self._tokenizer, token)
        if piece is None:
            return ""
        self._undecoded.clear()
        return self._give(self._held + piece, final=False)

    def finish(self) -> str:
        """What was held back: the output has ended, so it is certain now."""
        if self.stopped_by is not None:
            return ""
        tail = self._tokenizer.decode(self._undecoded, skip_special_tokens=True)
        self._undecoded = []
        return self._give(self._held + tail, final=True)

    def _give(self, text: str, final: bool) -> str:
        cuts = [(text.find(s), s) for s in self._stop if s in text]
        if cuts:
            cut, self.stopped_by = min(cuts)
            given, self._held = text[:cut], ""
        else:
            keep = 0 if final else self._possible_stop(text)
            given, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += given
        return given

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:n]):
                    longest = n
                    break
        return longest
