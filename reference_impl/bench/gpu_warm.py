"""What the cases of the GPU bench launch, compiled before they are measured."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from reference_impl.assembly.llm import LLM
from reference_impl.bench import kernel_cases
from reference_impl.bench.gpu_engines import BLOCK_SIZE, TINY
from reference_impl.bench.kernels import Place
from reference_impl.interfaces import SamplingParams
from reference_impl.models.shapes import SHAPES

SECONDS = 60.0
WORKERS = 14  # at most: each has a context of the driver's and some gigabytes of the GPU
# What is compiled: (shape, options, requests in a step: each of these has tiles of its own).
ENGINES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("qwen3-0.6b", {}, (64, 32, 8)),
    ("llama-3-8b", {}, (64, 32, 8)),
    ("qwen3-30b-a3b", {}, (64, 8)),
    ("llama-3-8b", {"quantization": "fp8"}, (1,)),
    ("llama-3-8b", {"quantization": "int4"}, (1,)),
    ("qwen3-0.6b", {"kv_dtype": "fp8"}, (8,)),
]
Job = str | tuple[str, dict[str, Any], int]  # the name of a kernel's case, or an engine


def jobs() -> list[Job]:
    """What to compile: kernels first, by name, since they are short and the tests that come next launch them; then the
    longest jobs."""
    engines = [(shape, options, n) for shape, options, rows in ENGINES for n in rows]
    return [*(case.name for case in kernel_cases.CASES), *engines]


def compile_ahead(jobs: Sequence[Job], seconds: float, tiny: bool = False) -> list[str]:
    """Compiles what the cases launch, side by side, while there is time. Returns what went wrong, which does no harm:
    it occurs again where it is measured. Triton takes a second or two for each of some 200 kernels, and keeps them."""
    deadline, problems, done = time.monotonic() + seconds, list[str](), 0
    workers = min(WORKERS, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        found = pool.imap_unordered(compiled, [(job, tiny) for job in jobs])
        try:
            while done < len(jobs):
                problems += filter(None, [found.next(timeout=max(0.0, deadline - time.monotonic()))])
                done += 1
        except multiprocessing.TimeoutError:
            problems.append(f"after {seconds:.0f} s {done} of {len(jobs)} jobs were done")
    return [*problems, f"compiled ahead: {done} jobs, {workers} at a time"] if done else problems


def compiled(given: tuple[Job, bool]) -> str:
    """Does the work of (job, tiny), with models of two layers. Returns what went wrong, or ""."""
    job, tiny = given
    try:
        if isinstance(job, str):
            [case] = [case for case in kernel_cases.CASES if case.name == job]
            device, dtype = ("cpu", torch.float16) if tiny else ("cuda", torch.bfloat16)
            case.make(Place(torch.device(device), dtype, tiny)).ours()
            return ""
        shape, options, rows = job
        where: dict[str, Any] = (
            {"dtype": "float32", "device": "cpu"} if tiny else {"dtype": "bfloat16", "device": "cuda"}
        )
        llm = LLM(
            shape=TINY[shape] if tiny else SHAPES[shape] | {"num_hidden_layers": 2}, dummy_weights=True, **where,
            block_size=BLOCK_SIZE, num_blocks=64, max_num_seqs=rows, max_model_len=2048, prefix_cache="off", **options,
        )  # fmt: skip
        llm.engine.capture_graphs(1)  # of each number of rows, for the shortest contexts: all have the same kernels
        for length in (1000, 100, 3):  # they cover every choice made by the number of tokens
            llm.generate([[1] * length], SamplingParams(max_tokens=2, temperature=0.6, ignore_eos=True))
        llm.engine.close()
    except Exception as error:  # what stops one job must not stop the others
        return f"{job}: {type(error).__name__}: {str(error).strip()[:200]}"
    return ""
