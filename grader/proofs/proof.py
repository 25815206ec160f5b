"""The proof of a lab: correct solutions pass, each wrong one fails exactly the checks it says, in both ways of running.

Cases: the stub (no points), the reference, `variants/` (correct, written differently) and `mutants/` (one realistic
fault each). Every case runs directly, as in a learner's notebook, and through the examiner with the names as proxies of
a second process; a check that answers differently is a fault of the lab. A variant or mutant is tried by the checks
that its own cells have to do with, since for the others it is the reference; a mutant goes through the examiner by
those that must fail, since the others pass there with the reference and the variants.

    python -m grader.proofs.proof solutions/02_kv_cache/kv_cache.py tests/labs/02_kv_cache [JSON] [--sample SEED]

--sample: of the mutants as few as fail every check between them, drawn by the seed, and of these and of the variants
one through the examiner; stub and reference as without it. For a lab that was proven in full before.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import random
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grader.examination.examiner import Limits, examine, prepare
from grader.examination.needed import needed_cells
from grader.examination.submission import Submission
from grader.isolation.launcher import Launcher
from grader.labs.lab import Lab, LabError, comment_text, defined_names
from grader.labs.percent_file import percent_cells_of, percent_lab
from grader.proofs.direct import compute_as_in_a_learners_process, kept_kernels, run_directly
from grader.results.result import CheckResult

MIN_MUTANTS, MIN_VARIANTS = 15, 3
LIMITS = Limits(total=3600.0)


@dataclass(frozen=True)
class Case:
    """One solution to try. fails: the checks it must fail, and no other."""

    name: str
    kind: str  # stub, reference, variant, mutant
    submission: Submission
    fails: frozenset[str] = frozenset()
    fault: str = ""
    trap: str = ""


@dataclass
class Outcome:
    """What a case did: per check the status, run directly and through the examiner; nothing if it was not tried."""

    case: Case
    direct: dict[str, str] = field(default_factory=dict)
    proxied: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> set[str]:
        """Checks failed in either way of running."""
        return {check for check, status in [*self.direct.items(), *self.proxied.items()] if status != "passed"}


def cases(lab: Lab, folder: Path) -> list[Case]:
    """All cases of a lab; `folder` holds `variants` and `mutants`. Raises LabError."""
    solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    checks = {cell.grade_id for cell in lab.of_kind("check")}
    found = [
        Case("stub", "stub", Submission(), frozenset(checks)),
        Case("reference", "reference", Submission(dict(solved))),
    ]
    for kind in ("variant", "mutant"):
        for path in sorted((folder / f"{kind}s").glob("*.py")):
            header, cells = _replacements(path)
            if unknown := set(cells) - set(solved):
                raise LabError(f"{path.name}: no solution cell {', '.join(sorted(unknown))} in this lab")
            fails = frozenset(re.split(r"[,\s]+", comment_text(header, "fails").strip()) if kind == "mutant" else ())
            if kind == "mutant" and (not comment_text(header, "fault") or not fails or fails - checks):
                raise LabError(f"{path.name}: needs '# fault: ...' and '# fails: check, check' of {', '.join(checks)}")
            submission = Submission({**solved, **cells})
            fault, trap = comment_text(header, "fault"), comment_text(header, "trap")
            found.append(Case(path.stem, kind, submission, fails, fault, trap))
    return found


def _replacements(path: Path) -> tuple[str, dict[str, str]]:
    text = path.read_text("utf-8")
    start = re.search(r"^# %%", text, re.MULTILINE)
    header = text[: start.start()] if start else text
    raw = percent_cells_of(text[start.start() :], path.name) if start else []
    return header, {cell["metadata"]["nbgrader"]["grade_id"]: cell["source"] for cell in raw}


class Reached:
    """Which checks of a lab have to do with a cell of its solution: those that call what it defines, through others
    too. For any other check a solution that differs in that cell alone is the reference."""

    def __init__(self, lab: Lab, solved: Mapping[str, str] | None = None):
        """solved: the solution's cells, where the lab itself does not have them (a released notebook)."""
        self.lab = lab
        self.solved = dict(solved or {cell.grade_id: cell.source for cell in lab.of_kind("solution")})
        whole = Submission(dict(self.solved))
        self._needed = {cell.grade_id: needed_cells(lab, whole, cell) for cell in lab.of_kind("check")}

    def changed(self, submission: Submission) -> set[str]:
        """The solution's cells that are not the reference's."""
        return {name for name, source in self.solved.items() if submission.answers.get(name) != source}

    def by(self, submission: Submission) -> Lab:
        """The lab with only the checks that a submission's own cells have to do with."""
        changed = self.changed(submission)
        for name in changed:
            own = set(defined_names(submission.answers.get(name, "")))
            # A name that the reference does not define there may take the place of one that any check uses.
            if submission.added or not own or own - set(defined_names(self.solved[name])):
                return self.lab
        return with_checks(self.lab, {check for check in self._needed if self._reaches(changed, check)})

    def _reaches(self, changed: set[str], check: str) -> bool:
        """Whether a check has to do with the changed cells. One in which no call is seen, as those of roles, has."""
        return not self._needed[check] or bool(changed & self._needed[check])


def with_checks(lab: Lab, checks: Collection[str]) -> Lab:
    """The lab with these checks only."""
    kept = tuple(cell for cell in lab.cells if cell.kind != "check" or cell.grade_id in checks)
    return dataclasses.replace(lab, cells=kept)


def prove(
    lab: Lab,
    folder: Path,
    launcher: Launcher,
    secret: bytes = b"proof",
    sample: str | None = None,
    also: Sequence[Case] = (),
) -> list[Outcome]:
    """Run every case both ways; `sample`: some of them, as the first lines of this file say.

    also: cases that go only through the examiner. In a sample, one correct solution then does, a variant or one of
    these in the reference's place; and of the variants as few are tried as write every cell anew between them.
    The examiner's cells run once, here, and each case in a fork, so this process should have no threads.
    """
    outcomes = [Outcome(case) for case in cases(lab, folder)]
    directly, examined = _drawn(lab, [outcome.case for outcome in outcomes], sample, also)
    outcomes += map(Outcome, also)
    reached = Reached(lab)
    prepared = prepare(lab, secret)
    launcher.fork().end()  # here and not in a fork, so that this process, too, knows that it has started
    gc.freeze()  # a fork's garbage collection need not touch, and so copy, what was there before
    for outcome in outcomes:
        case, started = outcome.case, time.monotonic()
        tried_by = reached.by(case.submission) if case.kind in ("variant", "mutant") else lab
        if case.name in directly:
            outcome.direct = run_directly(tried_by, case.submission, secret)
        if case.name in examined:
            asked = with_checks(lab, case.fails) if case.kind == "mutant" else tried_by
            for check in _examined(asked, case.submission, launcher, secret, prepared):
                outcome.proxied[check.grade_id] = check.status
                if check.message:
                    outcome.messages[check.grade_id] = check.message
        outcome.seconds = time.monotonic() - started
    return outcomes


def _drawn(lab: Lab, found: list[Case], sample: str | None, also: Sequence[Case]) -> tuple[set[str], set[str]]:
    """Names of the cases to run directly, and of those to run through the examiner."""
    names = {case.name for case in found}
    if sample is None:
        return names, names | {case.name for case in also}
    random_draw = random.Random(sample)
    shuffled = random_draw.sample(found, len(found))
    variants = [case.name for case in found if case.kind == "variant"]
    if also:
        solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
        own = {case.name: case.submission.answers.items() - solved.items()
               for case in shuffled if case.kind == "variant"}  # fmt: skip
        variants = _covering({name: frozenset(cell for cell, _ in cells) for name, cells in own.items()})
    mutants = _covering({case.name: case.fails for case in shuffled if case.kind == "mutant"})
    always = {case.name for case in found if case.kind in ("stub", "reference")}
    if also:
        correct = [*variants, *(case.name for case in also if not case.fails)]
        examined = {"stub", *(case.name for case in also if case.fails), random_draw.choice(correct)}
    else:
        examined = always | set(random_draw.sample(variants, min(1, len(variants))))
    return always | set(variants) | set(mutants), examined | set(mutants[:1])


def _covering(found: Mapping[str, frozenset[str]]) -> list[str]:
    """A small set of these, by name, whose sets hold between them all that any holds: always the one that adds most (a
    greedy set cover); of those that add as much, the first."""
    chosen: list[str] = []
    left = frozenset[str]().union(*found.values())
    while left:
        best = max(found, key=lambda name: len(found[name] & left))
        chosen.append(best)
        left -= found[best]
    return chosen


def _examined(
    lab: Lab, submission: Submission, launcher: Launcher, secret: bytes, prepared: dict[str, Any] | None
) -> list[CheckResult]:
    """The checks' results by the examiner, in a fork, which takes `prepared` with it. Raises what went wrong there."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    answer: dict[str, Any]
    if pid == 0:
        os.close(read_fd)
        try:
            result = examine(lab, submission, launcher, secret=secret, limits=LIMITS, prepared=prepared)
            answer = {"checks": [dataclasses.asdict(check) for check in result.checks]}
        except BaseException as error:
            answer = {"problem": f"{type(error).__name__}: {error}"}
        with os.fdopen(write_fd, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    answer = json.loads(text) if text else {"problem": "its process ended"}
    if "problem" in answer:
        raise RuntimeError(f"the examiner failed: {answer['problem']}")
    return [CheckResult(**check) for check in answer["checks"]]


def problems(
    lab: Lab, outcomes: list[Outcome], *, num_mutants: int = MIN_MUTANTS, num_variants: int = MIN_VARIANTS
) -> list[str]:
    """What is not as it must be, one sentence each; an empty list is the proof."""
    found: list[str] = []
    for outcome in outcomes:
        if not outcome.direct:
            continue
        case, name = outcome.case, f"{outcome.case.kind} {outcome.case.name}"
        for check, status in outcome.proxied.items():
            if (status == "passed") != (outcome.direct.get(check) == "passed"):
                found.append(f"{name}: {check} is {outcome.direct.get(check)} directly, {status} through the examiner: "
                             f"{outcome.messages.get(check, '')}")  # fmt: skip
        for check in sorted(outcome.failed - case.fails):
            found.append(f"{name}: fails {check} unexpectedly: {outcome.messages.get(check, '')}")
        for check in sorted(case.fails - outcome.failed):
            found.append(f"{name}: passes {check}, which it should fail")
    mutants = [outcome.case for outcome in outcomes if outcome.case.kind == "mutant"]
    killed = set().union(*(outcome.failed for outcome in outcomes if outcome.case.kind == "mutant"))
    found += [f"no mutant fails {c.grade_id}" for c in lab.of_kind("check") if c.grade_id not in killed]
    traps = traps_in_text(lab)
    found += [f"the trap {trap!r} in the text has no mutant" for trap in traps if trap not in {m.trap for m in mutants}]
    found += [f"mutant {m.name}: the text has no trap {m.trap!r}" for m in mutants if m.trap and m.trap not in traps]
    for key in ("fault", "submission"):
        seen: dict[str, str] = {}
        for mutant in mutants:
            text = " ".join(str(getattr(mutant, key)).lower().split())
            if text in seen:
                found.append(f"mutants {seen[text]} and {mutant.name} have the same {key}")
            seen[text] = mutant.name
    if len(mutants) < num_mutants:
        found.append(f"{len(mutants)} mutants, expected at least {num_mutants}")
    if (variants := sum(outcome.case.kind == "variant" for outcome in outcomes)) < num_variants:
        found.append(f"{variants} variants, expected at least {num_variants}")
    return found


def traps_in_text(lab: Lab) -> list[str]:
    """Names of the traps in a lab's text, each marked `**Trap (name):**`."""
    return [name for cell in lab.of_kind("text") for name in re.findall(r"\*\*Trap \(([^)]+)\):\*\*", cell.source)]


def kill_matrix(lab: Lab, outcomes: list[Outcome]) -> str:
    """Mutants by checks as text: x where the check failed."""
    checks = [cell.grade_id for cell in lab.of_kind("check")]
    lines = [f"{number:>2} {check}" for number, check in enumerate(checks, 1)]
    width = max((len(o.case.name) for o in outcomes), default=0)
    lines.append(" " * width + "".join(f"{number:>3}" for number in range(1, len(checks) + 1)))
    for outcome in filter(lambda outcome: outcome.direct, outcomes):
        marks = "".join("  x" if check in outcome.failed else "  ." for check in checks)
        lines.append(f"{outcome.case.name:<{width}}{marks}  {outcome.seconds:.2f} s")
    return "\n".join(lines)


def main() -> int:
    """Print kill matrix and problems, as the first lines of this file say; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lab", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("json", type=Path, nargs="?")
    parser.add_argument("--sample", metavar="SEED")
    arguments = parser.parse_args()
    compute_as_in_a_learners_process()
    lab = percent_lab(arguments.lab)
    with kept_kernels(), Launcher(insecure=True) as launcher:
        outcomes = prove(lab, arguments.folder, launcher, sample=arguments.sample)
    if arguments.json:
        arguments.json.write_text(json.dumps({"problems": problems(lab, outcomes)}))
    return report(lab, outcomes)


def report(lab: Lab, outcomes: list[Outcome]) -> int:
    """Print kill matrix and problems; 1 if there are any."""
    found = problems(lab, outcomes)
    print(kill_matrix(lab, outcomes))
    direct, examined = (sum(map(bool, found)) for found in zip(*((o.direct, o.proxied) for o in outcomes), strict=True))
    print(f"of {len(outcomes)} cases {direct} directly, {examined} through the examiner")
    print("\n".join(found) or "every case is as it must be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
