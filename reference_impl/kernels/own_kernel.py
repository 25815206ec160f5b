"""What a GPU would make of a kernel that a learner wrote in a notebook: `report(attention)`, lab 05.

The lab's notebook runs kernels in Triton's interpreter, and a process that does so cannot compile. So the source of the
notebook's cell is written to a file, and `python -m reference_impl.kernels.own_kernel FILE` runs it in a child process.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import linecache
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

FUNCTION = "attention"
GPUS = {"T4": "sm_75", "A100": "sm_80", "H100": "sm_90"}
HEADS, KV_HEADS, TOKENS = 8, 2, 4096  # of the calls that are compiled and timed
PRELUDE = "import math\n\nimport numpy as np\nimport torch\nimport triton\nimport triton.language as tl\n\n"
SECONDS = 240.0  # a kernel that spills much takes minutes to assemble


def report(function: Callable[..., Any]) -> str:
    """A report of what the kernel uses, per head_dim, launch and GPU; on CUDA also its time, beside SDPA's.

    function: attention(q, k, v, first) of lab 05, defined in a notebook's cell. Cells that it uses are included. Errors
    in the child process are part of the text.
    """
    with tempfile.TemporaryDirectory(prefix="own-kernel-") as folder:
        file = Path(folder, "notebook_cells.py")
        file.write_text(PRELUDE + "\n\n".join(cells_behind(function)), "utf-8")
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": os.path.join(folder, "cache"), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-P", "-m", "reference_impl.kernels.own_kernel", str(file)]
        child = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            return child.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # the assembler, too
            return f"{child.communicate()[0]}The compiler was stopped after {SECONDS:.0f} s."


def cells_behind(function: Callable[..., Any]) -> list[str]:
    """Sources of the cells that define `function` and the functions that it uses, in the order of running."""
    namespace, todo, files = function.__globals__, [function], {}
    while todo:
        one: Any = todo.pop()
        one = getattr(one, "fn", one)  # under triton.jit
        code = getattr(one, "__code__", None)
        if code is None or code.co_filename in files or one.__globals__ is not namespace:
            continue
        source = "".join(linecache.getlines(code.co_filename))
        files[code.co_filename] = source
        names = {name for part in _codes(compile(source, "cell", "exec")) for name in part.co_names}
        todo += [namespace[name] for name in names if name in namespace]
    order = {filename: number for number, filename in enumerate(linecache.cache)}
    return [files[name] for name in sorted(files, key=lambda name: order.get(name, 0))]


def _codes(code: Any) -> Iterator[Any]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _codes(constant)


# ---------------------------------------------------------------- in the child process


@contextmanager
def written_down() -> Iterator[list[Any]]:
    """The launches of any jitted kernel inside, as `launch.Launch`; none of them runs."""
    from triton.runtime.jit import JITFunction

    from reference_impl.kernels.launch import described

    launches: list[Any] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = {**dict(zip(kernel.arg_names, arguments, strict=False)), **named}
        given = {p.name: p.default for p in kernel.params if p.has_default} | given
        options = {name: value for name, value in given.items() if name not in kernel.arg_names}
        constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
        variable = [p for p in kernel.params if not p.is_constexpr]
        values = tuple(given[p.name] for p in variable)
        launch = described(SimpleNamespace(params=variable), values, constants, options)
        launches.append(dataclasses.replace(launch, kernel=kernel))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def compiled_lines(attention: Callable[..., Any]) -> Iterator[str]:
    """A line for each launch and each of GPUS, compiled: head_dim 64 and 128, float16, the causal prompt of a model
    with HEADS and KV_HEADS."""
    from reference_impl.kernels.architectures import ARCHITECTURES
    from reference_impl.kernels.compilation import resources

    yield f"{'head_dim':>8} {'GPU':>5} {'registers':>9} {'spilled':>8} {'shared':>8} {'matrix units':<22} verdict"
    for head_dim in (64, 128):
        q, k, v = inputs(head_dim, "cpu", TOKENS)
        with written_down() as launches:
            attention(q, k, v, 0)
        if not launches:
            yield f"{head_dim:>8} no Triton kernel was launched"
        for launch in launches:
            for gpu, name in GPUS.items():
                start = f"{head_dim:>8} {gpu:>5}"
                if launch.multiplies and not ARCHITECTURES[name].has_matrix:
                    yield f"{start} Triton does not use the matrix units of this GPU: tl.dot would spill all it has"
                    continue
                try:
                    found = resources(launch, ARCHITECTURES[name])
                except Exception as error:
                    yield f"{start} does not compile: {_last_line(error)}"
                    continue
                problems = found.problems(ARCHITECTURES[name])
                matrix = ", ".join(f"{count} {kind}" for kind, count in found.matrix_instructions.items()) or "none"
                yield (
                    f"{start} {found.registers:>9} {found.spilled:>6} B {found.shared_bytes / 1024:>4.0f} KiB "
                    f"{matrix:<22} {'; '.join(problems) or 'fits'}"
                )


def timed_lines(attention: Callable[..., Any]) -> Iterator[str]:
    """A line for each head_dim: median time on the GPU that is here, beside torch's scaled_dot_product_attention."""
    from triton.testing import do_bench

    gpu = torch.cuda.get_device_name()
    for head_dim in (64, 128):
        q, k, v = inputs(head_dim, "cuda", TOKENS)
        query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
        sdpa = functools.partial(
            torch.nn.functional.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True
        )
        off = (attention(q, k, v, 0)[0].float() - sdpa()[0].transpose(0, 1).float()).abs().max()
        own = do_bench(lambda q=q, k=k, v=v: attention(q, k, v, 0), return_mode="median")
        theirs = do_bench(sdpa, return_mode="median")
        flops = 2 * TOKENS * TOKENS * head_dim * HEADS  # 4 n^2 d per head, half of it masked
        yield (
            f"{gpu}, {TOKENS} tokens, {HEADS}/{KV_HEADS} heads of {head_dim}, float16: yours {own:.3f} ms "
            f"({flops / own / 1e9:.0f} TFLOP/s), SDPA {theirs:.3f} ms; outputs differ by up to {off:.1e}"
        )


def inputs(head_dim: int, device: str, tokens: int) -> list[torch.Tensor]:
    """q, k and v of a prompt, [tokens, heads, head_dim] float16."""
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(tokens, n, head_dim, device=device, dtype=torch.float16) for n in heads]


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"


def main(file: str) -> None:
    spec = importlib.util.spec_from_file_location("notebook_cells", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["notebook_cells"] = module
    spec.loader.exec_module(module)
    attention = getattr(module, FUNCTION)
    for line in compiled_lines(attention):
        print(line, flush=True)
    if torch.cuda.is_available():
        for line in timed_lines(attention):
            print(line, flush=True)
    else:
        print("There is no CUDA GPU here: nothing was timed.")


if __name__ == "__main__":
    main(sys.argv[1])
