"""The engines that the cases of the GPU bench measure, what is known of this machine, and the time that is left."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from reference_impl.assembly.llm import LLM
from reference_impl.assembly.worker import LocalExecutor
from reference_impl.bench.gpu_bounds import Limits, work_of
from reference_impl.bench.kernels import Place
from reference_impl.features.fusion.decoder import FusedDecoder
from reference_impl.interfaces import SamplingParams

# The same families with everything small, for a dry run: Hugging Face configs.
_TINY = {
    "vocab_size": 10_240, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "llama-3-8b": {**_TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3-0.6b": {**_TINY, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-30b-a3b": {
        **_TINY, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
}  # fmt: skip
# Tokens that the cache has room for, and requests in a step: the 256 requests of the workload all at once; a batch of
# 256 with 512 tokens and some more. An engine with quantized weights serves one stream.
ROOM = {"qwen3-0.6b": (290_000, 256), "llama-3-8b": (256 * 640, 256), "qwen3-30b-a3b": (64 * 640, 64)}
BLOCK_SIZE = 64  # tokens in a KV block on the GPU; the engine's own default, 16, is for readability
TOKENS = "tokens/s"
Tokens = list[list[int]]


class LeftOut(Exception):
    """There is not enough time left for this, or this machine has no such peer."""


@dataclass
class Bench(Place):
    """The device and its time, what is known of this machine, and the engines of the case that runs.

    tiny: a dry run, on any machine. rounds: runs or windows of each figure. deadline: of the whole, on time.monotonic.
    limits: as `gpu_cases.limits` measures them; {}: unknown, and figures without a limit still count.
    """

    rounds: int = 5
    deadline: float = float("inf")
    limits: dict[str, float] = field(default_factory=dict)
    configurations: dict[str, Any] = field(default_factory=dict)
    stamp: dict[str, Any] = field(default_factory=dict)
    _engines: dict[str, LLM] = field(default_factory=dict)

    def limit(self, count: Callable[[Limits], float]) -> float | None:
        """The limit that `count` computes from those of this machine; None where they could not be measured."""
        return count(Limits(self.limits["copy"], self.limits["16 bits"])) if self.limits else None

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def need(self, seconds: float) -> None:
        """Raises LeftOut unless so many seconds are left. A dry run needs only that the deadline has not passed."""
        if self.left < self.pick(seconds, 0):
            raise LeftOut(f"left out: needs about {seconds:.0f} s, {max(0.0, self.left):.0f} s are left")

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def llm(self, shape: str, folder: Path | None = None, **options: Any) -> LLM:
        """The engine of this shape and these options, made on first use: with random weights, or a folder's."""
        tokens, seats = self.pick((4096, 1) if "quantization" in options else ROOM[shape], (4096, 8))
        block_size = self.pick(BLOCK_SIZE, 16)
        options = {
            "dtype": self.dtype, "device": self.device, "block_size": block_size, "max_num_seqs": seats,
            "num_blocks": -(-tokens // block_size) + 2 * seats, "max_num_batched_tokens": self.pick(16_384, 512),
            "max_model_len": self.pick(8192 if shape == "llama-3-8b" else 4096, 2048), "prefix_cache": "off",
        } | options  # fmt: skip
        key = f"{folder or shape} {sorted(options.items(), key=str)}"
        if key not in self._engines:
            began = time.monotonic()
            random: dict[str, Any] = {"shape": TINY[shape] if self.tiny else shape, "dummy_weights": True}
            self._engines[key] = LLM(folder, **options) if folder else LLM(**random, **options)
            # As a server does (serving/worker.py): the garbage collector then scans what requests leave, not the model.
            gc.collect()
            gc.freeze()
            said = {name: value if isinstance(value, int) else str(value) for name, value in options.items()}
            self.configurations[key] = {"options": said, "seconds_to_make": time.monotonic() - began}
        return self._engines[key]

    def known(self) -> dict[str, Any]:
        """What is known for the record: this machine, and the engines with what they chose to compute with so far."""
        for key, llm in self._engines.items():
            engine, work = llm.engine, work_of(llm.engine)
            self.configurations[key] |= {
                "bytes_per_step_but_kv": work.weights(1), "kv_bytes_per_token": work.kv,
                "num_parameters": engine.model.num_parameters(), "overlaps": engine.overlaps,
                "graphs": isinstance(engine.executor, LocalExecutor) and engine.executor.graphs is not None,
                "attention": type(engine.attention).__name__, "executor": statistics_of(llm),
                "choices": engine.model.choices() if isinstance(engine.model, FusedDecoder) else {},
            }  # fmt: skip
        return {"stamp": self.stamp, "limits": self.limits, "configurations": self.configurations}


def statistics_of(llm: LLM) -> dict[str, Any]:
    """What the executor counts: steps replayed from graphs, and others. Empty where it counts nothing."""
    executor = llm.engine.executor
    return dict(vars(executor.stats)) if isinstance(executor, LocalExecutor) else {}


def prompts_of(count: int, length: int) -> Tokens:
    """Prompts with different ids in each, below any vocabulary here."""
    return [[(7 * i + 13 * j) % 10_000 for j in range(length)] for i in range(count)]


def greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)


def requests(count: int = 256, longest_prompt: int = 1024, longest_output: int = 1024) -> tuple[Tokens, list[int]]:
    """(prompts as token ids, tokens of output each), as `bench.py` of nano-vllm draws them, in its order."""
    draw = random.Random(0)
    shortest = min(100, longest_prompt // 2), min(100, longest_output // 2)
    prompts = [
        [draw.randint(0, 10_000) for _ in range(draw.randint(shortest[0], longest_prompt))] for _ in range(count)
    ]
    return prompts, [draw.randint(shortest[1], longest_output) for _ in range(count)]


def timed(bench: Bench, llm: LLM, prompts: Tokens, sampling: list[SamplingParams]) -> tuple[float, Tokens]:
    """(seconds of generate, tokens of output). Raises RuntimeError where a request did not get as many as it asked
    for."""
    bench.wait()
    began = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    seconds, given = time.perf_counter() - began, [output.token_ids for output in outputs]
    if [len(tokens) for tokens in given] != [one.max_tokens for one in sampling]:
        raise RuntimeError(
            f"expected {sum(one.max_tokens or 0 for one in sampling)} tokens, got {sum(map(len, given))}"
        )
    return seconds, given
