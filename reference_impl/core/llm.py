"""From prompts to text: what a reader calls first.

    prompt -> PromptEncoder -> tokens -> Engine.add, Engine.step until all are finished -> TextStream -> text

Each request that is served has a `Generation`, which takes its tokens as steps bring them and knows which text is
certain. `generate` runs some to the end; `stream` gives the text of one as it grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from reference_impl.core.detokenizer import TextStream
from reference_impl.core.engine import Engine, StepResult
from reference_impl.core.prompts import Prompt, PromptEncoder
from reference_impl.interfaces import Request, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. text stops before a stop string; token_ids end with the token that completed it.

    finish_reason: "stop" (an end token or a stop string), "length", "abort", or "error".
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprobs]


class LLM(PromptEncoder):
    """An engine with a tokenizer. folder: the model's folder, which has the tokenizer; None: token ids only."""

    def __init__(self, engine: Engine, folder: Path | None):
        super().__init__(folder)
        self.engine = engine
        self._live: dict[str, Generation] = {}  # requests whose text is still growing, for any caller of step

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Sequence[RequestOutput]:
        """Runs all prompts together; returns the results in the order of the prompts. ValueError for a list of
        sampling parameters of another length."""
        batch = as_list(prompts)
        params = [sampling or SamplingParams()] * len(batch) if not isinstance(sampling, Sequence) else list(sampling)
        if len(params) != len(batch):
            raise ValueError(
                f"{len(batch)} prompts but {len(params)} sampling parameters: give one for all, or one each"
            )
        running: list[Generation] = []
        try:
            for p, s in zip(batch, params, strict=True):
                running.append(self.start(p, s))
            while any(r.unfinished for r in running):
                self.step()
        finally:
            for r in running:
                self.leave(r)
        return [r.output() for r in running]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """Yields pieces of text as they become certain. Asking for the first queues the request; leaving early aborts
        it. RuntimeError for a request that ended with an error."""
        running = self.start(prompt, sampling or SamplingParams())
        try:
            while running.unfinished:
                self.step()
                if piece := running.take():
                    yield piece
            if piece := running.take():
                yield piece
            if running.request.error is not None:
                raise RuntimeError(running.request.error)
        finally:
            self.leave(running)

    # --- for callers that step the engine: a server, or a notebook that watches --------------------------------------

    def start(self, prompt: Prompt, sampling: SamplingParams, **options: Any) -> Generation:
        """Queues a prompt. The caller must `leave` it. options: those of `add` of the engine. ValueError for stop
        strings without a tokenizer."""
        tokens = self.encode(prompt)
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: use stop_token_ids")
        return self.follow(self.engine.add(tokens, sampling, **options))

    def follow(self, request: Request) -> Generation:
        """Starts to turn a request's tokens into text; the caller must `leave` it."""
        self._live[request.id] = generation = Generation(self, request)
        return generation

    def step(self, submit: bool = True) -> StepResult:
        """Runs one step of the engine, or, without submit, `Engine.collect`. Each token goes to its request, also if
        another caller streams that one."""
        result = self.engine.step() if submit else self.engine.collect()
        for request_id, tokens in result.tokens.items():
            if request_id in self._live:
                self._live[request_id].push(tokens)
        return result

    def leave(self, generation: Generation) -> None:
        """Drops a request; if it is not finished, it is aborted and its blocks are freed now."""
        request_id = generation.request.id
        del self._live[request_id]
        if request_id in self.engine.requests:
            self.engine.abort(request_id)


class Generation:
    """One request with its text."""

    def __init__(self, llm: LLM, request: Request):
        self.engine, self.request = llm.engine, request
        prompt = request.tokens[: request.num_prompt_tokens]
        self.text = TextStream(llm.tokenizer, prompt, request.sampling.stop) if llm.tokenizer else None
        self._new = ""  # text not yet taken

    @property
    def unfinished(self) -> bool:
        return self.finish_reason is None

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: "stop" (an end token or a stop string), "length", "abort" or "error"; None while it runs."""
        if self.request.id in self.engine.requests:
            return None
        stopped = self.text is not None and self.text.stopped_by is not None
        return "stop" if stopped else self.request.finish_reason

    def push(self, tokens: Sequence[int]) -> None:
        """Adds the tokens of a step. A stop string ends the request, and tokens behind it are removed."""
        if self.text is None:
            return
        left = len(tokens)
        for token in tokens:
            left -= 1
            if left or self.request.finish_reason != "stop":  # an end token says "stop"; it is not text
                self._new += self.text.push(token)
            if self.text.stopped_by is not None:
                break
        is_over = self.request.id not in self.engine.requests
        if self.text.stopped_by is not None and is_over:
            self.take_back(left)
        elif self.text.stopped_by is not None:
            self.engine.abort(self.request.id, reason="stop", num_dropped=left)
        if is_over:
            self._new += self.text.finish()

    def take_back(self, num_tokens: int) -> None:
        """Removes the last tokens of a request that the engine has finished: its text ended before them."""
        self.request.drop(num_tokens)

    def take(self) -> str:
        """The text that became certain since the last call."""
        piece, self._new = self._new, ""
        return piece

    def output(self) -> RequestOutput:
        r = self.request
        return RequestOutput(
            request_id=r.id,
            prompt_token_ids=r.tokens[: r.num_prompt_tokens],
            token_ids=r.output_tokens,
            text=self.text.text if self.text else "",
            finish_reason=self.finish_reason or "abort",
            logprobs=r.logprobs,
        )


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, or token ids) or several, as a list."""
    if not isinstance(prompts, Iterable):
        raise TypeError(f"a prompt: expected a text or a sequence of token ids, got {prompts!r}")
    if isinstance(prompts, str | bytes):  # bytes are refused by name when they are encoded
        return [cast(Prompt, prompts)]
    each = list(cast(Sequence[Prompt], prompts))
    return [cast(Prompt, prompts)] if each and isinstance(each[0], Integral) else each
