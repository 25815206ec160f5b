"""The front door: a folder of weights, text in, text out.

llm = LLM(course_model("target"))
print(llm.generate(["def fibonacci(n):"], SamplingParams(max_tokens=32, temperature=0))[0].text)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from reference_impl.beam import Beam, beam_search
from reference_impl.config import EngineConfig
from reference_impl.detokenizer import TextStream
from reference_impl.engine import Engine, Parts, StepResult
from reference_impl.interfaces import Request, SamplingParams, TokenLogprobs
from reference_impl.metrics import RequestMetrics
from reference_impl.models.loader import load_model
from reference_impl.prompts import Prompt, PromptEncoder


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. text stops before a stop string; token_ids keeps every generated token.

    finish_reason: "stop" (an end token or a stop string), "length", or "abort".
    others: with n > 1, samples 1 ... n - 1 of the same prompt; this one is sample 0.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprobs]
    metrics: RequestMetrics
    others: tuple[RequestOutput, ...] = ()


class LLM(PromptEncoder):
    """An engine with a tokenizer.

    model: a Hugging Face folder. dtype: "float32", "bfloat16", ... or None for the checkpoint's own, except
    that a CPU without bf16 arithmetic gets float32. Other options: see EngineConfig and Parts.
    """

    def __init__(
        self,
        model: str | Path,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        parts: Parts | None = None,
        **engine_options: Any,
    ):
        super().__init__(Path(model))
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        config = EngineConfig(**engine_options)
        weights = load_model(model, _dtype(dtype, device), device, config.max_model_len, config.attention)
        self.engine = Engine(weights, config, parts)
        self._live: dict[str, Generation] = {}  # requests whose text is still growing, whoever steps the engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Runs all prompts together; results in the order of the prompts."""
        batch = _as_list(prompts)
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

    def beam_search(
        self, prompt: Prompt, width: int = 4, max_tokens: int = 128, length_penalty: float = 1.0
    ) -> list[Beam]:
        """The `width` most probable texts found, best first: see `beam.py`."""
        return beam_search(self.engine, self.encode(prompt), width, max_tokens, length_penalty, self.step)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of text as they become certain. Leaving the loop early aborts the request."""
        sampling = sampling or SamplingParams()
        if sampling.n != 1:
            raise ValueError(f"stream: expected SamplingParams(n=1), got n={sampling.n}: start one stream per sample")
        running = self.start(prompt, sampling)
        try:
            while running.unfinished:
                self.step()
                if piece := running.take():
                    yield piece
            if piece := running.take():
                yield piece
        finally:
            self.leave(running)

    def chat(self, messages: Sequence[dict[str, str]], sampling: SamplingParams | None = None) -> RequestOutput:
        return self.generate(self.chat_prompt(messages), sampling)[0]

    # --- for those who step the engine themselves: a server, or a notebook that watches ------------------------------

    def start(self, prompt: Prompt, sampling: SamplingParams, **options: Any) -> Generation:
        """Queues a prompt; sample 0, with the others in `others`. Whoever starts it must `leave` it.

        options: those of Engine.add.
        """
        tokens = self.encode(prompt)
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: use stop_token_ids")
        request = self.engine.add(tokens, sampling, **options)
        members = [request, *(self.engine.requests[f"{request.id}/{i}"] for i in range(1, sampling.n))]
        first, *others = (Generation(self, member, tokens) for member in members)
        first.others = others
        for sample in (first, *others):
            self._live[sample.request.id] = sample
        return first

    def step(self) -> StepResult:
        """One step of the engine; each token goes to its request, also to one that another caller streams."""
        result = self.engine.step()
        for request_id, token in result.tokens.items():
            if request_id in self._live:
                self._live[request_id].push(token)
        return result

    def leave(self, generation: Generation) -> None:
        """Forgets it, with its other samples; what is not finished is aborted and gives its blocks back now."""
        for r in (*generation.others, generation):
            del self._live[r.request.id]
            if r.request.id in self.engine.requests:
                self.engine.abort(r.request.id)


class Generation:
    """One request with its text. others: with n > 1, the other samples of the same prompt."""

    def __init__(self, llm: LLM, request: Request, prompt: list[int]):
        self.engine, self.request = llm.engine, request
        self.text = TextStream(llm.tokenizer, prompt, request.sampling.stop) if llm.tokenizer else None
        self.others: list[Generation] = []
        self._new = ""  # text that nobody took yet

    @property
    def unfinished(self) -> bool:
        return self.finish_reason is None or any(other.unfinished for other in self.others)

    @property
    def finish_reason(self) -> str | None:
        """Of this sample: "stop" (an end token or a stop string), "length", "abort"; None while it runs."""
        if self.request.id in self.engine.requests:
            return None
        stopped = self.text is not None and self.text.stopped_by is not None
        return "stop" if stopped else self.request.finish_reason

    def push(self, token: int) -> None:
        if self.text is None:
            return
        if self.request.finish_reason != "stop":  # an end token says "stop"; it is not text
            self._new += self.text.push(token)
        if self.request.id not in self.engine.requests:
            self._new += self.text.finish()
        elif self.text.stopped_by is not None:
            self.engine.abort(self.request.id, reason="stop")

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
            metrics=self.engine.trace.metrics(r.id),
            others=tuple(other.output() for other in self.others),
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, or token ids) or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    return [cast(Prompt, prompts)] if prompts and isinstance(prompts[0], int) else list(cast(Sequence[Prompt], prompts))


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | None:
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ValueError(f"dtype: expected float32, bfloat16, float16 or float64, got {dtype!r}")
        return found
    if dtype is None and device.type == "cpu" and not cpu_has_bf16():
        return torch.float32
    return dtype


def cpu_has_bf16() -> bool:
    """True where an x86 CPU has bf16 arithmetic (AVX512-BF16 or AMX). Elsewhere, Arm included, bf16 may be slow."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
