"""From prompts to tokens, with a lab's parts in the engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.interfaces import Request, SamplingParams
from reference_impl.observe.trace import Trace


@functools.cache
def course_llm(name: str = "target") -> LLM:
    """A course model on the CPU in float32: "target", or "draft", the smaller one. Sets torch to one thread, in the
    whole process: a model this small gains little from more, and times stay comparable."""
    torch.set_num_threads(1)
    return LLM(course_model(name), dtype="float32", device="cpu", num_blocks=32)


class LabEngine:
    """An engine with a lab's parts.

    llm: its model computes. options: fields of EngineConfig. parts: fields of Parts; None: the engine's own. unwritten:
    what the KV cache holds where nothing has been written, such as NaN.
    """

    def __init__(
        self, llm: LLM, options: Mapping[str, Any] | None = None, unwritten: float | None = None, **parts: Any
    ):
        self.engine = Engine(llm.engine.model, EngineConfig(**(options or {})), Parts(**parts))
        self.requests: list[Request] = []
        self.num_steps = 0
        if unwritten is not None:
            for layer in range(self.engine.model.config.num_layers):
                for cache in self.engine.kv_cache.layer(layer):
                    cache.fill_(unwritten)

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        name: str | None = None,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> None:
        """Queues a prompt of token ids, which gets exactly max_tokens, greedily, unless sampling (fields of
        SamplingParams) says otherwise. name: None gives it its number, counted from 0."""
        params = SamplingParams(max_tokens, **{"temperature": 0.0, "ignore_eos": True, **sampling})
        name = str(sum(request.parent_id is None for request in self.requests)) if name is None else name
        request = self.engine.add(prompt, params, name, cache_salt=cache_salt)
        self.requests += [request, *request.children]

    def abort(self, name: str) -> None:
        """Stops a request; does nothing if it is finished."""
        if name in self.engine.requests:
            self.engine.abort(name)

    def step(self) -> None:
        self.engine.step()
        self.num_steps += 1

    def run(self, aborts: Mapping[int, str] | None = None, max_steps: int = 1000) -> dict[str, list[int]]:
        """Runs steps until all requests are finished, and returns `outputs`. aborts: {step, counted from 0: the request
        to abort before it}. AssertionError if they are not finished after max_steps."""
        while self.engine.has_work():
            assert self.num_steps < max_steps, f"{max_steps} steps, and the requests are still not finished"
            if aborts and self.num_steps in aborts:
                self.abort(aborts[self.num_steps])
            self.step()
        return self.outputs

    @property
    def outputs(self) -> dict[str, list[int]]:
        """The output tokens of each request, {id: tokens}, in the order of arrival."""
        return {request.id: request.output_tokens for request in self.requests}

    @property
    def trace(self) -> Trace:
        return self.engine.trace

    @property
    def num_preemptions(self) -> int:
        return sum(len(step.preempted) for step in self.trace.steps())

    def num_computed(self) -> dict[str, int]:
        """How many tokens were computed for each request, {id: number}; tokens computed again count again."""
        computed = {request.id: 0 for request in self.requests}
        for step in self.trace.steps():
            for row in step.rows:
                computed[row.request_id] += row.num_tokens
        return computed
