"""What this machine has, and whether the engine runs on it: `inferlab doctor`."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from rich.console import Console

from grader.findings import COLOURS, Row, Verdict, table
from grader.saying import install
from grader.study.workspace import home

GIB = 1024**3
# Lowest supported versions; pyproject.toml says the same, and a test compares the two.
TORCH = (2, 8)
TRITON = (3, 4)


def run(console: Console | None = None) -> int:
    """Prints the findings, generates a line with the engine, returns the exit code: 1 if something has to be fixed."""
    console = console or Console(highlight=False)
    rows = list(machine_rows())
    console.print(table(rows, "inferlab doctor"))
    engine = engine_row()
    console.print(f"[{COLOURS[engine.verdict]}]{engine.verdict}[/]  [bold]{engine.name}[/]")
    console.print(engine.found, markup=False)
    rows.append(engine)
    for row in rows:
        if row.advice:
            console.print(f"[{COLOURS[row.verdict]}]{row.name}:[/] ", end="")
            console.print(row.advice, markup=False, soft_wrap=True)
    return int(any(row.verdict == "fail" for row in rows))


def machine_rows() -> Iterator[Row]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    yield Row("Python", version, "ok" if good else "fail", "" if good else "Python 3.11 or later is needed")
    yield Row("system", platform.platform())
    yield _cpu()
    yield _memory()
    yield from _torch_and_gpu()
    yield from _packages()
    yield sandbox_row()
    yield _disk()


def _cpu() -> Row:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    model, bf16 = platform.processor() or platform.machine(), False
    info = Path("/proc/cpuinfo")
    if info.exists():
        text = info.read_text("utf-8", "replace")
        named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        model = named.group(1) if named else model
        bf16 = bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", text))
    elif sys.platform == "darwin":
        model = _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or model
        bf16 = _output(["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]) == "1"
    return Row("CPU", f"{cores} cores, {model}, bf16 arithmetic: {'yes' if bf16 else 'no (emulated, slower)'}")


def _memory() -> Row:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except (ValueError, OSError):
        return Row("memory", "unknown", "info")
    if total < 3.5:
        return Row("memory", f"{total:.1f} GiB", "warn", "Chapters expect 4 GiB; close other programs")
    return Row("memory", f"{total:.1f} GiB")


def _torch_and_gpu() -> Iterator[Row]:
    try:
        import torch
    except Exception as error:  # a broken installation raises anything from ImportError to OSError
        yield Row("torch", f"cannot be imported: {error}", "fail", "Install it: make learn, or pip install torch")
        return
    yield _versioned("torch", TORCH, missing="fail", advice="pip install 'torch>=2.8'")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield Row("GPU", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}")
    elif shutil.which("nvidia-smi"):
        advice = "nvidia-smi exists but torch sees no GPU: this torch is a CPU build, or the driver is too old for it"
        yield Row("GPU", "not usable", "warn", advice)
    else:
        yield Row("GPU", "none; everything here runs on the CPU", "info")
    yield _products()


def _products() -> Row:
    """A row on the method by which the engine multiplies weights on this CPU."""
    try:
        from reference_impl.features.cpu.products import in_words

        return Row("products", in_words(), "info")
    except Exception as error:  # as in `engine_row`, whose finding says more
        return Row("products", f"not known: {type(error).__name__}: {error}", "info")


def _packages() -> Iterator[Row]:
    if sys.platform == "linux":
        yield _versioned("triton", TRITON, missing="info", advice=f"for the kernel labs: {install('triton')}")
    else:
        yield Row("triton", "not available here; kernels run as their torch twins", "info")
    yield _versioned("jupyterlab", (4, 3), missing="warn", advice=f"to open the chapters: {install('learn')}")
    yield _versioned("nbgrader", (0, 9), missing="info", advice=f"to grade labs: {install('grade')}")


def _versioned(package: str, lowest: tuple[int, int], missing: Verdict, advice: str) -> Row:
    wanted = ".".join(map(str, lowest))
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Row(package, "not installed", missing, advice)
    if release(version) < lowest:
        return Row(package, f"{version}, needed: {wanted} or later", "fail" if missing == "fail" else "warn", advice)
    return Row(package, f"{version} ({wanted} or later)")


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as 2.13.0+cpu."""
    major, minor = re.findall(r"\d+", version + ".0")[:2]
    return int(major), int(minor)


def sandbox_row(run_command: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Row:
    """Whether bubblewrap can isolate a process here, found out by doing it."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return Row("sandbox", "bubblewrap is not installed", "info")
    command = [bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--", "true"]
    try:
        tried = run_command(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Row("sandbox", f"bubblewrap does not run: {error}", "warn")
    if tried.returncode:
        advice = "User namespaces are switched off here: by AppArmor (Ubuntu 24.04), by the container, or by a sysctl"
        return Row("sandbox", f"bubblewrap cannot isolate: {tried.stderr.strip()[:200]}", "warn", advice)
    return Row("sandbox", "bubblewrap works")


def _disk() -> Row:
    folder = home()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / GIB
    found = f"{free:.1f} GiB free at {there}"
    return Row("disk", found) if free >= 1 else Row("disk", found, "warn", "Free some space, or set INFERLAB_HOME")


def engine_row() -> Row:
    """Generates with the course model; the text and its timing, or why that failed."""
    try:
        from reference_impl import LLM, SamplingParams
        from reference_impl.assembly import demo
        from reference_impl.assembly.config import course_model

        llm = LLM(course_model("target"))
        llm.generate(["warm up"], SamplingParams(max_tokens=2, temperature=0.0))
        output = llm.generate([demo.PROMPT], demo.demo_sampling())[0]
    except FileNotFoundError as error:
        return Row("engine", str(error), "fail", "The course model is missing. In a checkout: git checkout datasets")
    except Exception as error:  # whatever it is, the learner needs the finding, not a traceback
        advice = "The engine cannot generate here. Run this for the details: inferlab generate"
        return Row("engine", f"{type(error).__name__}: {error}", "fail", advice)
    metrics = output.metrics
    figures = (
        f"TTFT {_milliseconds(metrics.ttft)} · TPOT {_milliseconds(metrics.tpot)} · "
        f"{metrics.tokens_per_second or 0:.0f} tokens/s"
    )
    return Row("engine", f"{demo.PROMPT}{output.text}\n\nthe course's model: {demo.ABOUT}\n{figures}")


def _milliseconds(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
