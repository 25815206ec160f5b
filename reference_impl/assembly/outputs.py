"""What `LLM.generate` returns: flat for one sample, and all of them in vLLM's shape (`outputs`). A `Generation` is a
request on its way there."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from reference_impl.core import llm as core_llm
from reference_impl.interfaces import Request, TokenLogprobs
from reference_impl.observe.metrics import RequestMetrics

if TYPE_CHECKING:
    from reference_impl.assembly.engine import Engine
    from reference_impl.assembly.llm import LLM
    from reference_impl.features.chat.tool_calls import ToolCall
    from reference_impl.features.texts.stream import AskedTextStream

logger = logging.getLogger("inferlab.engine")

Cut = Literal["max_tokens", "max_model_len", "kv_cache"]


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position. rank: 1 is the likeliest; None where it is not among those
    reported. decoded_token: its text within a text, such as " true" for SentencePiece's ▁true; None without a
    tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One sample, with vLLM's names.

    token_ids end with the token that completed the sample. logprobs: for each token the chosen one and the likeliest,
    {token id: Logprob}; cumulative_logprob: the sum over the chosen tokens; both None unless they were asked for.
    finish_reason: "stop", "length", "abort", "error". stop_reason: the stop string, or the token of stop_token_ids,
    that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: str | int | None

    def finished(self) -> bool:
        return True


@dataclass(frozen=True)
class RequestOutput(core_llm.RequestOutput):
    """A finished request. text stops before a stop string; token_ids end with the token that completed it.

    finish_reason: "stop" (an end token or a stop string), "length", "abort", or "error": then error says why, such as
    that the model's numbers were not finite, and where that began.
    cut_by: with "length", what the length was bounded by: "max_tokens", "max_model_len", or "kv_cache", which holds no
    more tokens, so that the text is shorter than was asked for and than the model could write.
    stop_reason: the stop string, or the token of stop_token_ids, that ended it.
    others: with n > 1, samples 1 ... n - 1 of the same prompt; this one is sample 0.
    prompt_logprobs: one for each prompt token if they were asked for, None for the first, before which nothing stands;
    those of sample 0 are every sample's. Of a request that was aborted while its prompt was read there may be fewer.
    tool_calls: of an answer by `chat` with tools, where the model calls some: text is what stands beside them, and
    finish_reason is "tool_calls" instead of "stop".
    prompt: the text, if the prompt was one. outputs: all samples, as vLLM gives them.
    """

    metrics: RequestMetrics
    others: tuple[RequestOutput, ...] = ()
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt: str | None = None
    outputs: tuple[CompletionOutput, ...] = ()
    cut_by: Cut | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def finished(self) -> bool:
        """Always True, since `generate` returns finished outputs; vLLM has this property."""
        return True


@dataclass(frozen=True)
class EmbeddingOutput:
    """An embedding, [hidden_size] numbers."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` returns for a prompt, with vLLM's names."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


def cut_by(request: Request, max_model_len: int) -> Cut | None:
    """What bounded the length of a request that ended by its length; None for one that ended otherwise, or runs."""
    if request.finish_reason != "length":
        return None
    asked = request.num_prompt_tokens + request.sampling.max_tokens
    if request.max_total_tokens < min(asked, max_model_len):
        return "kv_cache"
    return "max_tokens" if asked <= max_model_len else "max_model_len"


def stop_reason(request: Request, stopped_by: str | None) -> str | int | None:
    """The stop string (stopped_by) or the token of stop_token_ids that ended the request; None if neither did."""
    if stopped_by is not None or request.finish_reason != "stop" or not request.output_tokens:
        return stopped_by
    last = request.output_tokens[-1]
    return last if last in request.sampling.stop_token_ids else None


def logprob_dicts(reports: Sequence[TokenLogprobs], texts: core_llm.LLM) -> list[dict[int, Logprob]]:
    """The reports in vLLM's shape, {token id: Logprob} for each token. texts: its tokenizer gives decoded_token."""
    from reference_impl.features.texts.tokens import token_text

    tokens = None if texts.tokenizer is None else token_text(texts.tokenizer)

    def text(token: int) -> str | None:
        return None if tokens is None else tokens.readable(token)

    found = []
    for report in reports:
        top = {token: Logprob(value, rank, text(token)) for rank, (token, value) in enumerate(report.top, 1)}
        found.append({report.token: Logprob(report.logprob, None, text(report.token))} | top)
    return found


def completion(
    index: int, plain: core_llm.RequestOutput, logprobs: list[dict[int, Logprob]] | None, stopped: str | int | None
) -> CompletionOutput:
    """One sample in vLLM's shape. logprobs: see `logprob_dicts`; None where none were asked for."""
    total = None if logprobs is None else math.fsum(report.logprob for report in plain.logprobs)
    return CompletionOutput(
        index=index, text=plain.text, token_ids=plain.token_ids, finish_reason=plain.finish_reason, stop_reason=stopped,
        cumulative_logprob=total, logprobs=logprobs,
    )  # fmt: skip


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
        self._amend("stop")

    def _amend(self, reason: str) -> None:
        r = self.request
        self.engine.trace.amend(r.id, reason, len(r.output_tokens) - r.num_resumed_tokens)

    def replay(self, num_unstreamed: int) -> None:
        """Reads the tokens of a request that was handed over. The text that they made certain was given where it comes
        from, but for that of the last num_unstreamed. ValueError if it has a stop string already."""
        tokens = self.request.output_tokens
        num_streamed = len(tokens) - num_unstreamed
        if self.text is not None:
            for token in tokens[:num_streamed]:
                self.text.push(token)
            if self.text.stopped_by is not None:
                raise ValueError(f"resume: the text has its stop string {self.text.stopped_by!r}: nothing is left")
        if num_unstreamed:
            self.push(tokens[num_streamed:])

    def fail(self, why: Exception) -> None:
        """Ends the request with an error, even if it had ended already."""
        r = self.request
        r.error = f"request {r.id!r}: its output cannot be given: {type(why).__name__}: {why}"
        logger.error("%s", r.error, exc_info=why)
        if r.id in self.engine.requests:
            self.engine.abort(r.id, "error")
        else:
            r.finish_reason = "error"
            self._amend("error")

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
