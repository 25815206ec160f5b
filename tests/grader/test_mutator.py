"""Mechanical mutants: what each rule makes of a line, and that nothing outside the solution is touched."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from grader.labs.lab import Cell, LabError, load_lab
from grader.proofs.mechanical import Verdict, drawn, harmless, problems
from grader.proofs.mutator import Mutant, mutants

ROOT = Path(__file__).parents[2]
LABS = sorted((ROOT / "solutions").glob("[0-9]*_*/*.ipynb"))


def made(body: str, head: str = "def f(a, b, xs, n):") -> dict[str, str]:
    """What may stand in place of each line of a function's body: new text -> rule."""
    lines = "\n".join(["    ### BEGIN SOLUTION", textwrap.indent(body, "    "), "    ### END SOLUTION"])
    cell = Cell("f", "solution", f"{head}\n{lines}\n")
    return {mutant.after: mutant.rule for mutant in mutants(cell)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a < b", {"return (a <= b)", "return (a >= b)", "return a < (b + 1)", "return a < (b - 1)"}),
        ("return a == b", {"return (a != b)"}),
        ("return 3", {"return 4", "return 2"}),
        ("return 0", {"return 1", "return (-1)"}),
        ("return True", {"return False"}),
        ("return 0.5", {"return 1.0", "return 0.25"}),
        ("return a - b", {"return (a + b)", "return (a)", "return (b)", "return (b - a)"}),
        ("return a // b", {"return (-(-(a) // b))", "return (a * b)", "return (a / b)"}),
        ("a += b", {"a -= b", "a = b", "pass"}),
        ("return -a", {"return (a)"}),
        ("return a and b", {"return ((a) or (b))", "return ((a))", "return (not (a)) and b"}),
        ("return a if n else b", {"return a if (not (n)) else b", "return a if True else b"}),
        ("return xs[n]", {"return xs[(n + 1)]", "return xs[(n - 1)]"}),
        ("return xs[a:b]", {"return xs[(a + 1):b]", "return xs[:b]", "return xs[a:]", "return xs[a:(b - 1)]"}),
        ("return xs[a:]", {"return xs[a:-1]"}),
        ("return xs[:b]", {"return xs[1:b]"}),
        ("return xs.max()", {"return xs.min()", "return (xs)", "return (xs.max() + 1)"}),
        ("return a.to(torch.float64)", {"return a.to(torch.float32)"}),
        ("return g(a, b, n=n)", {"return g(b, a, n=n)", "return g(a, b)"}),
        ("return list(xs)", {"return (xs)"}),
        ("return [x for x in xs if x]", {"return [x for x in xs if (not (x))]", "return [x for x in xs if True]"}),
        ("return range(n)", {"return range((n + 1))", "return range((n - 1))"}),
        ("del xs[n]", {"pass"}),
    ],
)
def test_what_may_stand_in_place_of_a_line(line: str, expected: set[str]) -> None:
    assert expected <= set(made(line))


def test_of_loops() -> None:
    found = made("for x in xs:\n    if x:\n        continue\n    g(x)\nreturn n")
    assert {"break", "for x in list(xs)[::-1]:", "for x in list(xs)[1:]:", "g(x)\nbreak"} <= set(found)
    assert found["break"] == "loop"


def test_only_the_solution_changes_and_an_errors_words_do_not() -> None:
    before, after = "LIMIT = 3\n\ndef f(a):\n    ### BEGIN SOLUTION\n", "    ### END SOLUTION\n    return a + 1\n"
    raised = "        raise ValueError(f'{a + 1} is above {LIMIT}')\n"
    found = mutants(Cell("f", "solution", f"{before}    if a > LIMIT:\n{raised}{after}"))
    assert len(found) > 4
    for mutant in found:
        assert mutant.function == "f"
        assert mutant.source.startswith(before)
        assert mutant.source.endswith(raised + after) or mutant.after == "pass"


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("path", LABS, ids=lambda path: path.parent.name)
def test_mutants_of_a_lab_compile_differ_and_have_names_of_their_own(path: Path) -> None:
    found = [mutant for cell in load_lab(path).of_kind("solution") for mutant in mutants(cell)]
    assert len(found) > 300
    sources = {(mutant.cell, mutant.source) for mutant in found}
    assert len(sources) == len(found)
    for mutant in found[::25]:
        compile(mutant.source, "", "exec")
    few, total = drawn(path, 20, "a")
    assert (len(few), total) == (20, len(found))
    assert few == drawn(path, 20, "a")[0]
    assert few != drawn(path, 20, "b")[0]


def test_what_survives_needs_a_reason_and_a_reason_a_survivor(tmp_path: Path) -> None:
    mutant = Mutant("f", "f", 3, "bound", "return a < b", "return (a <= b)", "")
    survivor, unlucky = Verdict(mutant, None, 0, 3), Verdict(mutant, "check_a", 1, 3)
    hidden, visible = Verdict(mutant, "check_a", 3, 3), Verdict(mutant, "check_b", None, 3)
    assert [v.word for v in (survivor, unlucky, hidden, visible)] == ["survivor", "some secrets", "hidden", "visible"]
    [said] = problems([survivor], {})
    assert said == f"passes all checks, line 3 (bound): {mutant.key}"
    assert problems([unlucky], {}) == [f"is seen by 1 of 3, line 3 (bound): {mutant.key}"]
    assert problems([hidden, visible], {}) == []
    (tmp_path / "survivors.yaml").write_text(f"{mutant.key!r}: both bounds give an empty tile\n")
    known = harmless(tmp_path)
    assert problems([survivor, unlucky], known) == []
    assert len(problems([hidden, visible], known)) == 2
    (tmp_path / "survivors.yaml").write_text(f"{mutant.key!r}:\n")
    with pytest.raises(LabError, match="expected a reason, a sentence"):
        harmless(tmp_path)
