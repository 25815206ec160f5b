"""`inferlab bench gpu`: where the engine stands on this GPU, against its limits, peers and the goals.

Also `python -m reference_impl.bench gpu` from the source tree, on a machine with torch, triton, numpy, safetensors and
tokenizers; transformers is measured beside us where it is installed. Kernels are compiled ahead on all cores, the
limits of the machine are measured, then each case of gpu_cases.py, each in a process of its own: what crashes, hangs or
breaks the GPU costs that case, which becomes a line with its error. Cases for which no time is left are named. The
results are written after every line, so that a kill loses nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from reference_impl.bench import gpu_cases, gpu_rows, gpu_warm, harness, kernels
from reference_impl.bench.gpu_cases import Case
from reference_impl.bench.gpu_engines import Bench, LeftOut
from reference_impl.bench.gpu_rows import Row

NEEDS = (
    "expected a GPU that torch sees (torch.cuda.is_available()), Triton, and no TRITON_INTERPRET; --dry-run tries this "
    "program on any machine that has Triton"
)
PATIENCE = 3  # a case is stopped after this many times its expected seconds
BEYOND = 20.0  # seconds for which a case may run on past the deadline
START = "forkserver"  # a fork of a process that has imported everything, and has not used the GPU


def markdown(result: dict[str, Any]) -> str:
    """The table in Markdown, and under it where, when and against which limits it was measured."""
    rows = [gpu_rows.from_json(row) for row in result["rows"]]
    return "\n".join([*gpu_rows.table(rows), "", *remarks(result), "", *gpu_rows.notes(rows)]).rstrip()


def remarks(result: dict[str, Any]) -> Iterator[str]:
    stamp = result["stamp"]
    versions = stamp["versions"]
    yield (
        f"{stamp['gpu'] or 'no GPU'}, driver {stamp.get('driver', 'unknown')}, torch {versions['torch']}, triton "
        f"{versions['triton']}, transformers {versions['transformers']}, Python {stamp['python']}, {stamp['date']}, "
        f"commit {stamp['commit']}. Ours: median of several windows or runs, and their range. Limits are those of this "
        "machine, measured in the same run: bytes of a step over the bandwidth of a copy, or operations over the rate "
        "of a large product. Reading alone can be faster than a copy, by some percent."
    )
    if result["dry_run"]:
        yield "A dry run with tiny models: every figure is meaningless."
    if not result["complete"]:
        yield "The run was ended before its last case."


def parser(name: str = "gpu") -> argparse.ArgumentParser:
    described = __doc__ if name == "gpu" else kernels.__doc__
    parser = argparse.ArgumentParser(prog=f"python -m reference_impl.bench {name}", description=described)
    parser.add_argument("--seconds", type=float, default=480.0, help="no case begins that would end after that")
    parser.add_argument("--only", default="", help="cases whose name contains this; nothing is saved without --out")
    parser.add_argument("--out", type=Path, help=f"where the results go; default: results/{name}.json")
    parser.add_argument("--no-save", action="store_true", help="write nothing")
    parser.add_argument("--dry-run", action="store_true", help="everything tiny, on any machine; nothing is saved")
    if name == "kernels":
        parser.set_defaults(seconds=270.0, rounds=kernels.ROUNDS, warm=0.0)
        return parser
    warm = "seconds for compiling ahead on all cores; 0: none"
    parser.add_argument("--rounds", type=int, default=5, help="windows or runs of a figure")
    parser.add_argument("--warm", type=float, default=gpu_warm.SECONDS, help=warm)
    return parser


def main(arguments: Sequence[str] | None = None, name: str = "gpu") -> int:
    """Runs the bench `gpu`, or `kernels`. 0: everything that ran is right. 1: something failed. 2: this machine lacks
    what it needs."""
    options = parser(name).parse_args(arguments)
    names = [case.name for case in gpu_cases.CASES] if name == "gpu" else gpu_cases.EVERY_KERNEL.metrics
    chosen = [known for known in names if options.only in known]
    if not chosen:
        parser(name).error(f"--only {options.only!r}: expected a part of one of: {'; '.join(names)}")
    if not options.dry_run and (not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
        print(NEEDS, file=sys.stderr)
        return 2
    out: Path | None = options.out
    if out is None and not (options.dry_run or options.no_save or options.only):  # a part must not replace the whole
        out = harness.RESULTS / f"{name}.json"
    if out and (out.is_dir() or not os.access(out if out.exists() else out.absolute().parent, os.W_OK)):
        print(f"--out {out}: expected a file that can be written, in a folder that exists", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.seconds
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # of the processes that measure, before a kernel is defined
    elif options.warm > 0 and not options.only:
        for problem in gpu_warm.compile_ahead(gpu_warm.jobs(), options.warm):
            print(problem, flush=True)
    device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)
    bench = Bench(torch.device(device), dtype, options.dry_run, options.rounds, deadline)
    cases = [case for case in gpu_cases.CASES if case.name in chosen]
    if name == "kernels":
        cases = [replace(gpu_cases.EVERY_KERNEL, metrics=tuple(chosen), seconds=10 + 2.5 * len(chosen))]
    result: dict[str, Any] = {"rows": []}
    try:
        for result in run(bench, cases):
            if out and any(row["ours"] for row in result["rows"]):
                harness.write(out, result)
    except KeyboardInterrupt:
        pass
    if not any(row["ours"] for row in result["rows"]):
        print("nothing was measured", file=sys.stderr)
        return 1
    print(f"\n{markdown(result)}")
    if out:
        out.with_suffix(".md").write_text(markdown(result) + "\n", "utf-8")
        print(f"wrote {out}")
    return int(any(failed(row) for row in result["rows"])) if result["complete"] else 130


def failed(row: dict[str, Any]) -> bool:
    return bool(row["problem"]) and not row["problem"].startswith(("left out", "torch has none"))


def run(bench: Bench, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yields the result so far after every line: each case in its turn is measured, failed, or left out."""
    result: dict[str, Any] = {"dry_run": bench.tiny, "complete": False, "rows": [], "seconds": {}}
    for case in [gpu_cases.LIMITS, *cases]:
        missing, began = list(case.metrics), time.monotonic()
        for found in measured(bench, case):
            for row in [found] if isinstance(found, Row) else [Row(metric, problem=found) for metric in missing]:
                row = gpu_cases.with_goal(row)
                missing.remove(row.metric)
                print("  ".join(gpu_rows.cells(row)), flush=True)
                result["rows"].append(row.to_json())
                bench.stamp = bench.stamp or harness.stamp()
                yield result | bench.known()
        result["seconds"][case.name] = time.monotonic() - began
    bench.stamp |= {"gpu_after": harness.gpu_state().get("gpu_state")}
    yield result | bench.known() | {"complete": True}


def measured(bench: Bench, case: Case) -> Iterator[Row | str]:
    """Yields the rows of the case, from a process of its own; last, why there are not more."""
    try:
        bench.need(case.seconds)
    except LeftOut as error:
        yield str(error)
        return
    allowed = bench.pick(max(1.0, min(PATIENCE * case.seconds, bench.left + BEYOND)), 300)
    context: Any = multiprocessing.get_context(START)
    if isinstance(context, multiprocessing.context.ForkServerContext):
        context.set_forkserver_preload([gpu_cases.__name__])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(bench, case.name, case.metrics, receiving, sending))
    process.start()
    sending.close()
    until = time.monotonic() + allowed
    try:
        while receiving.poll(max(0.0, until - time.monotonic())):
            said, known = receiving.recv()
            vars(bench).update(known)
            yield said
            if isinstance(said, str):
                return
        yield f"stopped after {allowed:.0f} s"
    except EOFError:
        process.join()
        yield f"the process that measured it ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _measure(
    bench: Bench, name: str, metrics: Sequence[str], receiving: Connection, sending: Connection
) -> None:  # fmt: skip
    """Measures in the process. When its parent is gone it ends with the next line, since the pipe is closed."""
    receiving.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    [case] = [case for case in (gpu_cases.LIMITS, *gpu_cases.CASES, gpu_cases.EVERY_KERNEL) if case.name == name]
    try:
        for row in case.run(bench, metrics):
            sending.send((row, bench.known()))
        problem = f"{name} ended without it"
    except BrokenPipeError:
        raise SystemExit("the process that started this one is gone") from None
    except LeftOut as error:
        problem = str(error)
    except Exception as error:  # what stops one case must not hide the others
        problem = kernels.said(error)
    sending.send((problem, bench.known()))
