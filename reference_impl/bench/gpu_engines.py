"""The engines that the GPU bench measures: which shapes, with which options; made once, and kept while needed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from reference_impl.assembly.llm import LLM
from reference_impl.assembly.worker import LocalExecutor
from reference_impl.bench.gpu_bounds import Limits, Work, work_of
from reference_impl.features.fusion.decoder import FusedDecoder

# The same families with everything small, for a dry run: Hugging Face configs.
_TINY = {
    "vocab_size": 10_240, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "llama-3-8b": {**_TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3-0.6b": {
        **_TINY, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        **_TINY, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
}  # fmt: skip
# Tokens that the cache has room for, and requests in a step: the 256 requests of the workload all at once; a batch of
# 256 with 512 tokens and some more. An engine with quantized weights serves one stream.
ROOM = {"qwen3-0.6b": (290_000, 256), "llama-3-8b": (256 * 640, 256), "qwen3-30b-a3b": (64 * 640, 64)}
DEPENDENT = "dependent launches"  # among the configurations: whether engines use them
BLOCK_SIZE = 64  # tokens in a KV block on the GPU; the engine's own default, 16, is for readability


class OutOfTime(Exception):
    """There is not enough time left for this."""


@dataclass
class Bench:
    """Device and time; the limits of this machine, once they are measured; and the engines made so far.

    tiny: a dry run, on any machine. rounds: runs or windows of each figure. deadline: of the whole, on time.monotonic.
    """

    device: torch.device
    dtype: torch.dtype
    tiny: bool = False
    rounds: int = 5
    deadline: float = float("inf")
    limits: Limits | None = None
    raw_limits: dict[str, float] = field(default_factory=dict)
    configurations: dict[str, Any] = field(default_factory=dict)
    _engines: dict[str, LLM] = field(default_factory=dict)
    _short_lived: set[str] = field(default_factory=set)  # engines that no other case needs

    def limit(self, count: Callable[[Limits], float]) -> float | None:
        """count(limits of this machine); None where they could not be measured: figures without a limit still count."""
        return None if self.limits is None else count(self.limits)

    def know(self, raw: dict[str, float]) -> None:
        """Sets the limits from the result of `kernels.limits`; {} leaves them unknown."""
        self.raw_limits = raw
        if raw:
            self.limits = Limits(raw["copy"], raw["16 bits"], raw["fp8"])

    def pick(self, real: Any, tiny: Any) -> Any:
        return tiny if self.tiny else real

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def need(self, seconds: float) -> None:
        """OutOfTime unless so many seconds are left. A dry run needs only that the deadline has not passed."""
        if self.left < self.pick(seconds, 0):
            raise OutOfTime(f"left out: needs about {seconds:.0f} s, {max(0.0, self.left):.0f} s are left")

    def llm(self, shape: str, folder: Path | None = None, **options: Any) -> LLM:
        """The engine of this shape and these options, made on first use: with random weights, or a folder's."""
        tokens, seats = self.pick((4096, 1) if "quantization" in options else ROOM[shape], (4096, 8))
        block_size = self.pick(BLOCK_SIZE, 16)
        options = {
            "dtype": self.dtype, "device": self.device, "block_size": block_size, "max_num_seqs": seats,
            "num_blocks": -(-tokens // block_size) + 2 * seats, "max_num_batched_tokens": self.pick(16_384, 512),
            "max_model_len": self.pick(8192 if shape == "llama-3-8b" else 4096, 2048), "prefix_cache": "off",
        } | options  # fmt: skip
        if self.configurations.get(DEPENDENT, {}).get("use"):
            options["dependent_launches"] = "on"
        key = f"{folder or shape} {sorted(options.items(), key=str)}"
        if key not in self._engines:
            what: Any = TINY[shape] if self.tiny else shape
            began = time.monotonic()
            llm = LLM(folder, **options) if folder else LLM(shape=what, dummy_weights=True, **options)
            self._engines[key] = llm
            # As a server does (serving/worker.py): the garbage collector then scans what requests leave, not the model.
            gc.collect()
            gc.freeze()
            self._describe(key, options, llm, time.monotonic() - began)
            if folder or not self._asked_plainly(options):
                self._short_lived.add(key)
        return self._engines[key]

    @staticmethod
    def _asked_plainly(options: dict[str, Any]) -> bool:
        return not {"quantization", "kv_dtype"} & options.keys()

    def work(self, llm: LLM) -> Work:
        return work_of(llm.engine)

    def release(self, everything: bool = True) -> None:
        """Ends engines and gives their memory back; if not everything, only those that a single case needs."""
        self.wait()  # a graph must not be freed while it runs
        going = list(self._engines) if everything else list(self._short_lived)
        if not going:
            return
        for key in going:
            self._engines.pop(key).engine.close()
        self._short_lived.clear()
        gc.unfreeze()  # what was frozen is not collected
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _describe(self, name: str, options: dict[str, Any], llm: LLM, seconds: float) -> None:
        """What was made, for the record."""
        work, executor = work_of(llm.engine), llm.engine.executor
        self.configurations[name] = {
            "options": {key: value if isinstance(value, int) else str(value) for key, value in options.items()},
            "seconds_to_make": seconds,
            "bytes_per_step_but_kv": work.weights(1),
            "kv_bytes_per_token": work.kv,
            "num_parameters": llm.engine.model.num_parameters(),
            "overlaps": llm.engine.overlaps,
            "graphs": isinstance(executor, LocalExecutor) and executor.graphs is not None,
            "attention": type(llm.engine.attention).__name__,
        }

    def record(self) -> None:
        """What the engines chose to compute with so far, for how many tokens, and how many graphs they replayed."""
        for key, llm in self._engines.items():
            model = llm.engine.model
            choices = model.choices() if isinstance(model, FusedDecoder) else {}
            self.configurations.setdefault(key, {}).update(choices=choices, executor=statistics_of(llm))


def statistics_of(llm: LLM) -> dict[str, Any]:
    """What the executor counts: steps replayed from graphs, and others. Empty where it counts nothing."""
    executor = llm.engine.executor
    return dict(vars(executor.stats)) if isinstance(executor, LocalExecutor) else {}
