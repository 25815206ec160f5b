"""A request on its way to text, with what `LLM` adds: samples, log-probabilities, calls of tools, embeddings."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from reference_impl.assembly.engine import Engine
from reference_impl.assembly.outputs import (
    Cut,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    completion,
    cut_by,
    logprob_dicts,
    stop_reason,
)
from reference_impl.core import llm as core_llm
from reference_impl.interfaces import Request

if TYPE_CHECKING:
    from reference_impl.assembly.llm import LLM
    from reference_impl.features.texts.stream import AskedTextStream

logger = logging.getLogger("inferlab.engine")


class Generation(core_llm.Generation):
    """One request with its text. others: with n > 1, the other samples of the same prompt.

    An error while its tokens become text, log-probabilities or calls ends this request, with finish_reason "error", and
    no other: `Request.error` says why.
    """

    engine: Engine

    def __init__(self, llm: LLM, request: Request):
        super().__init__(llm, request)
        self.llm, p = llm, request.sampling
        self._asked_text: AskedTextStream | None = None
        if llm.tokenizer and (p.include_stop_str_in_output or not p.skip_special_tokens or (p.min_tokens and p.stop)):
            from reference_impl.features.texts.stream import AskedTextStream

            prompt = request.tokens[: request.num_prompt_tokens]
            self.text = self._asked_text = AskedTextStream(llm.tokenizer, prompt, p)
        if not p.detokenize:
            self.text = None
        self.others: list[Generation] = []
        self.prompt: str | None = None

    @property
    def unfinished(self) -> bool:
        return super().unfinished or any(other.unfinished for other in self.others)

    def push(self, tokens: Sequence[int]) -> None:
        ended = self.request.finish_reason == "stop" and self.request.sampling.include_stop_str_in_output
        if ended and self._asked_text is not None:
            self._asked_text.last = tokens[-1]
        try:
            super().push(tokens)
        except Exception as error:
            self.fail(error)

    def take_back(self, num_tokens: int) -> None:
        super().take_back(num_tokens)
        self.engine.trace.amend(self.request.id, "stop", len(self.request.output_tokens))

    def fail(self, why: Exception) -> None:
        """Ends the request with an error, even if it had ended already."""
        r = self.request
        r.error = f"request {r.id!r}: its output cannot be given: {type(why).__name__}: {why}"
        logger.error("%s", r.error, exc_info=why)
        if r.id in self.engine.requests:
            self.engine.abort(r.id, "error")
        else:
            r.finish_reason = "error"
            self.engine.trace.amend(r.id, "error", len(r.output_tokens))

    def output(self) -> RequestOutput:
        r = self.request
        try:
            dicts = logprob_dicts(r.logprobs, self.llm) if r.sampling.logprobs is not None else None
        except Exception as error:
            self.fail(error)
            dicts = None
        plain, others = super().output(), tuple(other.output() for other in self.others)
        own = completion(r.sample_index, plain, dicts, self.stop_reason)
        return RequestOutput(
            **{field.name: getattr(plain, field.name) for field in fields(plain)},
            metrics=self.engine.trace.metrics(r.id),
            others=others,
            prompt_logprobs=None if r.sampling.prompt_logprobs is None else [None, *r.prompt_logprobs],
            error=r.error,
            prompt=self.prompt,
            outputs=(own, *(output for other in others for output in other.outputs)),
            cut_by=self.cut_by,
            stop_reason=self.stop_reason,
        )

    @property
    def cut_by(self) -> Cut | None:
        """What bounded the length of a request that ended by its length; otherwise None."""
        return cut_by(self.request, self.engine.max_model_len) if self.finish_reason == "length" else None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the token of stop_token_ids, that ended the request; None if neither did."""
        return stop_reason(self.request, None if self.text is None else self.text.stopped_by)


def embedding(request: Request, normalize: bool) -> EmbeddingRequestOutput:
    found = request.embedding
    if found is None:
        why = request.error or (
            f"request {request.id!r} ended by {request.finish_reason!r} and has no embedding: it was aborted, or the "
            "executor computes no hidden states"
        )
        raise RuntimeError(why)
    length = math.hypot(*found) if normalize else 1.0
    numbers = [number / length for number in found] if length else found
    return EmbeddingRequestOutput(request.id, request.tokens[: request.num_prompt_tokens], EmbeddingOutput(numbers))


def with_all_calls(output: RequestOutput, parser: str) -> RequestOutput:
    others = tuple(_with_calls(other, parser) for other in output.others)
    return replace(_with_calls(output, parser), others=others)


def _with_calls(output: RequestOutput, parser: str) -> RequestOutput:
    from reference_impl.features.chat.tool_calls import PARSERS, parse

    try:
        text, calls = parse(output.text, PARSERS[parser]())
    except Exception as error:  # of this answer alone
        logger.exception("calls of tools in request %r", output.request_id)
        return replace(output, finish_reason="error", error=f"its calls of tools: {type(error).__name__}: {error}")
    if not calls:
        return output
    reason = "tool_calls" if output.finish_reason == "stop" else output.finish_reason
    return replace(output, text=text, tool_calls=tuple(calls), finish_reason=reason)
