"""Kernels that cross as source: which may, what is run and counted, and that no other code of the learner's runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grader.examination.kernel_source import NotAKernel, in_cells, kernel_source

ARGUMENTS, CONSTANTS = ["x", "out", "rows"], ["COLUMNS", "BLOCK", "WIDE"]
DOUBLE = """
@triton.jit
def double(x, out, rows, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, WIDE)
    at = r[:, None] * COLUMNS + c[None, :]
    there = (r < rows)[:, None] & (c < COLUMNS)[None, :]
    tile = tl.load(x + at, mask=there, other=0.0)
    tl.store(out + at, 2 * tile, mask=there)
"""


def crossing(*cells: str) -> list[tuple[str, str]]:
    found = in_cells([(source, f"cell{number}") for number, source in enumerate(cells)])
    return kernel_source("double", found, ARGUMENTS, CONSTANTS)


def doubled(line: str) -> str:
    """The kernel with one more line."""
    return DOUBLE.replace("    c = tl", f"    {line}\n    c = tl")


def test_a_kernel_may_say_that_it_returns_nothing() -> None:
    [(_, text)] = crossing(DOUBLE.replace("tl.constexpr):", "tl.constexpr) -> None:"))
    assert "-> None" in text


def test_a_kernel_crosses_with_what_it_uses_and_nothing_else_on_its_own_lines() -> None:
    helper = (
        "import os\nTWO = tl.constexpr(2)\nevil = os.system\n@triton.jit\ndef twice(x):\n    return TWO * x\nprint(1)\n"
    )
    texts = dict(crossing(helper, DOUBLE.replace("2 * tile", "twice(tile)") + "\ndouble2 = double\n"))
    assert texts["cell0"].split("\n") == ["", "", "", "@triton.jit", "def twice(x):", "    return TWO * x", "", ""]
    assert texts["cell0, TWO"].split("\n") == ["", "TWO = tl.constexpr(2)"]
    assert texts["cell1"].rstrip() == DOUBLE.replace("2 * tile", "twice(tile)").rstrip()


@pytest.mark.parametrize(
    "line",
    [
        "import os", "from os import system", "np.zeros(3)", "os.system('true')", "open('x')", "getattr(x, 'data')",
        "x.__class__", "x.handle", "tl.core", "tl.inline_asm_elementwise('', '', [], tl.int32, True, 1)",
        "tl.device_print('x')", "tl.atomic_add(x, 1.0)", "(lambda: 1)()", "y = [i for i in range(3)]",
        "raise ValueError", "def inner(): pass", "global x", "with x: pass", "try:\n        pass\n    except: pass",
        "print(x)", "__import__('os')", "eval('1')", "f'{x}'", "yield 1", "y = (z := 1)", "tl.load(*x)", "tl.load(**x)",
        "del c", "x.y = 1", "tl = 3", "range = 3", "interpreter_builder.set_grid_idx(0, 0, 0)",
        "y: os.system('true') = 1", "b''", "1j",
        "unknown(x)", "triton.runtime", "tl.math.__dict__", "(tl.load)(x).__init__()", "tl.tensor(x, x)",
    ],
)  # fmt: skip
def test_what_is_no_kernel_is_refused_by_kernel_and_line(line: str) -> None:
    with pytest.raises(NotAKernel, match=r"kernel double, line \d+: expected .*, got"):
        crossing(doubled(line))


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([DOUBLE.replace("rows,", "rows, more,")], "the lab fixes the parameters of double"),
        ([DOUBLE.replace("BLOCK: tl.constexpr", "BLOCK")], "the lab fixes the parameters of double"),
        ([DOUBLE.replace("rows,", "*rows,")], "expected plain parameters"),
        ([DOUBLE.replace("rows,", "rows: open('x'),")], "expected tl.constexpr or no annotation"),
        ([DOUBLE.replace("WIDE: tl.constexpr)", "WIDE: tl.constexpr = print(1))")], "expected a number for a default"),
        ([DOUBLE.replace("@triton.jit", "@print\n@triton.jit")], "no other decorator"),
        ([DOUBLE.replace("@triton.jit", "@triton.jit(debug=True)")], "expected a function under @triton.jit"),
        ([DOUBLE.replace("@triton.jit", "")], "expected a function under @triton.jit"),
        (["x = 1"], "expected a kernel double under @triton.jit in a cell, found none"),
        ([doubled("y = x.exp()")], "got x.exp (write tl.exp(...))"),
        (["double = print"], "double is no kernel"),
        (["def f(): pass", DOUBLE.replace("2 * tile", "f(tile)")], "f is no kernel"),
        (["TWO = open('x')", DOUBLE.replace("2 * tile", "TWO * tile")], "expected NAME = number"),
        (["TWO = 9 ** 9 ** 9", DOUBLE.replace("2 * tile", "TWO * tile")], "expected NAME = number"),
        (["TWO = 2; print(1)", DOUBLE.replace("2 * tile", "TWO * tile")], ""),
        (["TWO: print(1) = 2", DOUBLE.replace("2 * tile", "TWO * tile")], ""),
        (["TWO = [0][print(1)] = 2", DOUBLE.replace("2 * tile", "TWO * tile")], "expected NAME = number"),
        (["TWO = tl.constexpr(2, x=print(1))", DOUBLE.replace("2 * tile", "TWO * tile")], "expected NAME = number"),
        (["TWO = float(2, x=print(1))", DOUBLE.replace("2 * tile", "TWO * tile")], "expected NAME = number"),
        (["TWO = print(1) or 2", DOUBLE.replace("2 * tile", "TWO * tile")], "expected NAME = number"),
        ([DOUBLE.replace("tl.constexpr):", "tl.constexpr) -> print(1):")], "expected a kernel without types"),
        (["TWO = (2,\n); print(1)", DOUBLE.replace("2 * tile", "TWO * tile")], "expected NAME = number"),
        (["TWO = 2\rprint(1)", DOUBLE.replace("2 * tile", "TWO * tile")], ""),
        ([doubled("y = " + "(" * 90 + "x" + ")" * 90)], ""),
        ([doubled("y = " + "-" * 50_000 + "1")], ""),
    ],
)
def test_other_forms_are_refused_or_harmless(cells: list[str], words: str) -> None:
    if words:
        with pytest.raises(NotAKernel, match=re.escape(words)):
            crossing(*cells)
    else:
        with contextlib.suppress(NotAKernel):
            assert "print" not in "".join(text for _, text in crossing(*cells))


@pytest.mark.parametrize(
    ("written", "number"),
    [("2", "2"), ("-1.5", "-1.5"), ("1 / 4", "0.25"), ("float('-inf')", 'float("-inf")'), ("tl.constexpr(3.0)", "3.0"),
     ("True", "True"), ("-float('inf')", 'float("-inf")'), ("+(2 * 3 - 1)", "5")],
)  # fmt: skip
def test_a_number_beside_a_kernel_crosses_as_its_value(written: str, number: str) -> None:
    texts = dict(crossing(f"TWO = {written}", DOUBLE.replace("2 * tile", "TWO * tile")))
    assert texts["cell0, TWO"] == f"TWO = tl.constexpr({number})"


def test_the_stub_is_not_written_yet() -> None:
    with pytest.raises(NotImplementedError, match="double is not written yet"):
        crossing(DOUBLE.split("    r =")[0] + "    raise NotImplementedError('not written yet')\n")


# The rest needs the interpreter, which has to be chosen before Triton is imported: each in a fork of a process that has
# done so, and that has one launcher for all of them.
BEGIN = f"""
import json, os, sys, traceback, torch, triton, triton.language as tl
from grader.checks import compiled, launch
from grader.examination.examiner import examine
from grader.examination.submission import Added, Submission
from grader.examination.reference import run_cell
from grader.isolation.launcher import Launcher
from grader.labs.lab import Cell, Lab

DOUBLE = {DOUBLE!r}
TYPES = {{"x": "*fp32", "out": "*fp32", "rows": "i32"}}
CHECK = '''
import torch
from grader.checks import compiled, launch
x, out = torch.arange(60.0).view(12, 5), torch.full((12, 5), float("nan"))
counted = launch(double, (3,), {{"COLUMNS": 5, "BLOCK": 4, "WIDE": 8}}, x=x, out=out, rows=12)
print(vars(counted))
assert torch.equal(out, 2 * torch.arange(60.0).view(12, 5)), out
'''
check = Cell("check_double", "check", CHECK, points=1.0)
given = Cell("tools", "code", "import triton; import triton.language as tl", "both")
lab = Lab("00_x", "x", (given, Cell("double", "solution", DOUBLE), check), {{}})

def directly(source):
    space = {{"__name__": "lab_cells", "triton": triton, "tl": tl}}
    run_cell(source, "double", space)
    run_cell(CHECK, "check_double", space)

def examined(source, launcher=None, added=(), check=None):
    checks = Cell("check_double", "check", check or CHECK, points=1.0)
    used = Lab("00_x", "x", (*lab.cells[:2], checks), {{}})
    submission = Submission({{"double": source}}, [Added("double", "code", text) for text in added])
    [result] = examine(used, submission, launcher or warm, secret=b"x").checks
    return result
"""
SERVE = """
with Launcher(insecure=True) as warm:
    warm.fork().end()  # it has started before any fork of this process uses it
    for line in sys.stdin:
        path, body = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                sys.stdout = open(path, "w")
                exec(body, globals())
                status = 0
            except BaseException:
                traceback.print_exc(file=sys.stdout)
            finally:
                sys.stdout.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
Run = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """run(body): the lines that it prints."""
    said = tmp_path_factory.mktemp("kernels") / "said"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-W", "ignore", "-c", BEGIN + SERVE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment,
                          cwd=Path(__file__).parents[2]) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def ask(body: str) -> list[str]:
            print(json.dumps([str(said), body]), file=asks, flush=True)
            status = answers.readline().strip()
            assert status == "0", said.read_text()[-3000:] if said.exists() else "see its traceback above"
            return said.read_text().splitlines()

        yield ask


@pytest.mark.timeout(900)
def test_both_ways_of_running_give_the_same_numbers_and_counts(run: Run) -> None:
    printed = run("directly(DOUBLE); r = examined(DOUBLE); print(r.seen.strip()); print(r.status, r.message)")
    assert printed[0] == printed[1]
    assert "'loads': {'x': 60, 'out': 0}, 'stores': {'x': 0, 'out': 60}, 'most_loads': {'x': 1, 'out': 0}" in printed[0]
    assert printed[2].strip() == "passed"


@pytest.mark.timeout(900)
def test_what_a_program_loads_twice_is_counted_and_what_goes_wrong_on_a_gpu_is_an_error(run: Run) -> None:
    twice = DOUBLE.replace("    tl.store", "    tile += 0 * tl.load(x + at, mask=there, other=0.0)\n    tl.store")
    unmasked = DOUBLE.replace("mask=there, other=0.0", "mask=(r < rows)[:, None]")
    beyond = DOUBLE.replace("(r < rows)[:, None]", "(r < rows + 4)[:, None]").replace(
        "tl.program_id(0)", "(tl.program_id(0) + 1)"
    )
    without = (
        DOUBLE.replace(", other=0.0", "")
        .replace("mask=there)", "mask=there | (c < 3)[None, :])")
        .replace("(r < rows)", "(r < rows - 1)")
    )
    body = f"""
directly({twice!r})
for source in {[unmasked, beyond, without]!r}:
    said = []
    try: directly(source); said.append("passed")
    except Exception as error: said.append(type(error).__name__)
    r = examined(source); print(said[0], r.status, "Is the mask missing" in r.message, "line" in r.message)
"""
    printed = run(body)
    assert "'most_loads': {'x': 2, 'out': 0}" in printed[0]
    both = DOUBLE + "    tl.store(out + at, 2 * tile, mask=there)\n"
    assert "'most_stores': {'x': 0, 'out': 2}" in run(f"directly({both!r})")[0]
    broken = run("r = examined('def double(:'); print(r.status, r.message)")
    assert "SyntaxError" in " ".join(broken), broken
    assert "IndexError failed True True" in printed
    assert [line.split()[1] for line in printed if line.split()[0] == "IndexError"]
    assert "passed failed" not in "".join(printed)


ATTACKS = {
    "torch on the host": ("def double(x, out, rows, **more): out.copy_(2 * x)", []),
    "a dummy launch": (
        DOUBLE.replace("2 * tile", "0 * tile"),
        ["old = double\ndef double(*a, **b): a[1].copy_(2 * a[0])"],
    ),
    "an object that launches": (
        "class K:\n def __getitem__(self, grid): return lambda *a, **b: a[1].copy_(2 * a[0])\ndouble = K()",
        [],
    ),
    "a patched library": (
        DOUBLE.replace("2 * tile", "tile"),
        ["import triton.language as tl\nload = tl.load\ntl.load = lambda *a, **b: 2 * load(*a, **b)"],
    ),
    "code beside the kernel": (DOUBLE.replace("2 * tile", "tile") + "\nimport torch\ntorch.Tensor.copy_ = None", []),
}


@pytest.mark.timeout(900)
def test_torch_and_dummy_launches_earn_nothing(run: Run) -> None:
    body = f"""
for name, (source, added) in {ATTACKS!r}.items():
    r = examined(source, added=added); print(name, r.status, r.earned)
"""
    assert [line for line in run(body) if "{" not in line] == [f"{name} failed 0.0" for name in ATTACKS]


@pytest.mark.timeout(900)
def test_the_kernel_s_process_has_none_of_the_learner_s_cells_and_is_isolated(bwrap: None, run: Run) -> None:
    """What other cells did to libraries is not there; in isolation it is launched and compiled as without."""
    added = ["import triton.language as tl\ntl.arange = None\nimport numpy\nnumpy.where = None"]
    check = (
        'print(compiled(double, {"x": "*fp32", "out": "*fp32", "rows": "i32"}, {"COLUMNS": 5, "BLOCK": 4, "WIDE": 8}))'
    )
    body = f"""
with Launcher() as isolated:
    for check in (CHECK, "from grader.checks import compiled" + chr(10) + {check!r}):
        r = examined(DOUBLE, isolated, added={added!r}, check=check); print(r.status, r.message, r.seen.strip()[-9:])
"""
    printed = [line for line in run(body) if line.startswith(("passed", "failed"))]
    assert len(printed) == 2
    assert all(line.startswith("passed ") for line in printed)
    assert printed[1].endswith("error='')")


@pytest.mark.timeout(900)
def test_a_kernel_without_end_is_stopped_and_the_next_check_gets_another_process(run: Run) -> None:
    endless = DOUBLE.replace(
        "    c = tl.arange(0, WIDE)", "    c = tl.arange(0, WIDE)\n    while BLOCK > 0:\n        c += 0"
    )
    body = f"""
import dataclasses
from grader.examination import examiner
other = Cell("check_other", "check", "print(1)", points=1.0)
two = Lab("00_x", "x", (*lab.cells, other), {{}})
limits = dataclasses.replace(examiner.Limits(), call=1.0)
for check in examine(two, Submission({{"double": {endless!r}}}), warm, secret=b"x", limits=limits).checks:
    print(check.status, check.message.replace(chr(10), " "))
"""
    printed = run(body)
    assert printed[0].startswith("timed out")
    assert "double" in printed[0]
    assert printed[1].startswith("passed")


@pytest.mark.timeout(900)
def test_compiling_says_what_a_kernel_needs_or_what_the_compiler_says(run: Run) -> None:
    broken = DOUBLE.replace(
        "    tile = tl.load", "    tile = 1\n    for i in range(rows):\n        tile = tile + at\n    tile = tl.load"
    )
    check = """
from grader.checks import compiled
found = compiled(double, {"x": "*fp32", "out": "*fp32", "rows": "i32"}, {"COLUMNS": 5, "BLOCK": 16, "WIDE": 8})
assert not found.error, found.error
print(found.registers > 0, found.spilled, found.shared)
"""
    body = f"""
for source in (DOUBLE, {broken!r}):
    r = examined(source, check={check!r}); print(r.status, r.seen.strip(), r.message.replace(chr(10), " "))
    space = {{"__name__": "lab_cells", "triton": triton, "tl": tl}}
    run_cell(source, "double", space)
    found = compiled(space["double"], TYPES, {{"COLUMNS": 5, "BLOCK": 16, "WIDE": 8}})
    print(bool(found.error), found.registers > 0)
"""
    printed = run(body)
    assert printed[0].strip() == "passed True 0 0"
    assert printed[1] == "False True"
    assert printed[2].startswith("failed")
    assert "tile" in printed[2]
    assert printed[3] == "True False"


def test_the_lab_s_own_kernels_are_what_the_examiner_binds() -> None:
    from grader.examination.attempt import kernel_names
    from grader.labs.lab import load_lab

    root = Path(__file__).parents[2]
    found: dict[str, Any] = {
        path.parent.name: kernel_names(load_lab(path)) for path in sorted((root / "solutions").glob("[0-9]*_*/*.ipynb"))
    }
    assert found["05_flash_attention"] == {"softmax_kernel", "lse_kernel", "tile_kernel", "flash_kernel"}
    assert found["07_quantization"] == {"w4a16_kernel"}
    assert {slug for slug, names in found.items() if names} == {"05_flash_attention", "07_quantization"}
