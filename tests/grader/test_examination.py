"""An examination as a whole: prepared namespaces, processes that die of memory, results without end, the sentinel."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from grader.examination import attempt
from grader.examination.examiner import Limits, _data_bytes, examine, prepare
from grader.examination.submission import Added, Submission
from grader.isolation.launcher import Ending
from grader.labs.lab import Lab, lab_from_notebook
from grader.labs.lab_source import solution_notebook

ROOT = Path(__file__).parents[2]
SOURCES = [
    Path(__file__).parent / "toy_lab" / "solutions" / "01_toy" / "toy.py",
    Path(__file__).parent / "roles_lab" / "solutions" / "12_roles" / "roles.py",
    *sorted((ROOT / "solutions").glob("[0-9]*_*/*.py")),
]


def read(source: Path) -> Lab:
    return lab_from_notebook(solution_notebook(source), source.parent.name, source.stem)


def solved(lab: Lab) -> dict[str, str]:
    return {cell.grade_id: cell.source for cell in lab.of_kind("solution")}


def edited(solution_text: str, old: str, new: str) -> Lab:
    """The toy lab with a text replaced."""
    notebook = json.loads(solution_text)
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"]).replace(old, new)
    return lab_from_notebook(notebook, "01_toy", "toy")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_a_raise_at_the_top_of_the_solution_cells_costs_everything(source: Path, launcher: Any) -> None:
    lab = read(source)
    sentinel = {name: "raise RuntimeError('sentinel')\n" + text for name, text in solved(lab).items()}
    result = examine(lab, Submission(sentinel), launcher, secret=b"sentinel")
    assert result.points > 0
    assert result.earned == 0
    assert {check.status for check in result.checks} == {"failed"}


def test_a_lab_without_answers_earns_nothing_when_all_cells_are_empty(lab: Any, launcher: Any) -> None:
    result = examine(lab, Submission(dict.fromkeys(solved(lab), "")), launcher, secret=b"x")
    assert result.earned == 0
    assert "is not defined" in result.checks[0].message


# --- prepared -----------------------------------------------------------------------------------------------------


def test_a_prepared_namespace_gives_the_same_result(lab: Any, launcher: Any) -> None:
    plain = examine(lab, Submission(solved(lab)), launcher, secret=b"x")
    told: list[str] = []
    prepared = prepare(lab, b"x")
    result = examine(lab, Submission(solved(lab)), launcher, secret=b"x", prepared=prepared,
                     on_check=lambda check: told.append(check.grade_id))  # fmt: skip
    assert [(c.grade_id, c.earned, c.seen) for c in result.checks] == [
        (c.grade_id, c.earned, c.seen) for c in plain.checks
    ]
    assert told == [check.grade_id for check in result.checks]


def test_functions_of_the_examiners_cells_find_the_learners_names_when_they_are_called(
    solution_text: str, launcher: Any
) -> None:
    lab = edited(solution_text, "class Model:", "def filled(n):\n    w = Window(n)\n    return w\n\n\nclass Model:")
    lab = edited(json.dumps(lab.notebook), "w = Window(2)\nassert", "w = filled(2)\nassert")
    prepared = prepare(lab, b"x")
    assert prepared is not None
    assert "Window" not in prepared
    result = examine(lab, Submission(solved(lab)), launcher, secret=b"x", prepared=prepared)
    assert result.status == "passed"
    wrong = {**solved(lab), "Window": solved(lab)["Window"].replace("return len(self.rows)", "return 7")}
    result = examine(lab, Submission(wrong), launcher, secret=b"x", prepared=prepare(lab, b"x"))
    assert result.checks[1].status == "failed"


def test_a_lab_that_needs_the_learners_names_at_once_is_not_prepared(solution_text: str, launcher: Any) -> None:
    lab = edited(solution_text, "class Model:", "EMPTY = Window(3)\n\n\nclass Model:")
    assert prepare(lab, b"x") is None
    assert examine(lab, Submission(solved(lab)), launcher, secret=b"x", prepared=None).status == "passed"


def test_after_a_crash_the_examiners_cells_run_again_although_they_were_prepared(
    solution_text: str, launcher: Any, statuses: Any
) -> None:
    dies = {**solved(edited(solution_text, "", "")), "Window": "import os\nclass Window:\n    __init__ = os._exit"}
    lab = edited(solution_text, "model = Model()", "model = Model()\nassert Model.__name__ == 'Model', 'gone'")
    result = examine(lab, Submission(dies), launcher, secret=b"x", prepared=prepare(lab, b"x"))
    assert set(statuses(result).values()) == {"crashed"}


def test_the_secret_is_in_what_was_prepared_with_it(solution_text: str) -> None:
    lab = edited(solution_text, "class Model:", "from grader.checks import seed\nKEY = seed('key')\n\n\nclass Model:")
    first, again, other = (prepare(lab, secret) for secret in (b"one", b"one", b"two"))
    assert first is not None
    assert again is not None
    assert other is not None
    assert first["KEY"] == again["KEY"] != other["KEY"]


# --- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_failure_of_the_examiners_own_cells_is_not_the_learners(solution_text: str, launcher: Any) -> None:
    lab = edited(solution_text, "class Model:", "1 / 0\n\n\nclass Model:")
    result = examine(lab, Submission(solved(lab)), launcher, secret=b"x")
    assert {check.status for check in result.checks} == {"machinery"}
    assert "ZeroDivisionError" in result.checks[0].message


@pytest.mark.parametrize(
    ("does", "otherwise"), [("os.kill(os.getpid(), 9)", "crashed"), ("import time; time.sleep(600)", "timed out")]
)
@pytest.mark.parametrize("out_of_memory", [True, False])
def test_an_end_for_memory_is_told_from_another(
    lab: Any, launcher: Any, monkeypatch: pytest.MonkeyPatch, hasty: Any, out_of_memory: bool, does: str, otherwise: str
) -> None:
    # What the kernel does is tested with the sandbox; here its verdict is given. It may have ended another of the
    # learner's processes, for which this one waits.
    end = attempt.LearnerProcess.end

    def judged(process: Any) -> Ending:
        end(process)
        return Ending(9, out_of_memory)

    monkeypatch.setattr(attempt.LearnerProcess, "end", judged)
    source = solved(lab)["Window"].replace("return len(self.rows)", f"import os; {does}")
    hasty(lambda header, payload: "sleep" in does and header.get("n") == "__len__")
    result = examine(lab, Submission({**solved(lab), "Window": source}), launcher, secret=b"x")
    expected = "killed for memory" if out_of_memory else otherwise
    assert [check.status for check in result.checks] == ["passed", expected, "passed"]
    assert result.status == f"{expected} in check_len"
    assert ("memory" in result.checks[1].message) == out_of_memory


def test_a_cell_that_ends_the_process_is_named(lab: Any, launcher: Any) -> None:
    added = [Added("imports", "code", "x = 1"), Added("imports", "code", "import os; os._exit(0)")]
    result = examine(lab, Submission(solved(lab), added), launcher, secret=b"x")
    assert {check.message for check in result.checks} == {
        "your cell that begins with 'import os; os._exit(0)' ended its process"
    }


def test_many_slow_cells_share_the_time_of_a_check(lab: Any, launcher: Any) -> None:
    added = [Added(None, "code", "import time; time.sleep(0.5)") for _ in range(40)]
    limits = Limits(check=1.0)
    result = examine(lab, Submission(solved(lab), added), launcher, secret=b"x", limits=limits)
    assert {(c.status, c.message) for c in result.checks} == {
        ("timed out", "the cells before the checks had not finished after 1 s")
    }


def test_what_is_yielded_without_end_costs_one_check_and_bounded_memory(solution_text: str, launcher: Any) -> None:
    lab = edited(solution_text, "assert len(w) == 0", "list(w.mean())\nassert len(w) == 0")
    endless = solved(lab)["Window"].replace("return torch.stack(self.rows).mean(0)", "return Endless()", 1)
    endless += (
        "\nclass Endless:\n    def __iter__(self): return self\n    def __next__(self): return b'x' * 50_000_000\n"
    )
    result = examine(lab, Submission({**solved(lab), "Window": endless}), launcher, secret=b"x",
                     limits=Limits(memory=400 << 20))  # fmt: skip
    check = result.checks[1]
    assert check.status in ("failed", "crashed")  # which of the two allocations fails is chance
    assert "MemoryError" in check.message or "more than the examiner can hold" in check.message


def test_what_call_backs_bring_and_the_checks_objects_keep_costs_one_check_and_bounded_memory(
    solution_text: str, launcher: Any
) -> None:
    keeps = "self.calls += 1; self.__dict__.setdefault('kept', []).append(tokens)"
    lab = edited(solution_text, "self.calls += 1", keeps)
    hoards = "def apply_all(model, tokens, window):\n    for _ in range(200): model(torch.zeros(5_000_000).byte())"
    peak, over = [_data_bytes()], threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            peak.append(_data_bytes())

    watch = threading.Thread(target=look)
    watch.start()
    try:
        submission = Submission({**solved(lab), "apply_all": hoards})
        limits = Limits(call=600.0, check=600.0, memory=100 << 20)
        result = examine(lab, submission, launcher, secret=b"x", limits=limits)
    finally:
        over.set()
        watch.join()
    assert [check.grade_id for check in result.checks if check.status == "passed"] == ["check_window", "check_len"]
    assert result.checks[-1].status in ("failed", "crashed")
    said = ("MemoryError", "can't allocate memory", "more than the examiner can hold")  # of which step is chance
    assert any(text in result.checks[-1].message for text in said)
    assert max(peak) - peak[0] < 110 << 20


FORGED = """
import json, os, struct
def send(value, **more):
    text = json.dumps({"m": "ok", "v": value} | more).encode()
    os.write(3, struct.pack(">III", len(text), 0, 0) + text)
"""
FORGERIES = {
    "a handle in place of the names": "send({'t': 'h', 'id': 1, 'cls': 'x', 'methods': ['get'], 'dunders': []})",
    "many answers ahead of the questions": "[send(None) for _ in range(50)]",
    "names that are data": "send([None]); send({'t': 'd', 'v': [[n, True] for n in ('Window', 'apply_all')]})",
    "nothing but answers": "[send([None]) for _ in range(200)]",
    "an end without an answer": "os.close(3)",
    "a thread that goes on answering": (
        "import threading; threading.Thread(target=lambda: [send(True) for _ in range(9999)], daemon=True).start()"
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_a_process_that_answers_by_itself_earns_nothing(lab: Any, launcher: Any, forgery: str) -> None:
    submission = Submission(dict.fromkeys(solved(lab), ""), [Added("imports", "code", FORGED + forgery)])
    result = examine(lab, submission, launcher, secret=b"x", limits=Limits(call=3.0))
    assert result.earned == 0
    assert len(result.checks) == 3
    json.loads(result.to_json())


def test_whoever_sits_at_the_machine_can_stop_it(lab: Any, launcher: Any, when_exists: Any, tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    loop = f"open({str(reached)!r}, 'w').close()\n        while True: pass"
    source = solved(lab)["Window"].replace("return len(self.rows)", loop)
    presser = when_exists(reached, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        examine(lab, Submission({**solved(lab), "Window": source}), launcher, secret=b"x", limits=Limits(call=300.0))
    presser.join()
    assert examine(lab, Submission(solved(lab)), launcher, secret=b"x").status == "passed"


def test_what_a_check_prints_is_kept_within_bounds(solution_text: str, launcher: Any) -> None:
    lab = edited(solution_text, "assert len(w) == 0", "for _ in range(300): print('x' * 1_000_000)\nassert len(w) == 0")
    result = examine(lab, Submission(solved(lab)), launcher, secret=b"x")
    assert result.status == "passed"
    assert len(result.checks[1].seen) == 4000


def test_time_that_is_used_up_leaves_the_rest_not_run(lab: Any, launcher: Any) -> None:
    result = examine(lab, Submission(solved(lab)), launcher, secret=b"x", limits=Limits(total=0.0))
    assert {check.status for check in result.checks} == {"not run"}
