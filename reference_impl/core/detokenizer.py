"""Text from tokens as they come: no half characters, no prompt text, nothing after a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT = 8  # tokens of the prompt that the first piece of text may depend on
_LONGEST = 8  # more tokens than this are not one character


class TextStream:
    """Feeds one request's output tokens and says which new text is certain.

    A character may span several tokens (they are held until it is complete), and text that may turn out
    to be the start of a stop string is held until it cannot be one any more.
    """

    skips_special = True  # tokens, such as an end token, are no text

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, stop
        self._context: list[int] = []
        self._split = False  # the context ends inside a character
        self._pending: list[int] = []  # tokens whose character is not complete
        self._begin(list(prompt[-_CONTEXT:]), [])
        self._held = ""  # decoded, but maybe the start of a stop string
        self.text = ""  # everything given out so far
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """New text that is certain after this token; "" if there is none yet."""
        if self.stopped_by is not None:
            return ""
        self._pending.append(token)
        piece = self._stream.step(self._tokenizer, token)
        if piece is None:
            return self._stop_waiting() if len(self._pending) > _LONGEST else ""
        if self._split:  # the stream starts with the whole context, which is not output
            piece = self._text(self._context, self._pending)
        self._context, self._pending, self._split = self._pending, [], False
        return self._give(self._held + piece, final=False)

    def finish(self) -> str:
        """What was held back: the output has ended, so it is certain now."""
        if self.stopped_by is not None:
            return ""
        tail, self._pending = self._text(self._context, self._pending), []
        return self._give(self._held + tail, final=True)

    def _begin(self, context: list[int], pending: list[int]) -> None:
        """Starts a stream after `context`: a leading space or a split character decodes as it would in running text."""
        self._stream = DecodeStream(ids=context, skip_special_tokens=self.skips_special)
        for token in pending:
            self._stream.step(self._tokenizer, token)
        self._context, self._pending = context, pending
        self._split = self._decode(context).endswith("\ufffd")

    def _stop_waiting(self) -> str:
        """So many tokens are not one character: they are no UTF-8, or no text at all. All but the last are certain.

        Waiting on would decode all of them again at every token.
        """
        whole, last = self._text(self._context, self._pending), len(self._pending) - 3
        for cut in range(last, last - 4, -1):  # one of four neighbours is not inside a character
            head, tail = self._pending[:cut], self._pending[cut:]
            piece = self._text(self._context, head)
            if piece + self._text(head, tail) == whole:
                break
        self._begin((self._context + head)[-_CONTEXT:] if piece else self._context, tail)
        return self._give(self._held + piece, final=False)

    def _text(self, context: list[int], tokens: list[int]) -> str:
        """What `tokens` add to the text of `context`."""
        before, after = self._decode(context), self._decode(context + tokens)
        same = next((i for i, (b, a) in enumerate(zip(before, after, strict=False)) if b != a), len(before))
        return after[same:]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self.skips_special)

    def _give(self, text: str, final: bool) -> str:
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
        """Length of the longest end of the text that a stop string begins with."""
        longest = 0
        for stop in self._stop:
            for n in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:n]):
                    longest = n
                    break
        return longest
