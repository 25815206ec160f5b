"""Text from tokens in the form that a request asks for: with special tokens, with the stop string that ended it, and
with stop strings that count only after `min_tokens`. This extends `TextStream`."""

from __future__ import annotations

from tokenizers import Tokenizer

from reference_impl.core.detokenizer import TextStream
from reference_impl.interfaces import SamplingParams


class AskedTextStream(TextStream):
    """A `TextStream` with a request's own options. last: a stop token that ended the request and is to be part of the
    text; set before `finish`."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], sampling: SamplingParams):
        self.skips_special = sampling.skip_special_tokens
        self._includes, self._left = sampling.include_stop_str_in_output, sampling.min_tokens + 1
        self.last: int | None = None
        super().__init__(tokenizer, prompt, sampling.stop)

    def push(self, token: int) -> str:
        self._left = max(0, self._left - 1)  # 0: more than min_tokens have come
        return super().push(token)

    def finish(self) -> str:
        piece = "" if self.last is None else self.push(self.last)
        return piece + super().finish()

    def give(self, text: str, final: bool) -> str:
        if self._left:  # a stop string that is complete by now does not count; one that begins here may
            keep = 0 if final else self._possible_stop(text)
            given, self._held = text[: len(text) - keep], text[len(text) - keep :]
            self.text += given
            return given
        given = super().give(text, final)
        if self._includes and self.stopped_by is not None:  # once: behind a stop string nothing is given
            self.text += self.stopped_by
            given += self.stopped_by
        return given
