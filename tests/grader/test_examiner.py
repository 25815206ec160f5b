"""The examiner against right, wrong, dying, hanging and forging solutions, in a real second process."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ALL = ("check_window", "check_len", "check_calls")

FOLDERS = [sys.prefix, sysconfig.get_paths()["stdlib"], tempfile.gettempdir() + "/", str(Path(__file__).parents[2])]

WINDOW = """
class Window:
    def __init__(self, size):
        self.size = size
        self.rows = []

    def append(self, x):
        {append}
        self.rows = [*self.rows, x][-self.size :]

    def mean(self):
        return torch.stack(self.rows).mean(0)

    def __len__(self):
        {length}
"""


def window(append: str = "pass", length: str = "return len(self.rows)") -> str:
    return WINDOW.format(append=append, length=length)


def test_the_reference_earns_all_points(examine: Any, lab: Any) -> None:
    result = examine()
    assert (result.status, result.earned, result.points) == ("passed", 6.0, 6.0)
    assert "3.00" in result.checks[0].seen


def test_the_stub_earns_nothing_and_says_what_is_not_written(lab: Any, launcher: Any, statuses: Any) -> None:
    from grader.examination.examiner import examine
    from grader.examination.submission import Submission

    result = examine(lab, Submission(), launcher, secret=b"test")
    assert statuses(result) == dict.fromkeys(ALL, "not written")
    assert result.earned == 0
    assert result.checks[0].message == "Window is not written yet"


@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("import os; os._exit(0)", "crashed"),
        ("import os; os.kill(os.getpid(), 9)", "crashed"),
        ("import ctypes; ctypes.string_at(0)", "crashed"),
        ("import os; os.closerange(3, 100); return 0", "crashed"),
        ("import os; os.write(3, b'x' * 100); return 0", "crashed"),
        ("raise SystemExit(0)", "failed"),
        ("import sys; sys.exit()", "failed"),
        ("raise KeyboardInterrupt", "failed"),
        ("return len(self.rows) + len(self.rows)[0]", "failed"),
        ("return self.missing", "failed"),
        ("return '2'", "failed"),
        ("return True", "failed"),
        ("raise AssertionError('' if 0 else None)", "failed"),
        ("return Window.__len__(self)", "failed"),
    ],
)
def test_what_goes_wrong_in_one_part_costs_its_check_and_no_other(
    examine: Any, statuses: Any, length: str, status: str
) -> None:
    result = examine(Window=window(length=length))
    assert statuses(result) == {"check_window": "passed", "check_len": status, "check_calls": "passed"}
    assert result.earned == 5
    assert result.status == (status if status == "failed" else f"{status} in check_len")


def of_len(header: dict[str, Any], payload: Any) -> bool:
    """Whether a request calls the learner's __len__."""
    return header.get("n") == "__len__"


def test_an_endless_loop_times_out_in_its_check(examine: Any, statuses: Any, hasty: Any) -> None:
    given = hasty(of_len)
    result = examine(Window=window(length="while True: pass"))
    assert statuses(result) == {"check_window": "passed", "check_len": "timed out", "check_calls": "passed"}
    assert given == [60.0]
    assert "had not finished after 60 s" in result.checks[1].message


def test_a_loop_that_swallows_interrupts_is_ended_too(examine: Any, statuses: Any, hasty: Any) -> None:
    hasty(of_len)
    loop = """
        while True:
            try:
                while True: pass
            except BaseException: pass
    """
    assert statuses(examine(Window=window(length=loop)))["check_len"] == "timed out"


def test_a_check_that_loops_over_endless_answers_times_out(lab: Any, launcher: Any, solution_text: str) -> None:
    import json

    from grader.examination.examiner import Limits, examine
    from grader.examination.submission import Submission
    from grader.labs.lab import lab_from_notebook

    # The bell of this check rings sooner; the other checks, and what comes before them, have all their time.
    endless = "import signal; signal.setitimer(signal.ITIMER_REAL, 0.3, 1.0)\\nwhile w.size: pass\\nassert len(w) == 0"
    notebook = json.loads(solution_text.replace("assert len(w) == 0", endless))
    looping = lab_from_notebook(notebook, "01_toy", "toy")
    solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    result = examine(looping, Submission(solved), launcher, secret=b"test", limits=Limits(check=600.0))
    assert [check.status for check in result.checks] == ["passed", "timed out", "passed"]


def test_after_one_time_out_the_later_calls_of_a_submission_get_less(lab: Any, launcher: Any, hasty: Any) -> None:
    from grader.examination.examiner import Limits, examine
    from grader.examination.submission import Submission

    solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    endless = Submission({**solved, "Window": window(length="while True: pass", append="while True: pass")})

    def calls_append(header: dict[str, Any], payload: Any) -> bool:
        return header["m"] == "call" and (header["n"] in ("append", "__len__") or len(payload[0]) == 3)  # apply_all

    given = hasty(calls_append)
    result = examine(lab, endless, launcher, secret=b"test", limits=Limits(call=60.0, later_call=30.5))
    waited = [check.message.rsplit(" after ", 1)[1].split(";")[0] for check in result.checks]
    assert waited == ["60 s", "30.5 s", "30.5 s"]
    assert given == [60.0, 30.5, 30.5]


def test_going_through_answers_that_never_end_is_bounded(lab: Any, launcher: Any, solution_text: str) -> None:
    import json

    from grader.examination.examiner import Limits, examine
    from grader.examination.submission import Submission
    from grader.labs.lab import lab_from_notebook

    notebook = json.loads(solution_text.replace("assert len(w) == 0", "for row in w: pass\\nassert len(w) == 0"))
    reading = lab_from_notebook(notebook, "01_toy", "toy")
    solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    endless = {**solved, "Window": window() + "\n    def __iter__(self):\n        while True: yield 1\n"}
    result = examine(reading, Submission(endless), launcher, secret=b"test", limits=Limits(call=600.0, calls=200))
    assert [check.status for check in result.checks] == ["passed", "timed out", "passed"]
    assert "after as many calls as one check may make" in result.checks[1].message


def test_once_time_outs_have_cost_enough_a_call_has_the_least_and_the_rest_a_bound(
    lab: Any, launcher: Any, hasty: Any
) -> None:
    from grader.examination.examiner import Limits, examine
    from grader.examination.submission import Submission

    solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    endless = Submission({**solved, "Window": window(length="while True: pass", append="while True: pass")})

    def calls_append(header: dict[str, Any], payload: Any) -> bool:
        return header["m"] == "call" and (header["n"] in ("append", "__len__") or len(payload[0]) == 3)  # apply_all

    given = hasty(calls_append)
    examine(lab, endless, launcher, secret=b"test", limits=Limits(call=60.0, later_call=50.0, lost=0.0, last_call=40.0))
    assert given == [60.0, 50.0, 40.0]
    result = examine(lab, endless, launcher, secret=b"test", limits=Limits(call=60.0, rest=0.0))
    assert [check.status for check in result.checks] == ["timed out", "not run", "not run"]
    assert "the time left after one had hung was used up" in result.checks[1].message


def test_a_solution_cell_that_hangs_fails_every_check_once(examine: Any, statuses: Any, hasty: Any) -> None:
    hasty(lambda header, payload: header["m"] == "cells" and "while True: pass" in payload[0][0])
    result = examine(Window=window() + "\nwhile True: pass")
    assert statuses(result) == dict.fromkeys(ALL, "timed out")


def test_a_solution_cell_that_ends_the_process_fails_every_check(examine: Any, statuses: Any) -> None:
    result = examine(Window=window() + "\nimport os; os._exit(0)")
    assert statuses(result) == dict.fromkeys(ALL, "crashed")


def test_a_syntax_error_is_shown_with_its_line(examine: Any, statuses: Any) -> None:
    result = examine(Window=window().replace("self.size = size", "self.size = = size"))
    assert set(statuses(result).values()) == {"failed"}
    assert "self.size = = size" in result.checks[0].message


def test_a_learners_error_is_shown_with_the_learners_lines_only(examine: Any) -> None:
    message = examine(Window=window(length="return self.missing")).checks[1].message
    assert "your code raised AttributeError" in message
    assert "return self.missing" in message
    assert "peer.py" not in message
    assert "stand_ins.py" not in message
    assert "assert" not in message


LIBRARY_ERRORS = {
    "numpy": "import numpy; return numpy.percentile([1.0], 990)",
    "raised from": "import json\n        try: json.loads('{')\n        except ValueError as e: raise KeyError from e",
    "deep": "import copy\n        x = []\n        for _ in range(900): x = [x]\n        return copy.deepcopy(x)",
    "names a file": "from json import nothing_of_this_name",
}


@pytest.mark.parametrize("length", LIBRARY_ERRORS.values(), ids=LIBRARY_ERRORS)
def test_an_error_inside_a_library_shows_the_learners_frames_and_no_folder_of_the_machine(
    examine: Any, length: str
) -> None:
    message = examine(Window=window(length=length)).checks[1].message
    assert "your code raised " in message
    assert '  File "<cell Window>", line ' in message
    assert "in __len__" in message
    assert all("<cell Window>" in line for line in message.split("\n") if "File " in line)
    assert message.split("\n")[-1].split(":")[0] in ("ValueError", "KeyError", "RecursionError", "ImportError")
    for folder in FOLDERS:
        assert folder not in message


def test_what_a_library_warns_of_names_no_folder_of_the_machine(examine: Any) -> None:
    warns = "import warnings; warnings.warn_explicit('careful', UserWarning, torch.__file__, 7)"
    result = examine(Window=window(append=f"{warns}; import os; print(os.getcwd() + '/x')"))
    assert "torch/__init__.py:7: UserWarning: careful" in result.printed
    for folder in FOLDERS:
        assert folder not in result.printed


def test_a_cell_that_stops_inside_a_library_shows_its_own_line_only(examine: Any) -> None:
    message = examine(Window="import json\njson.loads('{')\n" + window()).checks[0].message
    assert "json.loads('{')" in message
    assert "decoder.py" not in message
    assert "JSONDecodeError" in message


@pytest.mark.parametrize("text", ["12 tokens/s, a/b", "/s", "x = y /torch/z", "https://example.org/tmp/x"])
def test_text_that_only_looks_like_a_path_is_left_as_it_is(text: str) -> None:
    from grader.examination.examiner import clean

    assert clean(text) == text


def test_memory_that_nobody_wrote_is_nan_so_that_a_grade_never_depends_on_chance(examine: Any, statuses: Any) -> None:
    # The second tensor may get the memory of the first, which holds the right answer.
    length = "x = torch.full((4096,), 2.0); del x; return len(self.rows) if torch.empty(4096).isnan().all() else 99"
    assert statuses(examine(Window=window(length=length)))["check_len"] == "passed"


def test_an_error_in_an_added_cell_costs_nothing(examine: Any) -> None:
    result = examine(added=("1 / 0", "raise SystemExit", "def broken(:"))
    assert result.status == "passed"
    assert len(result.notes) == 3


def test_warnings_and_output_cost_nothing(examine: Any) -> None:
    noisy = (
        "import sys, warnings; warnings.warn('careful'); print('hello \\ud800 \\x1b[31m'); sys.stderr.write('oh no')"
    )
    result = examine(Window=window(append=noisy))
    assert result.status == "passed"
    assert "hello" in result.printed
    assert "oh no" in result.printed
    assert "\x1b" not in result.printed


def test_much_output_is_kept_within_bounds(examine: Any) -> None:
    result = examine(Window=window(append="print('x' * 30_000_000)"))
    assert result.status == "passed"
    assert len(result.printed) <= 1 << 16


@pytest.mark.parametrize(
    "append",
    [
        "torch.equal = torch.allclose = lambda *a, **k: True",
        "import builtins; builtins.len = lambda x: 2",
        "import sys; sys.modules['__main__'].__dict__.clear()",
        "import json; json.dumps = lambda *a, **k: '{}'",
    ],
)
def test_patching_its_own_process_gives_no_points(examine: Any, append: str) -> None:
    wrong = window(append=append, length="return 1")
    result = examine(Window=wrong)
    assert result.checks[1].earned == 0


@pytest.mark.parametrize(
    "mean",
    [
        "type('Any', (), {'__eq__': lambda s, o: True, '__bool__': lambda s: True})()",
        "type('T', (torch.Tensor,), {'__torch_function__': classmethod(lambda *a, **k: True)})()",
        "float('nan')",
        "torch.full((3,), float('nan'))",
        "torch.full((3,), 3.0).expand(10**9, 3)",
        "torch.zeros(3).double()",
        "None",
        "'3'",
        "[3.0, 3.0, 3.0]",
        "lambda: 3",
        "print",
    ],
)
def test_forged_results_pass_no_check(examine: Any, mean: str) -> None:
    source = window().replace("torch.stack(self.rows).mean(0)", mean)
    assert examine(Window=source).checks[0].earned == 0


def test_neither_tests_nor_reference_nor_seed_are_in_the_learners_process(examine: Any, lab: Any) -> None:
    source = window(append="spy()")
    spy = """
import gc, sys, os
def spy():
    seen = [sys.argv, os.getcwd(), sorted(os.listdir('.')), list(sys.modules), list(globals())]
    text = ' '.join(s for s in gc.get_objects() if isinstance(s, str)) + str(seen)
    found = ['HIDDEN' in text, 'torch.arange(7)' in text, 'x.clone()][-self' in text, 'grader' in sys.modules]
    print(*found)
"""
    result = examine(added=(spy,), Window=source)
    assert result.status == "passed"
    assert {line for line in result.printed.split("\n") if line.count("e ") == 3} == {"False False False False"}


@pytest.mark.parametrize(
    "module", ["grader", "grader.checks", "reference_impl.assembly.engine", "solutions", "chapters.widgets"]
)
def test_a_solution_cannot_import_the_courses_machinery(examine: Any, module: str) -> None:
    result = examine(Window=f"import {module}\n" + window())
    assert "is not available to a solution" in result.checks[0].message


def test_nothing_outlives_a_submission(examine: Any, tmp_path: Any) -> None:
    fork = (
        f"import os, time; pid = os.fork(); open('{tmp_path}/' + str(pid or os.getpid()), 'w'); pid or time.sleep(600)"
    )
    assert examine(Window=window(append=fork)).checks[0].status == "passed"
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert pids

    def alive(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return False
        return state != "Z"

    if os.path.isdir("/proc/self"):
        end = time.monotonic() + 300  # a killed process needs a moment to go; left alone it would sleep for 600 s
        while time.monotonic() < end and any(map(alive, pids)):
            time.sleep(0.05)
        assert not [pid for pid in pids if alive(pid)]


@pytest.mark.bwrap
def test_a_killed_warm_process_is_replaced_for_the_next_submission(lab: Any) -> None:
    from grader.examination.examiner import examine
    from grader.examination.submission import Submission
    from grader.isolation.launcher import Launcher

    solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    kill = "import os\n        try: os.kill(os.getppid(), 9)\n        except PermissionError: pass  # another user's"
    killer = window(length=f"{kill}\n        os._exit(0)")
    with Launcher() as own:
        assert examine(lab, Submission({**solved, "Window": killer}), own, secret=b"x").checks[1].status == "crashed"
        assert examine(lab, Submission(solved), own, secret=b"x").status == "passed"


def test_the_same_secret_gives_the_same_inputs_and_another_secret_others() -> None:
    import torch

    from grader.checks import rng, secret_seed, seed

    public = seed("a")
    with secret_seed(b"one"):
        first, x = seed("a"), torch.rand(3, generator=rng("a"))
        assert torch.equal(x, torch.rand(3, generator=rng("a")))
        assert seed("b") != first
    with secret_seed(b"two"):
        assert seed("a") not in (first, public)
    assert seed("a") == public


def test_a_result_survives_its_file(examine: Any) -> None:
    from grader.results.result import result_from_json

    result = examine(Window=window(length="return 'é \\ud800'"))
    assert result_from_json(result.to_json()) == result


def test_a_name_that_is_missing_says_what_to_change_first(examine: Any) -> None:
    def said(**changed: Any) -> str:
        return examine(**changed).checks[0].message

    ended = said(Window="import sys\nsys.exit()\n" + window())
    assert ended == (
        "Window is not defined\ncell Window ended with sys.exit() or exit(): nothing below that line in it was run. "
        "Take it out"
    )
    assert "cell Window begins with %%bash: it is not run as Python" in said(Window="%%bash\n" + window())
    result = examine(added=("\n# mine\n1 / 0",), Window="%%bash")
    own = result.checks[0].message
    assert "your cell that begins with '# mine' stopped with an error" in own
    assert "ZeroDivisionError" in own
    (note,) = [note for note in result.notes if "stopped" in note]
    assert note == "your cell that begins with '# mine' stopped with an error: ZeroDivisionError: division by zero"
    assert said(Window="%%time\n" + window()) == ""


def test_what_was_printed_before_a_process_ended_in_its_cells_is_kept(examine: Any) -> None:
    result = examine(Window="print('so far')\nimport os\nos._exit(0)")
    assert result.checks[0].status == "crashed"
    assert "so far" in result.printed


def test_who_has_printed_much_and_hangs_is_told_so(examine: Any, hasty: Any) -> None:
    hasty(of_len)
    prints = "import os\n        for _ in range(25): os.write(1, bytes(1 << 20))"
    message = examine(Window=window(append=prints, length="while True: pass")).checks[1].message
    assert "MB, which takes time: print less" in message
