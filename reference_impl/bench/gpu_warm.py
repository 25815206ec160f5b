"""`python -m reference_impl.bench.gpu_warm`: compiles what the tests and the bench on a GPU launch, on all cores.

Triton compiles a kernel at its first launch: a second or two on one core, for some two hundred of them. It keeps
them on disk. So before tests and bench begin, their work is done once in processes side by side, with models of two
layers. A failure here is named and does no harm: it occurs again where it is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from reference_impl.assembly.llm import LLM
from reference_impl.bench import kernels
from reference_impl.bench.gpu_engines import BLOCK_SIZE, TINY
from reference_impl.bench.gpu_predict import FEW_TOKENS
from reference_impl.bench.kernel_cases import CASES
from reference_impl.bench.kernel_work import Place
from reference_impl.interfaces import SamplingParams
from reference_impl.models.shapes import SHAPES

# (shape, options, requests in a step: each of these has tiles of its own).
ENGINES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("qwen3-0.6b", {}, (FEW_TOKENS, 32, 8)),
    ("llama-3-8b", {}, (FEW_TOKENS, 32, 8)),
    ("qwen3-30b-a3b", {}, (FEW_TOKENS, 8)),
    ("llama-3-8b", {"quantization": "fp8"}, (1,)),
    ("llama-3-8b", {"quantization": "int4"}, (1,)),
    ("qwen3-0.6b", {"kv_dtype": "fp8"}, (8,)),
]
WORKERS = 14  # at most: each has a context of the driver's and some gigabytes of the GPU
PROMPTS = (1000, 100, 3)  # tokens: they cover every choice made by the number of tokens
Job = tuple[Any, ...]  # ("engine", shape, options, rows) or ("kernel", name of a case)


def jobs(tiny: bool = False) -> list[Job]:
    """Kernels first: they are short, and the tests that come next launch them; then the longest. A dry run has one
    kernel and each engine once."""
    engines = [
        ("engine", shape, {**options, **({"dependent_launches": "on"} if dependent else {})}, n)
        for shape, options, rows in ENGINES
        for n in (rows[-1:] if tiny else rows)
        for dependent in ((False,) if tiny else (True, False))
    ]
    return [*(("kernel", case.name) for case in (CASES[:1] if tiny else CASES)), *engines]


def run(job: Job, tiny: bool) -> str:
    """Does the work of a job. Returns what went wrong, or ""."""
    try:
        if job[0] == "kernel":
            [case] = [case for case in CASES if case.name == job[1]]
            device, dtype = ("cpu", torch.float16) if tiny else ("cuda", torch.bfloat16)
            case.make(Place(torch.device(device), dtype, tiny)).ours()
        else:
            _, shape, options, rows = job
            _engine(shape, options, rows, tiny)
    except Exception as error:  # what stops one job must not stop the others
        return f"{job}: {type(error).__name__}: {str(error).strip()[:200]}"
    finally:
        if not tiny:
            torch.cuda.empty_cache()
    return ""


def _engine(shape: str, options: dict[str, Any], rows: int, tiny: bool) -> None:
    made: dict[str, Any] = (
        {"shape": TINY[shape], "dtype": "float32", "device": "cpu"}
        if tiny
        else {"shape": SHAPES[shape] | {"num_hidden_layers": 2}, "dtype": "bfloat16", "device": "cuda"}
    )
    llm = LLM(
        **made, dummy_weights=True, block_size=BLOCK_SIZE, num_blocks=64, max_num_seqs=rows, max_model_len=2048,
        prefix_cache="off", **options,
    )  # fmt: skip
    llm.engine.capture_graphs(1)  # of each number of rows, for the shortest contexts: the others have the same kernels
    for length in PROMPTS:
        llm.generate([[1] * length], SamplingParams(max_tokens=2, temperature=0.6, ignore_eos=True))
    llm.engine.close()


def warm(todo: Sequence[Job], workers: int, seconds: float, tiny: bool = False) -> list[str]:
    """Runs jobs while there is time; returns what went wrong. A process that dies loses its job."""
    deadline, problems, done = time.monotonic() + seconds, list[str](), 0
    # A new process: one that has used the GPU must not be forked.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        found = pool.imap_unordered(_run, [(job, tiny) for job in todo])
        try:
            while done < len(todo):
                problems += filter(None, [found.next(timeout=max(0.0, deadline - time.monotonic()))])
                done += 1
        except multiprocessing.TimeoutError:
            problems.append(f"after {seconds:.0f} s {done} of {len(todo)} jobs were done")
    return problems


def _run(given: tuple[Job, bool]) -> str:
    return run(*given)


def main(arguments: Sequence[str] | None = None) -> int:
    """0, whatever fails here. 2: this machine lacks what the bench needs."""
    parser = argparse.ArgumentParser(prog="python -m reference_impl.bench.gpu_warm", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=min(WORKERS, os.cpu_count() or 1))
    parser.add_argument("--dry-run", action="store_true", help="everything tiny, on any machine")
    options = parser.parse_args(arguments)
    if not options.dry_run and (not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
        print(kernels.NEEDS, file=sys.stderr)
        return 2
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # of the processes that do the work
    began, todo = time.monotonic(), jobs(options.dry_run)
    for problem in warm(todo, options.workers, options.seconds, options.dry_run):
        print(problem)
    took = time.monotonic() - began
    print(f"compiled ahead: {len(todo)} jobs, {options.workers} at a time, {took:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
