"""The front door: a folder of weights, text in, text out.

llm = LLM(course_model("target"))
print(llm.generate(["def fibonacci(n):"], SamplingParams(max_tokens=32, temperature=0))[0].text)
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from reference_impl.annexes.cpu.processor import cpu_has_bf16, use_no_more_threads_than_cores
from reference_impl.assembly.linear_methods import Quantizations
from reference_impl.assembly.model import dummy_model, load_model
from reference_impl.beam import Beam, beam_search
from reference_impl.config import EngineConfig, ModelConfig
from reference_impl.detokenizer import TextStream
from reference_impl.engine import Engine, StepResult
from reference_impl.interfaces import Pooling, Request, SamplingParams, TokenLogprobs
from reference_impl.memory import give_back
from reference_impl.metrics import RequestMetrics
from reference_impl.models.config_json import read_model_config
from reference_impl.models.shapes import Shape, config_of_shape
from reference_impl.parts import Parts
from reference_impl.prompts import Prompt, PromptEncoder

Worker = Literal["here", "process"]
DTYPES = ("float32", "bfloat16", "float16", "float64")  # that the engine computes in


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. text stops before a stop string; token_ids keeps every generated token.

    finish_reason: "stop" (an end token or a stop string), "length", or "abort".
    others: with n > 1, samples 1 ... n - 1 of the same prompt; this one is sample 0.
    prompt_logprobs: one for each prompt token if they were asked for, None for the first, before which nothing stands;
    those of sample 0 are every sample's. Of a request that was aborted while its prompt was read there may be fewer.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprobs]
    metrics: RequestMetrics
    others: tuple[RequestOutput, ...] = ()
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class LLM(PromptEncoder):
    """An engine with a tokenizer.

    model: a Hugging Face folder. Or shape, with dummy_weights=True: a model of that shape with random weights and
    without a tokenizer (see models/shapes.py). dtype: "float32", "bfloat16", ... or None: see `choose_dtype`.
    quantization: "none", or how the linear layers' weights are stored: "fp8", "int8", "int4"; or a function from a
    layer's name to one of these (see `load_model`). worker: "process" has the model compute in a process of its own, to
    which steps go as messages, while this one plans. Other options: see EngineConfig and Parts.
    """

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
        super().__init__(None if model is None else Path(model))
        device = choose_device(device)
        config = EngineConfig(**engine_options)
        if device.type == "cpu":
            use_no_more_threads_than_cores()
        dtype = choose_dtype(dtype, stored.dtype, device)
        options = dtype, device, config.max_model_len, config.attention, quantization
        give_back(device)
        if worker == "process":
            self.engine = _split(model, dtype, device, config, parts, quantization)
        elif worker == "here":
            weights = dummy_model(stored, *options) if model is None else load_model(model, *options)
            self.engine = Engine(weights, config, parts)
        else:
            raise ValueError(f"worker: expected 'here' or 'process', got {worker!r}")
        self._live: dict[str, Generation] = {}  # requests whose text is still growing, for any caller of step

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

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "mean") -> list[list[float]]:
        """Of each prompt [hidden_size]: the mean of its tokens' hidden states, or that of the last; not normalised."""
        requests: list[Request] = []
        try:
            for prompt in _as_list(prompts):
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

    # --- for callers that step the engine: a server, or a notebook that watches --------------------------------------

    def start(self, prompt: Prompt, sampling: SamplingParams, **options: Any) -> Generation:
        """Queues a prompt; sample 0, with the others in `others`. The caller must `leave` it.

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
        """One step of the engine; each token goes to its request, also to one that another caller streams.

        Ctrl-C waits for its end: interrupted in the middle, neither the engine nor the other requests could go on.
        """
        with _uninterrupted():
            result = self.engine.step()
            for request_id, tokens in result.tokens.items():
                if request_id in self._live:
                    self._live[request_id].push(tokens)
        return result

    def leave(self, generation: Generation) -> None:
        """Drops it, with its other samples; what is not finished is aborted and its blocks are freed now."""
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
        self._new = ""  # text not yet taken

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

    def push(self, tokens: Sequence[int]) -> None:
        if self.text is None:
            return
        left = len(tokens)
        for token in tokens:
            left -= 1
            if left or self.request.finish_reason != "stop":  # an end token says "stop"; it is not text
                self._new += self.text.push(token)
            if self.text.stopped_by is not None:
                break
        if self.request.id not in self.engine.requests:
            if self.text.stopped_by is not None:
                self.request.drop(left)
                self.engine.trace.amend(self.request.id, "stop", len(self.request.output_tokens))
            self._new += self.text.finish()
        elif self.text.stopped_by is not None:
            self.engine.abort(self.request.id, reason="stop", num_dropped=left)

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
            prompt_logprobs=None if r.sampling.prompt_logprobs is None else [None, *r.prompt_logprobs],
        )


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C is raised at the end of the block; pressed twice, at once. With another handler installed, or outside
    the main thread, nothing changes."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def note(*_: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


def _split(
    model: str | Path | None, dtype: torch.dtype, device: torch.device, config: EngineConfig, parts: Parts | None,
    quantization: Quantizations,
) -> Engine:  # fmt: skip
    from reference_impl.split import split_engine

    if model is None:
        raise ValueError("worker='process' loads its model from a folder: expected one, got dummy_weights")
    name = str(dtype).removeprefix("torch.")
    return split_engine(Path(model), config, dtype=name, device=str(device), parts=parts, quantization=quantization)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, or token ids) or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    return [cast(Prompt, prompts)] if prompts and isinstance(prompts[0], int) else list(cast(Sequence[Prompt], prompts))


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


def choose_device(asked: str | torch.device | None) -> torch.device:
    """What is asked for, or else a GPU where torch sees one. ValueError where it is not there.

    Of several GPUs it is the first: kernels, streams and graphs are made where torch is, and that is said in one place.
    """
    gpus = torch.cuda.device_count()
    if asked is None:
        return torch.device("cuda" if gpus else "cpu")
    here = "cpu, cuda" if gpus else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise ValueError(f"device: expected one of {here}, got {asked!r}") from None
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(f"device: expected one of {here}, got {asked!r}: torch {torch.__version__} sees {gpus} GPUs")
    if device.index:
        raise ValueError(
            f"device: expected one of {here}, got {asked!r}: of several GPUs torch shall see one; start with the "
            f"environment variable CUDA_VISIBLE_DEVICES={device.index} and ask for cuda"
        )
    return device


def choose_dtype(asked: str | torch.dtype | None, stored: str, device: torch.device) -> torch.dtype:
    """What is asked for, or else the checkpoint's own where the device computes in it.

    A CPU without bf16 arithmetic gets float32, a GPU before compute capability 8.0 (a T4) float16 for bfloat16.
    """
    name = stored if asked is None else str(asked).removeprefix("torch.")
    if name not in DTYPES:
        hint = "; for weights in 8 bits: quantization='fp8'" if name.startswith("float8") else ""
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {asked!r}{hint}")
    found: torch.dtype = getattr(torch, name)
    if asked is None and device.type == "cpu" and not cpu_has_bf16():
        return torch.float32
    if asked is None and device.type == "cuda" and found is torch.bfloat16:
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return found
