"""`transformers` beside us on one GPU: the same weights, the same prompts, as many tokens; in turns, in one run.

The weights are random, drawn by `transformers` for the shape of Qwen3-0.6B, saved, and loaded by both. Greedy tokens
are compared: where they diverge, the two tokens must be a near-tie. Without FlashAttention, `transformers` runs its
continuous batching on paged SDPA, about five times slower than its path through FlashAttention-3.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reference_impl.bench import harness
from reference_impl.bench.gpu_decode import prompts_of
from reference_impl.bench.gpu_engines import BLOCK_SIZE, TINY, Bench
from reference_impl.bench.gpu_rows import Row
from reference_impl.bench.gpu_workload import requests
from reference_impl.bench.peer import agreement
from reference_impl.interfaces import SamplingParams
from reference_impl.models.shapes import SHAPES

ROWS = ("generate, qwen3-0.6b bf16, 1,024 in and 128 out", "64 requests, qwen3-0.6b bf16, 128 out each")
SPARE_SECONDS = 180.0  # with less left, the static cache, whose step `transformers` compiles, would cost later cases
Tokens = list[list[int]]
Run = Callable[[], tuple[float, Tokens]]  # (seconds, tokens of output)


class Peer:
    """Qwen3 in `transformers` on the bench's device, and the folder from which we load the same weights."""

    def __init__(self, bench: Bench, folder: Path):
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.bench, self.folder = bench, folder
        config = transformers.Qwen3Config(**bench.pick(SHAPES, TINY)["qwen3-0.6b"])
        torch.manual_seed(0)
        with bench.device:
            transformers.Qwen3ForCausalLM(config).to(bench.dtype).save_pretrained(folder)
        # A loaded model keeps its rotary frequencies in float32, as all others do; .to() above rounded them, too.
        loaded = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=bench.dtype)
        self.model = loaded.to(bench.device).eval()
        # Stopping at an end token would make the work unequal.
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, prompts: Tokens, new_tokens: int, cache: str) -> tuple[float, Tokens]:
        """One batch, padded on the left. The static cache compiles the step on a GPU, with its own CUDA graphs."""
        longest = max(map(len, prompts))
        began = time.perf_counter()
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self.bench.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.bench.device)
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
            cache_implementation=cache,
        )  # fmt: skip
        tokens = out[:, longest:].tolist()
        return time.perf_counter() - began, tokens

    def continuous(self, prompts: Tokens, new_tokens: int) -> tuple[float, Tokens]:
        """Its continuous batching, with blocks for all requests at once; starting its thread is not timed."""
        import transformers
        from transformers.generation import ContinuousBatchingConfig

        page = self.bench.pick(256, 32)
        blocks = sum(-(-(len(p) + new_tokens) // page) + 1 for p in prompts)
        fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        size = {"page_size" if "page_size" in fields else "block_size": page}  # 5.17 says block_size, 5.23 page_size
        config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=self.bench.pick(8192, 512), **size)
        generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        done: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, warmup=self.bench.device.type == "cuda"
        ) as manager:
            began = time.perf_counter()
            for i, prompt in enumerate(prompts):
                manager.add_request(prompt, str(i), max_new_tokens=new_tokens)
            while len(done) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the continuous batching of transformers ended before its requests did")
            seconds = time.perf_counter() - began
        return seconds, [done[str(i)] for i in range(len(prompts))]

    @torch.inference_mode()
    def next_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[vocab_size] float32 on the host, after tokens."""
        return self.model(torch.tensor([list(tokens)], device=self.bench.device)).logits[0, -1].float().cpu()


def peers(bench: Bench) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        peer = Peer(bench, Path(name))
        room = {"num_blocks": bench.pick(64 * 1152 // BLOCK_SIZE + 256, 256), "max_num_seqs": 64}
        llm = bench.llm("qwen3-0.6b", folder=peer.folder, **room)

        def ours(prompts: Tokens, new_tokens: int) -> tuple[float, Tokens]:
            sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
            bench.wait()
            began = time.perf_counter()
            outputs = llm.generate(prompts, sampling)
            return time.perf_counter() - began, [output.token_ids for output in outputs]

        one, new = prompts_of(1, bench.pick(1024, 24)), bench.pick(128, 6)
        runs: dict[str, Run] = {
            "ours": partial(ours, one, new), "generate, dynamic cache": partial(peer.generate, one, new, "dynamic"),
        }  # fmt: skip
        static = {"generate, static cache": "left out: no time to compile"}
        if bench.tiny or bench.left > SPARE_SECONDS:
            runs, static = runs | {"generate, static cache": partial(peer.generate, one, new, "static")}, {}
        yield compared(bench, ROWS[0], peer, one, new, runs, static)
        many = requests(*bench.pick((64, 1024, 1024), (4, 24, 8)))[0]
        runs = {
            "ours": partial(ours, many, new), "padded generate": partial(peer.generate, many, new, "dynamic"),
            "continuous batching, paged SDPA": partial(peer.continuous, many, new),
        }  # fmt: skip
        yield compared(bench, ROWS[1], peer, many, new, runs, {})


def compared(
    bench: Bench, metric: str, peer: Peer, prompts: Tokens, new: int, runs: dict[str, Run], left_out: dict[str, str]
) -> Row:
    """Each in its turn; the first round warms up. A peer that cannot run is named, with its reason."""
    rounds = bench.pick(3, 1)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    said: dict[str, Tokens] = {}
    problems = dict(left_out)
    for turn in range(rounds + 1):
        for name in list(runs):
            if name in problems or (turn > 1 and bench.left < 20):
                continue
            try:
                taken, said[name] = runs[name]()
            except Exception as error:
                if name == "ours":
                    raise
                problems[name] = f"{type(error).__name__}: {error}"[:200]
                continue
            if turn:
                seconds[name].append(taken)
    total = len(prompts) * new
    for name, tokens in said.items():
        if [len(row) for row in tokens] != [new] * len(prompts):
            raise RuntimeError(f"{name}: expected {new} tokens for each prompt, got {[len(row) for row in tokens]}")
    same, wrong = dict[str, Any](), list[str]()
    for name in said.keys() - {"ours"}:
        try:
            same[name] = agreement(peer, prompts, said["ours"], said[name])  # type: ignore[arg-type]
        except RuntimeError as error:  # the times are measured, and worth keeping
            wrong.append(f"{name}: {error}"[:300])
    rates = {name: [total / s for s in taken] for name, taken in seconds.items() if taken}
    others = {name: statistics.median(values) for name, values in rates.items() if name != "ours"}
    best = max(others, key=others.__getitem__) if others else None
    notes = [f"{name} did not run: {problem}" for name, problem in problems.items()]
    return Row(
        metric, "tokens/s", harness.spread(rates["ours"]), peer=None if best is None else (best, others[best]),
        note="; ".join(["with prefill", *notes]), problem="; ".join(sorted(wrong)),
        detail={
            "seconds": seconds, "tokens_per_second": others, "same_tokens": same, "did_not_run": problems,
            "prompt_tokens": [len(p) for p in prompts], "new_tokens": new,
        },
    )  # fmt: skip
