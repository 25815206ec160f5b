"""`python -m reference_impl.bench gpu`: where the engine stands on this GPU, against its limits, peers and the goals.

From the source tree, on a machine with torch, triton, numpy and transformers, with nothing installed. Kernels are
compiled ahead on all cores (gpu_warm.py), the limits of the machine are measured, then each case of gpu_cases.py. A
case that fails becomes a line with its error, and the others continue, in a fresh process if the GPU is lost or hangs;
cases for which no time is left are named. The results are written after every line, so that a kill loses nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from reference_impl.bench import gpu_rows, gpu_run, harness, kernels
from reference_impl.bench.gpu_cases import CASES
from reference_impl.bench.gpu_engines import Bench

ROOT = Path(__file__).resolve().parents[2]
WARM = 60.0  # seconds
AGAIN = 3  # exit status of a process that another one has to continue


def markdown(result: dict[str, Any]) -> str:
    """The table, and under it where, when and against which limits it was measured."""
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


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reference_impl.bench gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=480.0, help="no case begins that would end after that")
    parser.add_argument("--only", default="", help="cases whose name contains this; nothing is saved without --out")
    parser.add_argument("--rounds", type=int, default=5, help="windows or runs of a figure")
    parser.add_argument("--out", type=Path, help="where the results go; default: results/gpu.json")
    parser.add_argument("--no-save", action="store_true", help="write nothing")
    parser.add_argument("--dry-run", action="store_true", help="everything tiny, on any machine; nothing is saved")
    parser.add_argument("--kernels", action="store_true", help="in the time that is left, all of `bench kernels`, too")
    parser.add_argument(
        "--warm", type=float, default=WARM, help="seconds of these for compiling ahead on all cores; 0: compile nothing"
    )
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # of a process that does the work
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0: everything that ran is right. 1: something failed. 2: this machine lacks what the bench needs."""
    words = list(sys.argv[2:] if arguments is None else arguments)
    options = parser().parse_args(words)
    if not [case for case in CASES if options.only in case.name]:
        names = "; ".join(case.name for case in CASES)
        parser().error(f"--only {options.only!r}: expected a part of one of: {names}")
    if not options.dry_run and (not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
        print(kernels.NEEDS, file=sys.stderr)
        return 2
    if options.until is not None:
        return work(options)
    until = time.monotonic() + options.seconds
    # A part must not replace the whole.
    saved = not (options.dry_run or options.no_save or options.only)
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or (harness.RESULTS / "gpu.json" if saved else Path(folder) / "gpu.json")
        out = out.absolute()
        if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
            print(f"--out {out}: expected a file that can be written, in a folder that exists", file=sys.stderr)
            return 2
        before = out.read_bytes() if out.exists() else None
        try:
            if options.warm > 0 and not (options.dry_run or options.only):
                compile_ahead(min(options.warm, options.seconds))
            status = supervise(
                [*_python("reference_impl.bench", "gpu"), *words, "--out", str(out), "--until", str(until)], out
            )
        except KeyboardInterrupt:
            status = 130
        if not out.exists():
            print("nothing was measured", file=sys.stderr)
            if before is not None:
                out.write_bytes(before)
        elif out.parent != Path(folder):
            result = json.loads(out.read_text("utf-8"))
            out.with_suffix(".md").write_text(markdown(result) + "\n", "utf-8")
            if not result["complete"]:  # otherwise the process that finished has printed it
                print(f"\n{markdown(result)}")
            print(f"wrote {out}")
    return status


def _python(module: str, *words: str) -> list[str]:
    safe = ["-P"] * sys.flags.safe_path  # then the package is installed; otherwise it is found from its folder
    return [sys.executable, *safe, "-m", module, *words]


def compile_ahead(seconds: float) -> None:
    """In separate processes: they print their own errors, which do no harm here."""
    command = _python("reference_impl.bench.gpu_warm", "--seconds", str(seconds))
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=ROOT, check=False, timeout=seconds + 15)


def supervise(command: Sequence[str], out: Path, poll: float = 0.2) -> int:
    """Starts a process, and another after the case in which it was lost, and so on, until one finishes."""
    out.unlink(missing_ok=True)
    resume: list[str] = []
    while True:
        child = subprocess.Popen([*command, *resume], cwd=ROOT)
        try:
            reason = _watch(child, out, poll)
        finally:
            child.kill()
            child.wait()
        if child.returncode in (0, 2):
            return child.returncode
        result = json.loads(out.read_text("utf-8")) if out.exists() else {"begun": {}}
        if not result["begun"]:
            print(f"the process that measures {reason} before it began", file=sys.stderr)
            return 1
        if result["complete"]:
            return 1
        case = list(result["begun"])[-1]
        if child.returncode != AGAIN:
            if case in result["ended"]:
                print(f"the process that measures {reason} twice in {case}", file=sys.stderr)
                return 1
            result["ended"][case] = f"the process that measured it {reason}"
        result["begun"][case] = None  # the next process may take its time to begin
        harness.write(out, result)
        resume = ["--resume"]


def _watch(child: subprocess.Popen[bytes], out: Path, poll: float) -> str:
    """Waits for the child, and says how it ended. Kills it when its case should have ended long ago."""
    while child.poll() is None:
        time.sleep(poll)
        if out.exists():
            result = json.loads(out.read_text("utf-8"))
            *_, until = result["begun"].values() or [None]
            if until is not None and time.monotonic() > until and not result["complete"]:
                child.kill()
                child.wait()
                return "stopped answering and was killed"
    return f"ended with status {child.returncode}"


def work(options: argparse.Namespace) -> int:
    """The separate process: measures, and prints the table."""
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined
    device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)
    bench = Bench(torch.device(device), dtype, options.dry_run, options.rounds, options.until)
    cases = [case for case in CASES if options.only in case.name]
    before = json.loads(options.out.read_text("utf-8")) if options.resume else None
    try:
        result = gpu_run.run(bench, cases, options.out, before)
    except gpu_run.LostGPU:
        return AGAIN
    print()
    print(markdown(result))
    status = int(any(failed(row) for row in result["rows"]))
    if options.kernels:
        bench.release()
        words = ["--seconds", str(max(0.0, bench.left)), *["--dry-run"] * bench.tiny, *["--no-save"] * options.no_save]
        status = max(status, kernels.main(words))
    return status


def failed(row: dict[str, Any]) -> bool:
    return bool(row["problem"]) and not row["problem"].startswith(("left out", "torch has none"))
