"""What is launched is what the table holds; and the table says what the compiler says today."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import triton

from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.compilation import Resources
from tests.kernels.compile_table import TABLE
from tests.warm import Warm

Ran = subprocess.CompletedProcess[str]


@pytest.fixture
def in_a_process_that_compiles(warm: Warm) -> Callable[..., Ran]:
    """Under the interpreter nothing can be compiled."""

    def run(*arguments: str) -> Ran:
        return warm.run(arguments, {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})

    return run


@pytest.fixture
def compile_table(in_a_process_that_compiles: Callable[..., Ran]) -> Callable[..., Ran]:
    return functools.partial(in_a_process_that_compiles, "-m", "tests.kernels.compile_table")


def test_every_line_is_there_fits_and_is_what_the_compiler_says(compile_table: Callable[..., Ran]) -> None:
    """All keys, which change with whatever could change a line; and compiled again: a random two hundredth."""
    done = compile_table("--share", "0.005")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 problems\n")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_table_is_what_the_compiler_says(compile_table: Callable[..., Ran]) -> None:
    done = compile_table("--all")
    assert done.returncode == 0, done.stdout + done.stderr


NAME = "flash_attention, head_dim 64: flash_attention, sm_90"


def test_a_table_that_lies_is_found_out(tmp_path, compile_table: Callable[..., Ran]) -> None:
    """Of lines that this version of Triton is said to have made: only these are compared."""
    table = json.loads(TABLE.read_text())
    del table["paged_decode, MHA: paged_decode, sm_80"]
    table["paged_decode, window: paged_decode, sm_86"] |= {"key": "0" * 16, "triton": triton.__version__}
    (tmp_path / "compiled.json").write_text(json.dumps(table))
    found = compile_table("--table", str(tmp_path / "compiled.json"))
    assert "paged_decode, MHA: paged_decode, sm_80: is not in the table: run with --update" in found.stdout
    assert "paged_decode, window: paged_decode, sm_86: has changed since it was compiled" in found.stdout
    assert found.stdout.endswith(" 2 problems\n")
    table[NAME] |= {"registers": table[NAME]["registers"] + 1, "triton": triton.__version__}
    (tmp_path / "compiled.json").write_text(json.dumps(table))
    found = compile_table("--table", str(tmp_path / "compiled.json"), "--all", "--only", NAME)
    assert f"{NAME}: the table says" in found.stdout
    assert found.returncode == 1


def test_a_line_of_another_triton_is_not_compared_but_what_this_one_compiles_is_judged(
    tmp_path, compile_table: Callable[..., Ran], in_a_process_that_compiles: Callable[..., Ran]
) -> None:
    table = json.loads(TABLE.read_text())
    table[NAME] |= {"key": "0" * 16, "triton": "3.0.0", "registers": 1, "spilled": 8}
    (tmp_path / "compiled.json").write_text(json.dumps(table))
    arguments = ["compile_table", "--table", str(tmp_path / "compiled.json"), "--only", NAME]
    found = compile_table(*arguments[1:], "--all")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.endswith(" 0 problems\n")
    assert f"{NAME}: spills 8 bytes per thread" in compile_table(*arguments[1:]).stdout, "nothing is compiled"
    table[NAME] |= {"spilled": 0}
    (tmp_path / "compiled.json").write_text(json.dumps(table))
    script = f"""
import sys
from tests.kernels import compile_table
real = compile_table.compiled
compile_table.compiled = lambda line: real(line) | {{"spilled": 16, "matrix_instructions": {{}}}}
sys.argv = {[*arguments, "--all"]}
sys.exit(compile_table.main())
"""
    found = in_a_process_that_compiles("-c", script)
    assert found.returncode == 1
    assert f"{NAME}: spills 16 bytes per thread" in found.stdout
    assert f"{NAME}: uses no matrix instruction" in found.stdout
    assert "the table says" not in found.stdout


def test_attention_on_hopper_uses_its_matrix_instructions() -> None:
    table = json.loads(TABLE.read_text())
    attention = ("flash_attention, ", "paged_decode, ")
    hopper = [e for name, e in table.items() if name.endswith("sm_90") and name.startswith(attention)]
    units = [set(entry["matrix_instructions"]) for entry in hopper]
    assert len(units) == 33
    assert units.count({"HGMMA"}) == 29
    assert units.count({"HGMMA", "HMMA"}) == 4, "scores of 32 keys, where 64 would spill: it takes 64 at a time"


def test_what_does_not_fit_is_said() -> None:
    card = ARCHITECTURES["sm_86"]
    assert Resources(255, 0, 99 * 1024, 10, {}).problems(card) == []
    assert Resources(255, 8, 99 * 1024 + 1, 10, {}).problems(card) == [
        "spills 8 bytes per thread",
        "needs 101377 bytes of shared memory, there are 101376",
    ]


Recorded = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def recorded(in_a_process_that_compiles: Callable[..., Ran]) -> Recorded:
    """recorded(code): the launches that `code` makes by on(GPU, call); in a process without the interpreter."""

    def run(code: str) -> list[dict[str, Any]]:
        done = in_a_process_that_compiles("-c", RECORDING.replace("CODE", code))
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    return run


RECORDING = """
import json, torch
from reference_impl.kernels.architectures import ARCHITECTURES
from tests.kernels.calls import CALLS
from tests.kernels.calls.meta import empty
from reference_impl.kernels.flash_attention import flash_attention
from reference_impl.kernels.launch import recording

found = []
def on(gpu, call):
    with recording(ARCHITECTURES[gpu]) as launches:
        result = call()
    for launch in launches:
        found.append({"name": launch.name, "types": launch.types, "constants": launch.constants,
                      "aligned": launch.aligned, "ran on": str(result.device)})
CODE
print(json.dumps(found))
"""


def test_a_recorded_launch_says_what_triton_would_specialize(recorded: Recorded) -> None:
    [launch] = recorded("on('sm_80', lambda: CALLS['flash_attention, window'](torch.bfloat16))")
    assert launch["ran on"] == "meta"
    assert launch["name"] == "flash_attention"
    expected = {"q": "*bf16", "block_table": "*i32", "scale": "fp32", "stride_q_token": "i32"}
    assert {name: launch["types"][name] for name in expected} == expected
    assert launch["constants"]["key_scale"] is None
    assert launch["constants"]["WINDOW"] == 4096
    assert {"q", "stride_q_token", "stride_block"} <= set(launch["aligned"])
    assert not {"num_rows", "stride_table"} & set(launch["aligned"]), "they change from step to step"


def test_a_one_becomes_a_constant_as_in_tritons_launcher(recorded: Recorded) -> None:
    [launch] = recorded("""
def call():
    q, cache = empty(4, 8, 64, dtype=torch.float16), empty(100, 1, 1, 64, dtype=torch.int8)
    scales = empty(100, 1, 1, dtype=torch.float32)
    table, lens, starts = (empty(*shape, dtype=torch.int32) for shape in ((4, 16), (4,), (5,)))
    return flash_attention(q, cache, cache, table, starts, lens, 0.125, key_scale=scales, value_scale=scales)
on("sm_90", call)
""")
    assert launch["constants"]["stride_scale_slot"] == 1
    assert "stride_scale_slot" not in launch["types"]


def test_tiles_are_chosen_for_the_architecture(recorded: Recorded) -> None:
    found = recorded("""
for gpu in ("sm_80", "sm_90", "gfx942"):
    on(gpu, lambda: CALLS["flash_attention, head_dim 128"](torch.bfloat16))
""")
    assert [launch["constants"]["BLOCK_M"] for launch in found] == [64, 128, 64]
