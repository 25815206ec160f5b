"""Similarity: copies are found through renaming, reordering and reformatting; independent work is not."""

from __future__ import annotations

import ast
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grader.labs.lab import Lab, lab_from_notebook
from grader.labs.lab_source import released_notebook, solution_notebook, write_notebook
from grader.proofs.proof import cases
from grader.reports.similarity import MAX_CODE, MAX_PAIRS, MIN_PRINTS, THRESHOLD, Pair, _units, fingerprints, similar

REPOSITORY = Path(__file__).parents[3]
LABS = {"01_prefill_decode": "metrics_sampling", "02_kv_cache": "kv_cache"}
INDEPENDENT = 0.1  # what two variants written independently have in common at most; the threshold is far above


class Written:
    """A lab's stub and the solutions that exist of it, each as {solution cell: source}."""

    def __init__(self, slug: str) -> None:
        name = LABS[slug]
        notebook = solution_notebook(REPOSITORY / "solutions" / slug / f"{name}.py")
        lab = lab_from_notebook(notebook, slug, name)
        released: Lab = lab_from_notebook(
            json.loads(released_notebook(write_notebook(notebook), slug, name)), slug, name
        )
        self.stub = [cell.source for cell in released.cells if cell.kind != "text"]
        found = {case.name: case for case in cases(lab, REPOSITORY / "tests" / "labs" / slug)}
        self.reference = found["reference"].submission.answers
        self.variants = {
            name: self._own(case.submission.answers) for name, case in found.items() if case.kind == "variant"
        }
        self.mutants = {name: case.submission.answers for name, case in found.items() if case.kind == "mutant"}

    def _own(self, answers: dict[str, str]) -> dict[str, str]:
        return {cell: source for cell, source in answers.items() if source != self.reference[cell]}


@pytest.fixture(scope="module", params=LABS)
def written(request: pytest.FixtureRequest) -> Written:
    return Written(request.param)


class Disguise(ast.NodeTransformer):
    """Renames whatever the code names itself, except what the lab fixes, and drops docstrings."""

    def __init__(self, own: set[str]) -> None:
        self.names = {name: f"w{number}_{name[::-1]}" for number, name in enumerate(sorted(own))}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self.names.get(node.arg, node.arg)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in ("self", self.names.get("self")):
            node.attr = self.names.get(node.attr, node.attr)
        return node


def disguised(source: str, seed: int) -> str:
    """The same program with other names, no comments, another layout, and definitions and methods in another order."""
    tree = ast.parse(source)
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    tree = Disguise(own).visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            random.Random(seed).shuffle(node.body)
    random.Random(seed).shuffle(tree.body)
    return ast.unparse(tree)


def test_independent_solutions_share_next_to_nothing(written: Written) -> None:
    """Any two, by the cells that both have; at once for all pairs that have the same cells in common."""
    everybody = {**written.variants, "reference": written.reference}
    groups: dict[frozenset[str], list[tuple[str, str]]] = {}
    for left, right in itertools.combinations(sorted(everybody), 2):
        groups.setdefault(frozenset(everybody[left]) & frozenset(everybody[right]), []).append((left, right))
    shares = []
    for both, pairs in groups.items():
        names = {name for pair in pairs for name in pair}
        class_ = {name: [source for cell, source in everybody[name].items() if cell in both] for name in names}
        found = similar(class_, written.stub, threshold=0.0)
        assert found.compared == len(names)
        share_of = {(pair.left, pair.right): pair.share for pair in found.pairs}
        shares += [share_of.get(pair, 0.0) for pair in pairs]
    print("shares of independent pairs:", [round(share, 2) for share in shares])
    assert max(shares) < INDEPENDENT < THRESHOLD


def test_a_disguised_copy_is_found_among_independent_work(written: Written) -> None:
    class_ = {name: list(cells.values()) for name, cells in written.variants.items()}
    for name, cells in written.variants.items():
        copy = [disguised(source, seed=3) for source in reversed(cells.values())]
        assert copy != class_[name]
        found = similar({**class_, "copy": copy}, written.stub)
        assert found.clusters == (tuple(sorted(("copy", name))),)
        assert found.pairs[0].share > 0.85  # what lies across the edges of shuffled imports and definitions is new


def test_who_took_the_same_known_solution_is_no_copy_of_the_other(written: Written) -> None:
    known = {"public": list(written.reference.values())}
    one, other = (list(written.mutants[name].values()) for name in sorted(written.mutants)[:2])
    assert similar({"one": one, "other": other}, written.stub).clusters == (("one", "other"),)
    found = similar({"one": one, "other": other}, written.stub, known)
    assert found.clusters == found.pairs == ()
    assert {pair.left for pair in found.known} == {"one", "other"}
    own = next(iter(written.variants.values()))  # what both have beside it still counts
    both = [*own.values(), *written.reference.values()]
    found = similar({"one": both, "other": [disguised(source, seed=3) for source in both]}, written.stub, known)
    assert found.clusters == (("one", "other"),)


def test_every_mutant_of_the_reference_is_found_to_resemble_it(written: Written) -> None:
    reference = {"the solution": list(written.reference.values())}
    found = similar({name: list(cells.values()) for name, cells in written.mutants.items()}, written.stub, reference)
    assert {pair.left for pair in found.known} == set(written.mutants)
    variants = similar(
        {name: list(cells.values()) for name, cells in written.variants.items()}, written.stub, reference
    )
    assert variants.known == ()


def test_the_stub_and_what_the_lab_gives_do_not_count(written: Written) -> None:
    found = similar({"a": written.stub, "b": written.stub}, written.stub)
    assert found.too_short == ("a", "b")
    assert found.pairs == ()


def program(seed: int, length: int = 12) -> str:
    """A function that nobody else wrote: a random sequence of statements."""
    rng = random.Random(seed)
    forms = ("x = x + {}", "x = [y * {} for y in x]", "if x[{}] > 3:\n        x = x.sort()", "x.append({})",
             "while len(x) < {}:\n        x = x[1:] + x", "x = max(x, key=lambda y: y % {})",
             "for y in x:\n        print(y, {})",
             "assert x is not None, {}", "x = dict(zip(x, range({})))", "x = torch.relu(x - {})")  # fmt: skip
    return "def f(x):\n" + "".join(f"    {rng.choice(forms).format(rng.randint(1, 9))}\n" for _ in range(length))


def test_five_hundred_submissions_are_compared_and_the_ten_copies_among_them_found() -> None:
    class_ = {f"s{seed}": [program(seed)] for seed in range(490)}
    class_ |= {f"copy{seed}": [disguised(program(seed), seed)] for seed in range(10)}
    found = similar(class_, [])
    assert found.compared == 500
    assert found.clusters == tuple((f"copy{seed}", f"s{seed}") for seed in range(10))


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("\n", "  # a comment\n\n"),
        lambda text: text.replace("def f(x):\n", 'def f(x):\n    """Mine."""\n'),
        lambda text: text.replace("(x):", "(x: list[int]) -> list:"),
        lambda text: "import math\n" + text + "\n\n\n",
        lambda text: "%matplotlib inline\n" + text,
    ],
)
def test_comments_docstrings_annotations_imports_and_magics_change_nothing(edit: Any) -> None:
    assert fingerprints([edit(program(1))]) == fingerprints([program(1)])


@pytest.mark.parametrize("source", ["def f(:", "(" * 5000, "x = " + "-" * 3000 + "1", "\0", "a = 1\n" * 60000, ""])
def test_what_is_not_a_program_is_left_out_and_stops_nothing(source: str) -> None:
    found = similar({"odd": [source], "a": [program(1)], "b": [program(1)]}, [])
    assert "odd" in found.too_short
    assert found.pairs == (Pair("a", "b", 1.0),)


def test_a_class_of_copies_is_one_cluster_and_keeps_a_bounded_number_of_pairs() -> None:
    found = similar({f"s{number:03}": [program(1)] for number in range(150)}, [])
    assert found.clusters == (tuple(f"s{number:03}" for number in range(150)),)
    assert len(found.pairs) == MAX_PAIRS < 150 * 149 / 2


def test_a_few_lines_are_never_compared() -> None:
    short = ["def f(a, b):\n    return a + b"]
    assert len(fingerprints(short)) < MIN_PRINTS
    assert similar({"a": short, "b": short}, [], {"web": short}).too_short == ("a", "b")


def test_clusters_join_through_a_common_neighbour() -> None:
    def parts(*seeds: int) -> Sequence[str]:
        return [program(seed).replace("def f", f"def f{seed}") for seed in seeds]

    found = similar({"a": parts(1, 2, 3), "b": parts(2, 3, 4), "c": parts(3, 4, 5), "d": parts(7, 8, 9)}, [])
    assert found.clusters == (("a", "b", "c"),)
    assert {(pair.left, pair.right) for pair in found.pairs} == {("a", "b"), ("b", "c")}


@pytest.mark.parametrize(
    "strange", ["x = 0x" + "f" * 5000, "x = " + "9" * 5000, "(" * 5000, "x = " + "-" * 90_000 + "1"]
)
def test_no_code_however_strange_stops_the_comparison_of_the_others(strange: str) -> None:
    same = ["\n".join(f"value_{i} = first[{i}] * second[{i}] + third({i})" for i in range(40))]
    found = similar({"ada": same, "bob": same, "mallory": [*same, strange]}, [])
    assert ("ada", "bob") in [(pair.left, pair.right) for pair in found.pairs]
    assert found.compared + len(found.too_short) == 3


def test_of_an_endless_submission_the_beginning_is_compared_and_its_student_is_named(written: Written) -> None:
    honest = list(written.reference.values())
    padding = [f"x{number} = {number}\n" * 1000 for number in range(500)]  # some 5 MB
    found = similar({"a": honest, "b": [*honest, *padding], "c": [*padding, *honest]}, written.stub)
    assert found.too_long == ("b", "c")
    assert sum(map(len, written.stub)) < MAX_CODE
    whole = fingerprints([*honest, *padding])
    assert whole == fingerprints([*honest, *padding[: len(padding) // 10]])
    assert fingerprints(honest) < whole
    assert fingerprints(["x = 1\n" * MAX_CODE, *honest]) == frozenset()


def test_a_class_of_many_methods_is_gone_through_once() -> None:
    compared = 0

    class Method(ast.FunctionDef):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

        __hash__ = ast.FunctionDef.__hash__

    methods = [Method() for _ in range(100)]
    given: Any = ast.Module([ast.ClassDef("A", [], [], [*methods, ast.Pass()], [])], [])
    *found, rest = _units([given])
    assert all(one is other for one, other in zip(found, methods, strict=True))
    assert [type(part) for part in rest.body] == [ast.Pass]  # type: ignore[attr-defined]
    assert compared == 0
