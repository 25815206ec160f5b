"""The interpreter as the tests run it (tests/interpreter.py) gives what Triton's gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.warm import Warm

SCRIPT = """
import torch, triton, triton.language as tl
from triton.runtime import interpreter
from reference_impl.kernels.flash_attention import flash_attention
from reference_impl.kernels.paged_decode import paged_decode
from tests.interpreter import quicken
from tests.kernels.paged import make, random_tree

replaced = 0
def counted(*arguments, original=interpreter._patch_builtin):
    global replaced
    replaced += 1
    original(*arguments)
interpreter._patch_builtin = counted

def run():
    global replaced
    replaced = 0
    ragged = flash_attention(*make([(5, 18), (2, 70)], 4, 2, 16, torch.float16).ragged)
    decoded = paged_decode(*make([(1, 3), (1, 300)], 4, 2, 16, torch.float32).decode)
    rows = [(5, 18), (2, 70)]
    eight, four = (make(rows, 4, 2, 16, torch.float16, cache=cache) for cache in (torch.float8_e4m3fn, torch.uint8))
    tree = flash_attention(*eight.ragged, ancestors=random_tree(rows), window=20, **eight.options)
    capped = flash_attention(*four.ragged, softcap=5.0, **four.options)
    assert tl.core.is_builtin(tl.load), "after a launch the language is Triton's again"
    return ragged, decoded, tree, capped, replaced

@triton.jit
def three(out):
    tl.store(out + tl.arange(0, 4), tl.zeros([3], tl.float32))

def refused():
    try:
        three[1,](torch.empty(4))
    except interpreter.InterpreterError as error:
        return str(error)

*before, many = run()
before_refusal = refused()
for _ in range(2):
    quicken()
*after, few = run()
assert all(map(torch.equal, before, after))
assert refused() == refused() == before_refusal and "power of 2" in before_refusal, before_refusal
assert 0 < few < many / 10, (few, many)
try:
    tl.load(None)
except ValueError:
    print("outside of a launch it says so")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter of a machine without a GPU")
def test_the_quick_interpreter_gives_the_same_bits_and_leaves_the_language_as_it_was(
    tmp_path: Path, warm: Warm
) -> None:
    """In a process of its own: in this one it is quick already."""
    script = tmp_path / "script.py"  # a jitted function needs a source
    script.write_text(SCRIPT)
    command = ("-c", f"import runpy; runpy.run_path({str(script)!r})")
    done = warm.run(command, {**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "outside of a launch it says so\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter of a machine without a GPU")
def test_the_tests_run_in_the_quick_one() -> None:
    from triton.runtime import interpreter

    assert interpreter._patch_lang.__module__ == "tests.interpreter"
    assert not interpreter.interpreter_builder.options.sanitize_overflow
