"""The proof of a lab's conventions: with each option the private reference passes, a public solution loses its points.

    python -m grader.proofs.convention_proof solutions/02_kv_cache/kv_cache.py             each option alone
    python -m grader.proofs.convention_proof solutions/02_kv_cache/kv_cache.py --sample X  a draw of options, drawn by X

Each option runs alone, directly; then draws that hold every option between them, through the examiner, too.

    python -m grader.proofs.convention_proof solutions/02_kv_cache/kv_cache.py tests/labs/02_kv_cache

The folder's variants and mutants, each in one of these draws, by turns, directly. A cell of theirs that an option
changes takes the same replacements. Where they do not fit its text, the next draw is tried; where none does, a variant
takes the reference's cell and a mutant is left out; both are named. These are proven for the public form only. So is
which checks see a mutant, exactly: an option changes what checks can see, and here one of them has to.

    python -m grader.proofs.convention_proof solutions/02_kv_cache/kv_cache.py tests/labs/02_kv_cache --values

For each option, or with --sample X one of each convention, directly: its mutants in the folder's `options.yaml`, which
have its form and another value, fail the checks they say and no other.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from grader.examination.examiner import examine, prepare
from grader.examination.submission import Submission
from grader.isolation.launcher import Launcher
from grader.labs.convention import (
    Convention,
    Option,
    Replacement,
    Strict,
    Text,
    applied,
    applied_where_touched,
    load_conventions,
    private_lab,
    public_points,
    validate,
)
from grader.labs.lab import Lab, LabError
from grader.proofs.direct import compute_as_in_a_learners_process, kept_kernels, run_directly
from grader.proofs.proof import LIMITS, Case, Reached, cases

SECRET = b"proof"
WRONG_VALUES = "options.yaml"


class WrongValue(Strict):
    """A solution in an option's form that is wrong in what the option adds. cells: replacements in the private
    reference; fails: the checks that see it, exactly."""

    fault: Text
    fails: Annotated[list[Text], Field(min_length=1)]
    cells: Annotated[dict[str, Annotated[list[Replacement], Field(min_length=1)]], Field(min_length=1)]


def wrong_values(folder: Path) -> dict[tuple[str, str], list[WrongValue]]:
    """The mutants that the folder's `options.yaml` has, by (convention, option). Raises LabError, OSError."""
    path = folder / WRONG_VALUES
    try:
        found = TypeAdapter(dict[str, dict[str, list[WrongValue]]]).validate_python(
            yaml.safe_load(path.read_text("utf-8"))
        )
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: {error}") from None
    return {
        (convention, option): mutants for convention, options in found.items() for option, mutants in options.items()
    }


def wrong_value_cases(source: Path, option: Option, mutants: Sequence[WrongValue]) -> list[Case]:
    """The mutants of an option as submissions to the lab with this option alone. Raises LabError where one does not
    fit its text."""
    solved = {cell.grade_id: cell.source for cell in private_lab(source, (option,)).of_kind("solution")}
    found = []
    for mutant in mutants:
        as_option = option.model_copy(update={"name": f"{option.name}, mutant", "cells": mutant.cells})
        answers = applied(solved, [as_option])
        found.append(Case(mutant.fault, "mutant", Submission(answers), frozenset(mutant.fails), mutant.fault))
    return found


def prove_values(source: Path, option: Option, mutants: Sequence[WrongValue]) -> Proof:
    """The mutants of an option, directly, by the checks that their cells have to do with."""
    proof = Proof((option,))
    reached = Reached(private_lab(source, (option,)))
    for case in wrong_value_cases(source, option, mutants):
        lab = reached.by(case.submission)
        for check in sorted(case.fails - {cell.grade_id for cell in lab.of_kind("check")}):
            proof.problems.append(f"{option.name}: {check} has nothing to do with mutant {case.name!r}")
        _run(lab, case, None, proof)
    return proof


@dataclass
class Proof:
    """What one set of options showed. lost: per check a public solution loses, the message a student sees."""

    options: tuple[Option, ...]
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    num_cases: int = 0


def covering(conventions: Sequence[Convention]) -> Iterator[tuple[Option, ...]]:
    """Draws that hold every option of every convention at least once; as few as that needs."""
    for number in range(max((len(c.options) for c in conventions), default=0)):
        yield tuple(c.options[number % len(c.options)] for c in conventions)


def prove_options(source: Path, options: tuple[Option, ...], launcher: Launcher | None) -> Proof:
    """Stub, reference and public solution of a lab with these options; without a launcher directly only."""
    lab, public = private_lab(source, options), private_lab(source, ())
    proof, solved = Proof(options), {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    checks = frozenset(cell.grade_id for cell in lab.of_kind("check"))
    copied = Submission({cell.grade_id: cell.source for cell in public.of_kind("solution")})
    prepare(lab, SECRET)  # imports what the forks need, and loads its model, once for all
    for case in (
        Case("stub", "stub", Submission(), checks),
        Case("reference", "reference", Submission(solved)),
        Case("solution", "public", copied, frozenset().union(*(option.fails for option in options))),
    ):
        _run(lab, case, launcher, proof)
    return proof


def prove_cases(source: Path, draws: Sequence[tuple[Option, ...]], folder: Path) -> list[Proof]:
    """The folder's variants and mutants, directly, each in one of the draws, by turns, by the checks that its cells
    have to do with."""
    labs = [Reached(private_lab(source, options)) for options in draws]
    proofs = [Proof(options) for options in draws]
    prepare(labs[0].lab, SECRET)  # imports what the forks need, and loads its model, once for all
    public = Reached(private_lab(source, ()))
    tried = [case for case in cases(public.lab, folder) if case.kind in ("variant", "mutant")]
    for turn, case in enumerate(tried):
        own = {name: case.submission.answers[name] for name in public.changed(case.submission)}
        order = [(turn + offset) % len(draws) for offset in range(len(draws))]
        fitting = {number: _fitted(own, labs[number].solved, draws[number]) for number in order}
        number = next((number for number in order if not fitting[number][1]), order[0])
        answers, misfits = fitting[number]
        if misfits:
            proofs[number].left_out.append(f"{case.kind} {case.name} ({', '.join(misfits)})")
        if not misfits or (case.kind == "variant" and answers != labs[number].solved):
            submission = Submission(answers)
            lab, fitted = labs[number].by(submission), replace(case, submission=submission)
            if case.kind == "variant":
                _run(lab, fitted, None, proofs[number])
            else:
                _run_mutant(lab, fitted, proofs[number])
    return proofs


def _run_mutant(lab: Lab, case: Case, proof: Proof) -> None:
    """One in the form of a draw: it must lose points, by one of the checks that see it in the public form."""
    statuses = run_directly(lab, case.submission, SECRET)
    proof.num_cases += 1
    if all(statuses.get(check, "passed") == "passed" for check in case.fails):
        options = " + ".join(option.name for option in proof.options)
        proof.problems.append(f"{options}: mutant {case.name} passes {', '.join(sorted(case.fails))}")


def _fitted(
    own: Mapping[str, str], solved: Mapping[str, str], options: tuple[Option, ...]
) -> tuple[dict[str, str], list[str]]:
    """A solution that has these own cells with the options' replacements; and the names of those that these do not
    fit, where the reference's stand."""
    answers, misfits = dict(solved), []
    for grade_id, text in own.items():
        try:
            answers[grade_id] = applied_where_touched(grade_id, text, options)
        except LabError:
            misfits.append(grade_id)
    # What another cell of its own needs of a cell that is not there any more, as an import, is not there either.
    while lost := set().union(*(_bound(own[each]) - _bound(solved[each]) for each in misfits)):
        need = [each for each in own if each not in misfits and lost & _used(own[each]) - _bound(own[each])]
        if not need:
            break
        misfits += need
        answers |= {each: solved[each] for each in need}
    return answers, misfits


def _bound(source: str) -> set[str]:
    """The names that a cell binds at its top level."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(each.asname or each.name).partition(".")[0] for each in names}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Assign():
                found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found


def _used(source: str) -> set[str]:
    return {each.id for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Name)}


def _run(lab: Lab, case: Case, launcher: Launcher | None, proof: Proof) -> None:
    direct = run_directly(lab, case.submission, SECRET)
    examined, messages = direct, dict.fromkeys(direct, "")
    if launcher is not None:
        checks = examine(lab, case.submission, launcher, secret=SECRET, limits=LIMITS).checks
        examined = {check.grade_id: check.status for check in checks}
        messages = {check.grade_id: check.message for check in checks}
    name, options = f"{case.kind} {case.name}", " + ".join(option.name for option in proof.options)
    proof.num_cases += 1
    for check, status in examined.items():
        passes, expected = status == "passed", check not in case.fails
        if (direct[check] == "passed") != passes:
            proof.problems.append(f"{options}: {name}: {check} is {direct[check]} directly, "
                                  f"{status} through the examiner: {messages[check]}")  # fmt: skip
        if passes != expected:
            what = f"fails {check}: {messages[check]}" if expected else f"passes {check}"
            proof.problems.append(f"{options}: {name} {what}")
        if case.kind == "public" and not passes:
            proof.lost[check] = messages[check]


def main() -> int:
    """Print what each draw costs, as the first lines of this file say; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--values", action="store_true")
    parser.add_argument("--sample", metavar="SEED")
    arguments = parser.parse_args()
    compute_as_in_a_learners_process()
    source, sample = arguments.source, arguments.sample
    if arguments.values:
        return _values(source, arguments.folder or parser.error("--values needs the folder of the mutants"), sample)
    conventions = validate(source) if sample is None else load_conventions(source)
    draws, alone = list(covering(conventions)), [(option,) for each in conventions for option in each.options]
    with kept_kernels():
        if arguments.folder is not None:
            proofs = prove_cases(source, draws, arguments.folder)
        elif sample is not None:
            proofs = [prove_options(source, random.Random(sample).choice(draws), None)]
        else:
            proofs = [prove_options(source, options, None) for options in alone]
            with Launcher(insecure=True) as launcher:
                proofs += [prove_options(source, options, launcher) for options in draws]
    for proof in proofs:
        names = " + ".join(option.name for option in proof.options)
        lost = "" if arguments.folder else f"; a public solution loses {', '.join(proof.lost) or 'nothing'}"
        print(f"{names}: {proof.num_cases} cases{lost}")
        for check, message in proof.lost.items():
            print(f"    {check}: {message}" if message else f"    {check}")
        if proof.left_out:
            print(f"    left out: {', '.join(proof.left_out)}")
        print("".join(f"    PROBLEM {problem}\n" for problem in proof.problems), end="")
    broken = sum(bool(proof.problems) for proof in proofs)
    if sample is None:
        least, most = public_points(private_lab(source, ()), conventions)
        print(f"a public solution earns {least:g} to {most:g} points, as the course draws")
    print("every case is as it must be" if conventions and not broken else f"{broken} draws have problems")
    return 1 if broken else 0


def _values(source: Path, folder: Path, sample: str | None) -> int:
    mutants, broken = wrong_values(folder), 0
    with kept_kernels():
        for convention in load_conventions(source):
            drawn = convention.options if sample is None else [random.Random(sample).choice(convention.options)]
            for option in drawn:
                proof = prove_values(source, option, mutants.get((convention.name, option.name), ()))
                print(f"{convention.name}, {option.name}: {proof.num_cases} mutants")
                print("".join(f"    PROBLEM {problem}\n" for problem in proof.problems), end="", flush=True)
                broken += bool(proof.problems)
    print("every case is as it must be" if not broken else f"{broken} options have problems")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
