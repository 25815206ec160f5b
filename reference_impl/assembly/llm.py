"""The front door: a folder of weights, text in, text out.

llm = LLM(course_model("target"))
print(llm.generate(["def fibonacci(n):"], SamplingParams(max_tokens=32, temperature=0))[0].text)

To the loop of the core (`core_llm.py`) it adds what is chosen before it (folder or shape, device, dtype, quantization,
another process), n samples of a prompt, metrics, embeddings, beam search, and that Ctrl-C waits for the end of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

import torch

from reference_impl.annexes.beams.search import Beam, beam_search
from reference_impl.annexes.chat.prompts import ChatEncoder
from reference_impl.annexes.cpu.processor import use_no_more_threads_than_cores
from reference_impl.annexes.sizing.memory import give_back
from reference_impl.assembly.config import EngineConfig, ModelConfig
from reference_impl.assembly.devices import choose_device, choose_dtype
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.interrupts import uninterrupted
from reference_impl.assembly.linear_methods import Quantizations
from reference_impl.assembly.model import dummy_model, load_model
from reference_impl.assembly.parts import Parts
from reference_impl.core import llm as core_llm
from reference_impl.core.engine import StepResult
from reference_impl.core.llm import as_list
from reference_impl.core.prompts import Prompt
from reference_impl.interfaces import Pooling, Request, SamplingParams, TokenLogprobs
from reference_impl.models.config_json import read_model_config
from reference_impl.models.shapes import Shape, config_of_shape
from reference_impl.observe.metrics import RequestMetrics

__all__ = ["LLM", "Generation", "RequestOutput"]


Worker = Literal["here", "process"]


@dataclass(frozen=True)
class RequestOutput(core_llm.RequestOutput):
    """A finished request. text stops before a stop string; token_ids keeps every generated token.

    finish_reason: "stop" (an end token or a stop string), "length", "abort", or "error"; error then says why: the
    model's numbers were not finite, and where that began.
    others: with n > 1, samples 1 ... n - 1 of the same prompt; this one is sample 0.
    prompt_logprobs: one for each prompt token if they were asked for, None for the first, before which nothing stands;
    those of sample 0 are every sample's. Of a request that was aborted while its prompt was read there may be fewer.
    """

    metrics: RequestMetrics
    others: tuple[RequestOutput, ...] = ()
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None


class LLM(core_llm.LLM, ChatEncoder):
    """An engine with a tokenizer.

    model: a Hugging Face folder. Or shape, with dummy_weights=True: a model of that shape with random weights and
    without a tokenizer (see models/shapes.py). dtype: "float32", "bfloat16", ... or None: see `choose_dtype`.
    quantization: "none", or how the linear layers' weights are stored: "fp8", "int8", "int4"; or a function from a
    layer's name to one of these (see `load_model`). worker: "process" has the model compute in a process of its own, to
    which steps go as messages, while this one plans. Other options: see EngineConfig and Parts.
    """

    engine: Engine

    def __init__(
        self,
        model: str | Path | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        parts: Parts | None = None,
        quantization: Quantizations = "none",
        *,
        shape: Shape | None = None,
        dummy_weights: bool = False,
        worker: Worker = "here",
        **engine_options: Any,
    ):
        stored = _config_of(model, shape, dummy_weights)
        device = choose_device(device)
        config = EngineConfig(**engine_options)
        if device.type == "cpu":
            use_no_more_threads_than_cores()
        dtype = choose_dtype(dtype, stored.dtype, device)
        options = dtype, device, config.max_model_len, config.attention, quantization
        give_back(device)
        if worker == "process":
            engine = _split(model, dtype, device, config, parts, quantization)
        elif worker == "here":
            weights = dummy_model(stored, *options) if model is None else load_model(model, *options)
            engine = Engine(weights, config, parts)
        else:
            raise ValueError(f"worker: expected 'here' or 'process', got {worker!r}")
        try:
            super().__init__(engine, None if model is None else Path(model))
        except BaseException:  # a tokenizer that cannot be read, after a process was started
            engine.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Runs all prompts together; results in the order of the prompts."""
        return cast(list[RequestOutput], super().generate(prompts, sampling))

    def chat(self, messages: Sequence[dict[str, str]], sampling: SamplingParams | None = None) -> RequestOutput:
        return self.generate(self.chat_prompt(messages), sampling)[0]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of text as they become certain. Leaving the loop early aborts the request."""
        if sampling is not None and sampling.n != 1:
            raise ValueError(f"stream: expected SamplingParams(n=1), got n={sampling.n}: start one stream per sample")
        return super().stream(prompt, sampling)

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "mean") -> list[list[float]]:
        """Of each prompt [hidden_size]: the mean of its tokens' hidden states, or that of the last; not normalised."""
        requests: list[Request] = []
        try:
            for prompt in as_list(prompts):
                requests.append(self.engine.add(self.encode(prompt), pooling=pooling))
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:
            for request in requests:
                if request.finish_reason is None:
                    self.engine.abort(request.id)
        found = [request.embedding for request in requests]
        for request, embedding in zip(requests, found, strict=True):
            if embedding is None:
                raise RuntimeError(
                    f"request {request.id!r} ended by {request.finish_reason!r} and has no embedding: it was aborted, "
                    "or the executor computes no hidden states"
                )
        return [embedding for embedding in found if embedding is not None]

    def beam_search(
        self, prompt: Prompt, width: int = 4, max_tokens: int = 128, length_penalty: float = 1.0
    ) -> list[Beam]:
        """The `width` most probable texts found, best first: see `annexes/beams/search.py`."""
        return beam_search(self.engine, self.encode(prompt), width, max_tokens, length_penalty, self.step)

    # --- for callers that step the engine: a server, or a notebook that watches --------------------------------------

    def start(self, prompt: Prompt, sampling: SamplingParams, **options: Any) -> Generation:
        """Queues a prompt; sample 0, with the others in `others`. The caller must `leave` it.

        options: those of Engine.add.
        """
        first = cast(Generation, super().start(prompt, sampling, **options))
        names = [f"{first.request.id}/{i}" for i in range(1, sampling.n)]
        first.others = [self.follow(self.engine.requests[name]) for name in names]
        return first

    def follow(self, request: Request) -> Generation:
        self._live[request.id] = generation = Generation(self, request)
        return generation

    def step(self) -> StepResult:
        """One step of the engine; each token goes to its request, also to one that another caller streams.

        Ctrl-C waits for its end: interrupted in the middle, neither the engine nor the other requests could go on.
        """
        with uninterrupted():
            return super().step()

    def leave(self, generation: core_llm.Generation) -> None:
        """Drops it, with its other samples; what is not finished is aborted and its blocks are freed now."""
        for other in cast(Generation, generation).others:
            super().leave(other)
        super().leave(generation)


class Generation(core_llm.Generation):
    """One request with its text. others: with n > 1, the other samples of the same prompt."""

    engine: Engine

    def __init__(self, llm: LLM, request: Request):
        super().__init__(llm, request)
        self.others: list[Generation] = []

    @property
    def unfinished(self) -> bool:
        return super().unfinished or any(other.unfinished for other in self.others)

    def take_back(self, num_tokens: int) -> None:
        super().take_back(num_tokens)
        self.engine.trace.amend(self.request.id, "stop", len(self.request.output_tokens))

    def output(self) -> RequestOutput:
        r, plain = self.request, super().output()
        return RequestOutput(
            **{field.name: getattr(plain, field.name) for field in fields(plain)},
            metrics=self.engine.trace.metrics(r.id),
            others=tuple(other.output() for other in self.others),
            prompt_logprobs=None if r.sampling.prompt_logprobs is None else [None, *r.prompt_logprobs],
            error=r.error,
        )


def _split(
    model: str | Path | None, dtype: torch.dtype, device: torch.device, config: EngineConfig, parts: Parts | None,
    quantization: Quantizations,
) -> Engine:  # fmt: skip
    from reference_impl.assembly.split import split_engine

    if model is None:
        raise ValueError("worker='process' loads its model from a folder: expected one, got dummy_weights")
    name = str(dtype).removeprefix("torch.")
    return split_engine(Path(model), config, dtype=name, device=str(device), parts=parts, quantization=quantization)


def _config_of(model: str | Path | None, shape: Shape | None, dummy_weights: bool) -> ModelConfig:
    if model is not None and shape is None and not dummy_weights:
        return read_model_config(model)
    if model is None and shape is not None and dummy_weights:
        return config_of_shape(shape)
    if model is None and shape is not None:
        raise ValueError(
            "LLM(shape=...): a shape has no weights. Pass dummy_weights=True for random ones, whose tokens mean "
            "nothing, or the folder of a model instead"
        )
    raise ValueError(
        "LLM: expected the folder of a model, or shape=... and dummy_weights=True, got "
        f"model={model!r}, shape={shape!r}, dummy_weights={dummy_weights}"
    )
