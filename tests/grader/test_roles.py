"""Roles: worlds of their own in a notebook, processes when graded; calls that run together, deadlocks, deaths."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from grader.channel import Network
from grader.checks import Deadlock, roles, together
from grader.examination.reference import run_cell
from grader.examination.roles import changed
from grader.examination.written import MAX_TEXTS, texts_in
from grader.learner_side.peer import LAB_MODULE
from tests.warm import Warm

from .test_proof import prove

LAB = Path(__file__).parent / "roles_lab"


def notebook(*cells: str) -> dict[str, Any]:
    """The namespace of a notebook in which `cells` were run."""
    namespace: dict[str, Any] = {"__name__": LAB_MODULE, "roles": roles, "together": together}
    for number, source in enumerate(cells):
        run_cell(source, f"role test {number} {abs(hash(cells))}", namespace)
    return namespace


@pytest.mark.parametrize("sample", ["a few mutants", pytest.param(None, marks=pytest.mark.slow, id="all")])
def test_the_roles_lab_is_proven_both_ways(sample: str | None, warm: Warm) -> None:
    [proof] = prove(warm, (LAB / "solutions" / "12_roles" / "roles.py", LAB / "proof" / "12_roles", sample))
    assert proof.problems == []


def test_results_come_in_the_order_of_the_calls() -> None:
    first = threading.Event()
    assert together([lambda: first.wait(600), lambda: first.set() or 2, lambda: 3]) == [True, 2, 3]


def test_calls_that_wait_for_each_other_run_at_the_same_time() -> None:
    barrier = threading.Barrier(5)
    assert sorted(together([lambda: barrier.wait(600) for _ in range(5)])) == [0, 1, 2, 3, 4]


def test_all_that_wait_for_nobody_are_told_who_waits_for_whom() -> None:
    a, b, c = Network(3).ports
    with pytest.raises(
        Deadlock, match="rank 0 waits for a message from rank 1; rank 1 waits for a message from rank 2"
    ):
        together([lambda: a.recv(1), lambda: b.recv(2), lambda: c.rank])


def test_a_role_that_waits_outside_of_together_waits_for_nobody() -> None:
    a, b = Network(2).ports
    b.send(0, 7)
    assert a.recv(1) == 7
    with pytest.raises(Deadlock, match="no other role is running"):
        a.recv(1)


def test_the_cause_is_told_and_not_its_consequences() -> None:
    a, _, c = Network(3).ports

    def fails() -> None:
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        together([lambda: a.recv(1), fails, lambda: c.recv(0)])


def test_a_role_may_go_on_after_a_deadlock() -> None:
    a, b = Network(2).ports

    def gives_up() -> str:
        try:
            a.recv(1)
        except RuntimeError:
            a.send(1, "after all")
        return "done"

    def tries_again() -> Any:
        try:
            return b.recv(0)
        except RuntimeError:
            return b.recv(0)

    assert together([gives_up, tries_again]) == ["done", "after all"]


@pytest.mark.parametrize("num_roles", [0, 17, -1])
def test_the_number_of_roles_is_bounded(num_roles: int) -> None:
    with pytest.raises(ValueError, match="1 to 16 roles"):
        roles(num_roles)


COUNTER = """
from dataclasses import dataclass
calls, table = 0, {"n": 0}

def helper():
    return len(table)

@dataclass
class Thing:
    n: int = 0

    def count(self):
        global calls
        calls += 1
        table["n"] += 1
        return calls, table["n"], helper()
"""


def test_in_a_notebook_each_role_has_variables_of_its_own() -> None:
    names = notebook(
        COUNTER, "other = {'n': 0}", "def outer():\n    other['n'] += 1\n    return Thing().count(), other['n']"
    )
    names["outer"]()
    check = "with roles(2) as (a, b):\n    seen = [a.outer(), a.outer(), b.outer(), a.Thing(5).n]"
    run_cell(check, "a check", names)
    # What a cell makes is made anew; a plain value of another cell is copied as it is now.
    assert names["seen"] == [((1, 1, 1), 2), ((2, 2, 1), 3), ((1, 1, 1), 2), 5]
    assert (names["calls"], names["table"], names["other"]) == (1, {"n": 1}, {"n": 1})


def test_in_a_notebook_a_role_runs_the_newest_definition() -> None:
    names = notebook("def f():\n    return 1\ndef g():\n    return f()", "def f():\n    return 2")
    run_cell("with roles(1) as [a]:\n    seen = (a.f(), a.g())", "a check", names)
    assert names["seen"] == (2, 2)


HASHES = "def own(*parts):\n    return [hash(part) for part in parts]"
TEXTS = ("a", b"a", ("a", 1), ((1, "a"),), frozenset(["a"]))


def test_in_a_notebook_each_role_has_hashes_of_text_of_its_own_and_no_others() -> None:
    names = notebook(HASHES)
    run_cell(f"with roles(3) as found:\n    seen = [one.own(*{TEXTS!r}) for one in found]", "another check", names)
    for numbers in zip(*names["seen"], strict=True):
        assert len(set(numbers)) == 3
    values = (5, 2.5, None, (1, 2), True, int)
    names["values"] = values
    run_cell("with roles(3) as found:\n    seen = [one.own(*values, 'a', 'a') for one in found]", "a third", names)
    for numbers in names["seen"]:
        assert numbers[: len(values)] == [hash(value) for value in values]
        assert numbers[-1] == numbers[-2]
    assert names["own"]("a") == [hash("a")]


@pytest.mark.parametrize("own", ["def hash(value):\n    return 7", "from operator import length_hint as hash"])
def test_a_hash_of_the_learners_own_is_the_learners(own: str) -> None:
    names = notebook(own, HASHES)
    run_cell("with roles(2) as found:\n    seen = [one.own('seven..') for one in found]", "a check", names)
    assert names["seen"] == [[7], [7]]


def test_when_graded_each_role_has_hashes_of_text_of_its_own(roles_lab: Any, launcher: Any) -> None:
    source = 'def all_reduce(comm, x):\n    raise ValueError(f\'<{hash("a")} {"a".__hash__()} {hash(5)}>\')'
    message, again = (examine_all_reduce(roles_lab, launcher, source).checks[0].message for _ in range(2))
    (own, of_all, five) = re.findall(r"<(-?\d+) (-?\d+) (\d+)>", message)[0]
    assert own != of_all
    assert five == "5"
    assert f"<{own} " in again


WRITTEN = """\
BETWEEN = "a made-up separator"
UNUSED = "not in it"


def join(a, b):
    \'\'\'Text about join.\'\'\'
    return f"{a}{BETWEEN}{b}--and--" + "-=" * 3 + str(b"in bytes") + str(b"\\xff")


class Other:
    \'\'\'Text about Other.\'\'\'
"""


def test_the_texts_of_a_notebook_are_those_of_the_cell_and_of_what_it_uses() -> None:
    names = notebook(WRITTEN, "OUTSIDE = 'far away'\nDEEP = 'two steps away'", "def deep():\n    return DEEP",
                     "def outside():\n    return deep(), OUTSIDE")  # fmt: skip
    run_cell("from grader.checks import texts_of\nseen = texts_of('join')\nfar = texts_of('outside')", "check", names)
    assert {"a made-up separator", "--and--", "-=-=-=", "in bytes"} <= set(names["seen"])
    assert not {"Text about join.", "Text about Other."} & set(names["seen"])
    assert {"far away", "two steps away"} <= set(names["far"])
    assert "a made-up separator" not in names["far"]


@pytest.mark.parametrize(
    "source", ["def f(:", "x = '\\0' \0", "x = " + "(" * 500 + ")" * 500, "x = '" + "a" * 501 + "'"]
)
def test_no_cell_of_a_learner_keeps_a_check_from_the_texts_of_the_others(source: str) -> None:
    assert texts_in([source, "x = 'here'"]) == ["here"]


def test_the_texts_that_a_check_gets_are_few() -> None:
    assert len(texts_in([f"x = {[str(i) for i in range(1000)]}"])) == MAX_TEXTS
    assert texts_in(["x = 'a' * 10**9"]) == ["a"]


def test_a_name_that_nobody_wrote_is_said() -> None:
    names = notebook("def f():\n    return 1")
    with pytest.raises(AttributeError, match="solution cells have no 'missing'"):
        run_cell("with roles(1) as [a]:\n    a.missing()", "a check", names)


def test_a_check_that_is_given_up_leaves_no_role_waiting() -> None:
    a, _ = Network(2).ports
    started, blocked = threading.active_count(), threading.Event()

    def stop() -> None:
        blocked.wait(600)
        raise SystemExit

    def waits() -> None:
        blocked.set()
        a.recv(1)

    with pytest.raises(SystemExit):
        together([waits, stop])
    with changed:
        changed.wait_for(lambda: threading.active_count() <= started, timeout=600)
    for thread in threading.enumerate():
        if thread.daemon and "run" in thread.name:
            thread.join(600)
    assert threading.active_count() <= started + 1


@pytest.fixture(scope="module")
def roles_lab() -> Any:
    from grader.labs.lab import lab_from_notebook
    from grader.labs.lab_source import solution_notebook

    return lab_from_notebook(solution_notebook(LAB / "solutions" / "12_roles" / "roles.py"), "12_roles", "roles")


def examine_all_reduce(lab: Any, launcher: Any, source: str, **limits: float) -> Any:
    from grader.examination.examiner import Limits, examine
    from grader.examination.submission import Submission

    solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    submission = Submission({**solved, "all_reduce": source})
    return examine(lab, submission, launcher, secret=b"x", limits=Limits(**limits))  # type: ignore[arg-type]


def test_a_role_that_hangs_times_out_and_the_others_do_not_hang(
    roles_lab: Any, launcher: Any, statuses: Any, hasty: Any
) -> None:
    def is_all_reduce_of_rank_1(header: dict[str, Any], payload: Any) -> bool:
        arguments = payload[0] if header["m"] == "call" else ()
        return bool(arguments) and getattr(arguments[0], "rank", None) == 1

    given = hasty(is_all_reduce_of_rank_1)
    hangs = "def all_reduce(comm, x):\n    while comm.rank == 1: pass\n    return comm.recv(1)"
    result = examine_all_reduce(roles_lab, launcher, hangs, call=300.0)
    assert given[0] == 300.0
    assert statuses(result)["check_sum"] == "timed out"
    assert result.checks[0].message == (
        "role 1: all_reduce (cell all_reduce) had not finished after 300 s; it was at line 2:\n"
        "    while comm.rank == 1: pass"
    )
    assert statuses(result)["check_lossy"] == "passed"


def test_a_check_whose_roles_swallow_deadlocks_times_out(
    roles_lab: Any, launcher: Any, statuses: Any, when_exists: Any, tmp_path: Path
) -> None:
    swallowed = tmp_path / "swallowed"
    # In the checks after the first one nothing waits: none of them can be the one that is ended.
    swallows = f"""
import os

def all_reduce(comm, x):
    assert not os.path.exists({str(swallowed)!r})
    while True:
        try:
            comm.recv((comm.rank + 1) % comm.world_size)
        except RuntimeError:
            open({str(swallowed)!r}, "w").close()
"""
    ringer = when_exists(swallowed, lambda: os.kill(os.getpid(), signal.SIGALRM))  # as when its time is over
    result = examine_all_reduce(roles_lab, launcher, swallows, check=600.0)
    ringer.join()
    assert swallowed.exists()
    assert statuses(result)["check_sum"] == "timed out"


def test_roles_end_with_their_check(roles_lab: Any, launcher: Any, tmp_path: Path) -> None:
    source = f"""
def all_reduce(comm, x):
    import os
    open("{tmp_path}/" + str(os.getpid()), "w").close()
    print("I am", comm.rank)
    raise ValueError
"""
    result = examine_all_reduce(roles_lab, launcher, source)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 11  # 4 + 3 + 4 ranks, each in a process of its own
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert "role 3: I am 3" not in result.printed  # only the last roles' output is kept
    assert result.flags == []


def test_what_belongs_to_a_role_cannot_be_given_to_another(roles_lab: Any, launcher: Any) -> None:
    result = examine_all_reduce(
        roles_lab, launcher, "def all_reduce(comm, x):\n    comm.send(comm.rank ^ 1, lambda: 1)"
    )
    assert "a message is data" in result.checks[0].message


@pytest.mark.parametrize("name", ["port", "_network", "sent", "num_bytes", "__dict__"])
def test_a_role_sees_no_count(roles_lab: Any, launcher: Any, name: str) -> None:
    result = examine_all_reduce(roles_lab, launcher, f"def all_reduce(comm, x):\n    return comm.{name}")
    assert "AttributeError" in result.checks[0].message


def test_torch_in_a_role_thread_uses_the_threads_of_the_check() -> None:
    assert together([torch.get_num_threads] * 3) == [torch.get_num_threads()] * 3


SHARED = """
board = {}

def all_reduce(comm, x):
    board[comm.rank] = x
    for r in range(comm.world_size):
        if r != comm.rank:
            comm.send(r, 0), comm.recv(r)
    return sum(board[r] for r in range(comm.world_size))
"""


def test_the_checks_run_unchanged_in_a_notebook() -> None:
    import nbclient
    import nbformat

    from grader.labs.lab_source import solution_notebook, write_notebook

    source = write_notebook(solution_notebook(LAB / "solutions" / "12_roles" / "roles.py"))
    notebook = nbformat.reads(source, as_version=4)
    use = "try:\n    all_reduced([torch.ones(3)] * 3)\nexcept {0} as error:\n    print('{0}', error)"
    wait = "def all_reduce(comm, x):\n    return comm.recv((comm.rank + 1) % 3)"
    for text in (SHARED, use.format("KeyError"), wait, use.format("RuntimeError")):
        notebook.cells.append(nbformat.v4.new_code_cell(text))
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()  # raises where a check fails
    assert "KeyError" in notebook.cells[-3].outputs[0].text
    assert "rank 2 waits for a message from rank 0" in notebook.cells[-1].outputs[0].text
