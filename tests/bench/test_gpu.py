"""The GPU bench on any machine: every line is there, what fails hides nothing, what time does not reach is named."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import reference_impl
from reference_impl.bench import gpu, gpu_cases, gpu_peers, gpu_rows, gpu_warm, harness, kernels
from reference_impl.bench.gpu_cases import CASES, LIMIT_ROWS, LIMITS, Case
from reference_impl.bench.gpu_engines import Bench, LeftOut
from reference_impl.bench.gpu_rows import Goal, Row
from reference_impl.bench.kernel_cases import CASES as KERNELS
from reference_impl.bench.profiling.events import busy_seconds
from reference_impl.interfaces import SamplingParams

ROOT = Path(reference_impl.__file__).parent.parent
ALL_ROWS = [row for case in [LIMITS, *CASES] for row in case.metrics]


# The program, whose processes are forks of it; and its id.
PROGRAM = """
import os, sys
from reference_impl.bench import gpu
gpu.START = "fork"
print(os.getpid(), flush=True)
sys.exit(gpu.main(sys.argv[1:]))
"""
Forked = Callable[[Sequence[str]], list[str]]
OWN = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def start(forked: Forked, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """What stands for `python -m reference_impl.bench gpu`, and the id of the process itself."""
    command = forked(("-c", PROGRAM, *arguments))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=OWN)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def parent(process: Path) -> int | None:
    """Of a process, as a folder of /proc; None where it has ended."""
    try:
        state, number = (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(number)


def tiny(**fields: Any) -> Bench:
    limits = {"copy": 1e9, "16 bits": 1e9, "fp8": 0.0}
    return Bench(torch.device("cpu"), torch.float32, **{"tiny": True, "limits": limits} | fields)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases run here: this process has computed, and is not to be forked."""

    def measured(bench: Bench, case: Case) -> Iterator[Row | str]:
        try:
            bench.need(case.seconds)
            yield from case.run(bench, case.metrics)
            yield f"{case.name} ended without it"
        except LeftOut as error:
            yield str(error)
        except Exception as error:
            yield kernels.said(error)

    monkeypatch.setattr(gpu, "measured", measured)


def test_a_dry_run_has_every_line_and_leaves_the_results_alone(forked: Forked, tmp_path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in harness.RESULTS.iterdir()}
    process, _ = start(forked, "--dry-run", "--out", str(tmp_path / "gpu.json"))
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, out + errors
    assert before == {file: file.stat().st_mtime_ns for file in harness.RESULTS.iterdir()}
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["metric"] for row in result["rows"]] == ALL_ROWS
    unmeasured = {row["metric"] for row in result["rows"] if row["ours"] is None}
    here = [f"kernel: {case.name}" for case in KERNELS if case.goal is not None][2:]
    assert unmeasured == set(here), "a dry run proves two kernels, and all the rest that needs no GPU"
    table = out[out.index(gpu_rows.COLUMNS) :]
    assert (tmp_path / "gpu.md").read_text().strip() in out
    for metric in ALL_ROWS:
        assert f"\n| {metric} | " in table
    assert "every figure is meaningless" in table
    by_name = {row["metric"]: row for row in result["rows"]}
    for metric, goal in gpu_cases.GOALS.items():
        assert goal == Goal(*(by_name[metric][name] for name in ("goal", "unit", "stretch")))
    for metric in gpu_cases.PEER_ROWS:
        assert by_name[metric]["detail"]["did_not_run"] == {}
        assert by_name[metric]["peer"][0] in by_name[metric]["detail"]["same_tokens"]
    assert result["complete"]
    assert {"fp8", "int4"} <= {c["options"].get("quantization") for c in result["configurations"].values()}
    assert result["stamp"]["versions"]["torch"] == torch.__version__


ABSENT = (
    "typer", "rich", "click", "pydantic", "yaml", "transformers", "jinja2", "matplotlib", "platformdirs", "scipy",
    "pytest", "hypothesis", "llguidance",
)  # fmt: skip


def test_it_runs_with_torch_triton_numpy_safetensors_and_tokenizers_alone(forked: Forked, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    program = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n{PROGRAM}"
    for only, case in (("1k, qwen3-0.6b", 1), ("peers", 2)):
        command = forked(("-c", program, "--dry-run", "--out", str(out), "--only", only))
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=OWN, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = json.loads(out.read_text())["rows"][len(LIMIT_ROWS) :]
        expected = {"left out: transformers is not installed here"} if only == "peers" else {""}
        assert (len(rows), {row["problem"] for row in rows}) == (case, expected)


def test_who_is_killed_leaves_what_he_had_found(forked: Forked, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    process, pid = start(forked, "--dry-run", "--out", str(out))  # all cases: it does not end before it is told to
    until = time.monotonic() + 600
    while not (out.exists() and len(json.loads(out.read_text())["rows"]) > len(LIMIT_ROWS)):
        assert process.poll() is None or out.exists(), process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    measuring = [path for path in Path("/proc").glob("[0-9]*") if parent(path) == pid]
    os.kill(pid, signal.SIGKILL)
    process.wait()
    seen = len(json.loads(out.read_text())["rows"])
    while any(parent(path) is not None for path in measuring):  # what measured ends with its next line
        assert time.monotonic() < until
        time.sleep(0.01)
    result = json.loads(out.read_text())
    assert len(result["rows"]) == seen
    assert not result["complete"]
    assert "ended before its last case" in gpu.markdown(result)
    assert result["rows"][len(LIMIT_ROWS)]["ours"]["median"] > 0


def test_ctrl_c_leaves_a_table_of_what_was_found_and_says_where(forked: Forked, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    process, pid = start(forked, "--dry-run", "--out", str(out))  # all cases: it does not end before it is told to
    until = time.monotonic() + 600
    while not (out.exists() and len(json.loads(out.read_text())["rows"]) > len(LIMIT_ROWS)):
        assert process.poll() is None or out.exists(), process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    printed = None
    while printed is None:  # in a fork Python has no use for Ctrl-C: who presses it presses it again
        assert time.monotonic() < until
        os.kill(pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            printed, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    assert f"wrote {out}" in printed
    table = (tmp_path / "gpu.md").read_text()
    assert "ended before its last case" in table
    assert f"\n| {LIMIT_ROWS[0]} | " in table


def test_what_was_measured_before_stays_where_nothing_new_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    out.write_text('{"of": "yesterday"}')
    monkeypatch.setattr(gpu, "measured", lambda bench, case: iter(["the process that measured it ended with status 1"]))
    assert gpu.main(["--dry-run", "--out", str(out)]) == 1
    assert out.read_text() == '{"of": "yesterday"}'
    assert "nothing was measured" in capsys.readouterr().err
    assert not out.with_suffix(".md").exists()


@pytest.mark.parametrize("place", ["none/gpu.json", "."])
def test_where_nothing_can_be_written_it_does_not_begin(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--dry-run", "--out", str(tmp_path / place)]) == 2
    assert "expected a file that can be written, in a folder that exists" in capsys.readouterr().err


def fails(bench: Bench, metrics: Sequence[str]) -> Iterator[Row]:
    yield Row("first", "tokens/s", harness.spread([1.0]))
    raise ValueError("broken | in two\nlines")


def works(bench: Bench, metrics: Sequence[str]) -> Iterator[Row]:
    yield Row("third", "tokens/s", harness.spread([3.0]), limit=4.0)


BROKEN, SOUND = Case("broken", ("first", "second"), 1, fails), Case("sound", ("third",), 1, works)


@pytest.mark.usefixtures("in_this_process")
def test_what_fails_is_a_line_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which a dry run sets, for good
    monkeypatch.setattr(gpu_cases, "CASES", [BROKEN, SOUND])
    out = tmp_path / "gpu.json"
    words = ["--dry-run", "--out", str(out)]
    assert gpu.main(words) == 1
    rows = json.loads(out.read_text())["rows"]
    assert [(row["metric"], row["problem"]) for row in rows[len(LIMIT_ROWS) :]] == [
        ("first", ""), ("second", "ValueError: broken | in two"), ("third", ""),
    ]  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert "| second | ValueError: broken / in two | - | - | - | - |" in lines
    assert "| third | 3 tokens/s (3-3) | - | 4 | 75 % | - |" in lines
    monkeypatch.setattr(gpu_cases, "CASES", [SOUND])
    assert gpu.main(words) == 0


# A program with cases of its own in the place of the bench's.
FAULTY = """
import ctypes, signal, sys, time
from reference_impl.bench import gpu, gpu_cases, harness
from reference_impl.bench.gpu_cases import Case
from reference_impl.bench.gpu_rows import Row

def row(name):
    return Row(name, "tokens/s", harness.spread([1.0]))

def crashes(bench, metrics):
    yield row("before the crash")
    ctypes.string_at(0)

def hangs(bench, metrics):
    yield row("before the hang")
    time.sleep(600)  # as in a call of CUDA's that never returns

def ends(bench, metrics):
    yield row("before the end")
    raise SystemExit(3)

def sound(bench, metrics):
    yield row("sound")

gpu.START, gpu.PATIENCE, HANGS = "fork", 1, 5
# Only what hangs is stopped: the others, limits too, have the time of a dry run, on however busy a machine.
gpu.Bench.pick = lambda self, real, tiny: real if (real, tiny) == (HANGS, 300) else tiny
gpu_cases.CASES = [
    Case("crashes", ("before the crash", "crash"), 99, crashes),
    Case("hangs", ("before the hang", "hang"), HANGS, hangs),
    Case("ends", ("before the end", "end"), 99, ends),
    Case("sound", ("sound",), 99, sound),
]
sys.exit(gpu.main(sys.argv[1:]))
"""


def test_what_crashes_hangs_or_ends_costs_its_own_case(forked: Forked, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = forked(("-c", FAULTY, "--dry-run", "--out", str(out)))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=OWN, timeout=600)
    assert done.returncode == 1, done.stderr
    result = json.loads(out.read_text())
    assert [(row["metric"], row["problem"]) for row in result["rows"][len(LIMIT_ROWS) :]] == [
        ("before the crash", ""), ("crash", "the process that measured it ended with status -11"),
        ("before the hang", ""), ("hang", "stopped after 5 s"),
        ("before the end", ""), ("end", "the process that measured it ended with status 3"), ("sound", ""),
    ]  # fmt: skip
    assert result["complete"]
    assert result["stamp"]["versions"]["torch"] == torch.__version__


@pytest.mark.usefixtures("in_this_process")
def test_a_line_that_is_missing_is_an_error() -> None:
    *_, result = gpu.run(tiny(), [Case("silent", ("nothing",), 1, lambda bench, metrics: iter(()))])
    assert result["rows"][-1]["problem"] == "silent ended without it"
    assert gpu.failed(result["rows"][-1])


@pytest.mark.usefixtures("in_this_process")
def test_what_the_time_does_not_reach_is_named_and_is_no_error() -> None:
    bench = tiny(deadline=time.monotonic() + 100)
    bench.pick = lambda real, tiny: real  # type: ignore[method-assign]  # a dry run asks for no time
    begin = replace(LIMITS, run=lambda bench, metrics: iter(Row(row, "s", harness.spread([1.0])) for row in LIMIT_ROWS))
    slow = replace(SOUND, seconds=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_cases, "LIMITS", begin)
        *_, result = gpu.run(bench, [slow, Case("late", ("in time", "too late"), 1, late)])
    problems = {row["metric"]: row["problem"] for row in result["rows"]}
    assert problems["third"].startswith("left out: needs about 1000 s, ")
    assert problems["in time"] == ""
    assert problems["too late"] == "left out: needs about 500 s"
    assert not [row for row in result["rows"] if row["metric"] in ("third", "too late") and gpu.failed(row)]


def late(bench: Bench, metrics: Sequence[str]) -> Iterator[Row]:
    yield Row("in time", "s", harness.spread([1.0]))
    raise LeftOut("left out: needs about 500 s")


@pytest.mark.slow
def test_one_command_for_a_machine_with_a_gpu_tests_and_measures(tmp_path: Path) -> None:
    out = tmp_path / "made by it"
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, "TESTS": "200", "LIMIT": "600"}
    command = ["bash", str(ROOT / "reference_impl" / "bench" / "on_gpu.sh"), "--dry-run", "--only", "idle"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests 0, bench 0" in done.stdout
    assert json.loads((out / "gpu.json").read_text())["complete"]
    assert (out / "warm.log").read_text()
    name = gpu_cases.IDLE_ROWS[0]
    log = (out / "gpu.log").read_text().splitlines()
    assert sum(line.startswith((name, f"| {name}")) for line in log) == 2, "when it is measured, and in the table"
    assert "passed" in (out / "tests.log").read_text() or "skipped" in (out / "tests.log").read_text()


def test_a_copy_without_git_is_stamped_with_the_commit_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "__file__", str(tmp_path / "harness.py"))
    monkeypatch.setenv("INFERLAB_COMMIT", "abc123")
    assert harness.stamp()["commit"] == "abc123"
    monkeypatch.delenv("INFERLAB_COMMIT")
    assert harness.stamp()["commit"] == "unknown"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "expected a GPU that torch sees" in capsys.readouterr().err


def test_a_name_that_no_case_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--dry-run", "--only", "two streams"])
    assert "expected a part of one of: 256 requests of nano-vllm" in capsys.readouterr().err


def test_inferlab_bench_gpu_is_the_same_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from reference_impl.cli import app

    seen: list[Any] = []
    monkeypatch.setattr(gpu, "main", lambda words: seen.append(vars(gpu.parser().parse_args(words))) or 1)
    words = [
        "--only",
        "x y",
        "--seconds",
        "7",
        "--rounds",
        "2",
        "--out",
        "a.json",
        "--dry-run",
        "--no-save",
    ]
    assert CliRunner().invoke(app, ["bench", "gpu", *words]).exit_code == 1
    assert CliRunner().invoke(app, ["bench", "gpu"]).exit_code == 1
    same = [vars(gpu.parser().parse_args(given)) for given in (words, [])]
    assert seen == same


def test_names_of_lines_are_unique_and_every_goal_has_one() -> None:
    assert len(set(ALL_ROWS)) == len(ALL_ROWS)
    assert set(gpu_cases.GOALS) <= set(ALL_ROWS)


def test_the_cases_fit_into_the_eight_minutes_by_their_own_estimates() -> None:
    assert gpu_warm.SECONDS + sum(case.seconds for case in [LIMITS, *CASES]) <= 480


def test_a_window_in_which_not_everybody_decodes_is_no_measurement() -> None:
    bench = tiny()
    with pytest.raises(RuntimeError, match=r"a decoding step gave \d tokens to 3 requests"):
        list(gpu_cases.decode(bench, ["three"], "llama-3-8b", (3,), 8, 2, 2, max_num_seqs=2))
    assert not bench.llm("llama-3-8b", max_num_seqs=2).engine.requests  # and nobody is left behind


def test_without_limits_what_was_reached_is_still_told() -> None:
    bench = tiny()
    bench.limits = {}
    [stream] = gpu_cases.one_stream(bench, ["stream"], "llama-3-8b")
    [prefill] = gpu_cases.prefill(bench, ["prefill"], 1, 100)
    for row in (stream, prefill):
        assert row.ours is not None
        assert row.limit is row.percent_of_limit is None


def test_a_profile_that_is_busier_than_its_steps_is_not_believed() -> None:
    gpu_cases.check_profile(1.09e-3, 1e-3)
    with pytest.raises(
        RuntimeError, match="1200 µs of a step in the profile, and .* 1000 µs at most: the profile cannot be right"
    ):
        gpu_cases.check_profile(1.2e-3, 1e-3)


def test_beside_load_a_dry_run_of_a_profile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU operators take longer while they are profiled, and beside other work by any factor."""
    monkeypatch.setattr(gpu_cases, "busy_seconds", lambda spans, longest: (1e6, 0.0))
    assert [row.ours for row in gpu_cases.idle(tiny(), gpu_cases.IDLE_ROWS)]


def test_windows_count_tokens_and_contexts_of_every_request() -> None:
    [row] = gpu_cases.decode(tiny(), ["three"], "llama-3-8b", (3,), 10, 2, 2)
    first, second = row.detail["contexts"]
    assert second - first == 2.0
    assert 12 + 2 <= first <= 12 + 8
    assert row.ours == harness.spread([3 / s for s in row.detail["step_seconds"]])


def test_a_case_makes_an_engine_once_and_the_record_says_what_it_is() -> None:
    bench = tiny()
    plain, quantized = bench.llm("llama-3-8b"), bench.llm("llama-3-8b", quantization="int4")
    assert bench.llm("llama-3-8b") is plain
    assert bench.llm("llama-3-8b", quantization="int4") is quantized
    found = list(bench.known()["configurations"].values())
    assert [engine["options"].get("quantization") for engine in found] == [None, "int4"]
    assert found[0]["bytes_per_step_but_kv"] > found[1]["bytes_per_step_but_kv"]
    assert {"seconds_to_make", "num_parameters", "overlaps", "graphs", "attention", "choices"} < set(found[0])


def test_kernels_that_run_together_count_once_and_only_short_gaps_are_a_graphs() -> None:
    spans = [(1.0, 2.0), (0.0, 1.5), (2.000002, 3.0), (2.5, 2.6), (4.0, 5.0)]
    busy, short = busy_seconds(spans, gpu_cases.LONG_GAP)
    assert busy == pytest.approx(2.0 + 0.999998 + 1.0)
    assert short == pytest.approx(2e-6)
    assert busy_seconds([]) == (0.0, 0.0)


def test_waiting_for_the_executor_is_timed() -> None:
    llm = tiny().llm("llama-3-8b")
    seconds = gpu_cases.waits(llm)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert len(seconds) == 3
    assert all(s >= 0 for s in seconds)


def test_runs_of_the_garbage_collector_are_timed_and_none_after() -> None:
    with gpu_cases.collecting() as marks:
        gc.collect()
    assert len(marks) == 2
    gc.collect()
    assert len(marks) == 2


class Peer:
    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, 0.999])


def compared(**runs: Any) -> Row:
    asked = {name: lambda prompts, run=run: run() for name, run in runs.items()}
    return gpu_peers.compared(tiny(), "metric", Peer(), [[1]], 2, asked, {})  # type: ignore[arg-type]


def test_a_peer_that_cannot_run_is_named_and_we_are_measured() -> None:
    def broken() -> Any:
        raise ImportError("no such thing")

    row = compared(
        ours=lambda: (2.0, [[1, 2]]), other=broken, better=lambda: (0.5, [[1, 2]]), slow=lambda: (4.0, [[1, 1]])
    )
    assert row.ours is not None
    assert row.ours["median"] == 1.0
    assert row.peer == ("better", 4.0)
    assert "other did not run: ImportError: no such thing" in row.note
    assert row.detail["same_tokens"]["slow"]["rows_equal"] == 0  # a near-tie


def test_a_peer_that_says_something_else_is_an_error() -> None:
    row = compared(ours=lambda: (1.0, [[1, 2]]), other=lambda: (1.0, [[0, 2]]))
    assert row.problem.startswith("other: ")
    assert "not a near-tie" in row.problem
    assert row.ours is not None  # what was measured stays
    assert row.peer == ("other", 2.0)
    assert gpu.failed(row.to_json())
    said = gpu.markdown({"stamp": harness.stamp(), "dry_run": True, "complete": False, "rows": [row.to_json()]})
    assert said.endswith(f"\n- metric: {row.problem}; with prefill")
    with pytest.raises(RuntimeError, match="expected 2 tokens for each prompt"):
        compared(ours=lambda: (1.0, [[1, 2]]), other=lambda: (1.0, [[1]]))
    with pytest.raises(ZeroDivisionError):  # and what we cannot do is one
        compared(ours=lambda: (1 / 0, []), other=lambda: (1.0, [[1, 2]]))


def test_less_is_better_turns_the_percentage_around() -> None:
    assert Row("a", "µs", harness.spread([20.0]), limit=5.0, less_is_better=True).percent_of_limit == 25
    assert Row("a", "1/s", harness.spread([20.0]), limit=80.0).percent_of_limit == 25
    assert gpu_rows.from_json(json.loads(json.dumps(Row("a", peer=("x", 1.0)).to_json()))) == Row("a", peer=("x", 1.0))
