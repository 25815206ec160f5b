"""Two submissions that take the names of everything a lab gives: one with nothing written, one with all solved.

python -m tests.labs.shadows solutions/02_kv_cache/kv_cache.py        prints what each check made of both, as JSON
python -m tests.labs.shadows solutions/02_kv_cache/kv_cache.py tests/labs/02_kv_cache SEED
             the same, or of the first only, by the examiner of a sample of the lab's proof, which SEED draws
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from grader.examination.attempt import kernel_names
from grader.examination.examiner import Limits, examine
from grader.examination.submission import Added, Submission
from grader.isolation.launcher import Launcher
from grader.labs.lab import Lab, defined_names, load_lab
from grader.labs.percent_file import percent_lab
from grader.proofs.direct import compute_as_in_a_learners_process, kept_kernels
from grader.proofs.proof import Case, prove, report

NOTHING, SOLVED = "nothing written", "all solved"

ANYTHING = '''
class Anything:
    """Has every attribute, can be called with anything, and holds nothing."""

    def __init__(self, *_, **__): pass
    def __call__(self, *_, **__): return self
    def __getattr__(self, name): return self
    def __len__(self): return 0
    def __getitem__(self, key): return self
    def __iter__(self): return iter(())
    def __enter__(self): return self
    def __exit__(self, *_): return True
'''


def given_names(lab: Lab, also_used: bool) -> list[str]:
    """Functions and classes of all cells that are not the learner's; also_used: those that a solution may use, too."""
    cells = [cell for cell in lab.cells if cell.kind in ("code", "check")]
    if not also_used:
        cells = [cell for cell in cells if cell.where not in ("both", "learner")]
    names = {name for cell in cells for name in defined_names(cell.source)}
    return sorted(names - set(lab.graded_names))


def shadows(lab: Lab) -> dict[str, Submission]:
    """Both submissions, by name."""
    taken, unused = (
        ANYTHING + "".join(f"{name} = Anything()\n" for name in given_names(lab, also_used))
        for also_used in (True, False)
    )
    solved = {cell.grade_id: cell.source for cell in lab.of_kind("solution")}
    nothing = {key: taken + "".join(f"class {name}(Anything): pass\n" for name in defined_names(source))
               for key, source in solved.items()}  # fmt: skip
    last = lab.cells[-1].grade_id
    return {
        NOTHING: Submission(nothing, [Added(last, "code", taken)]),
        SOLVED: Submission(solved, [Added(last, "code", unused)]),
    }


def quicken() -> None:
    if importlib.util.find_spec("triton"):
        from tests import interpreter  # Triton looks at the environment when it is imported

        interpreter.quicken()


def main() -> int:
    compute_as_in_a_learners_process()
    source, status, found = Path(sys.argv[1]), 0, {}
    lab = percent_lab(source) if sys.argv[2:] else load_lab(source.with_suffix(".ipynb"))
    if kernel_names(lab):
        quicken()  # what runs directly; a learner's process stays as it is
    with kept_kernels(), Launcher(insecure=True) as launcher:
        if sys.argv[2:]:
            checks = frozenset(cell.grade_id for cell in lab.of_kind("check"))
            fails = {NOTHING: checks, SOLVED: frozenset[str]()}
            also = [Case(name, "shadow", shadow, fails[name]) for name, shadow in shadows(lab).items()]
            outcomes = prove(lab, Path(sys.argv[2]), launcher, sample=sys.argv[3], also=also)
            found = {
                outcome.case.name: outcome.proxied for outcome in outcomes if outcome.case in also and outcome.proxied
            }
            status = report(lab, outcomes)
        else:
            for name, submission in shadows(lab).items():
                result = examine(lab, submission, launcher, secret=b"shadows", limits=Limits(total=3600.0))
                found[name] = {check.grade_id: check.status for check in result.checks}
    print(json.dumps(found))
    return status


def check_shadows(found: dict[str, dict[str, str]]) -> None:
    """Nothing is gained by taking the names of what a lab gives, and nothing lost. found: what this program prints."""
    assert found[NOTHING], "no check ran"
    gained = [check for check, status in found[NOTHING].items() if status == "passed"]
    assert not gained, gained
    if SOLVED in found:  # a sample may have drawn another correct solution
        lost = {check: status for check, status in found[SOLVED].items() if status != "passed"}
        assert not lost, lost
        assert found[NOTHING].keys() == found[SOLVED].keys()


if __name__ == "__main__":
    sys.exit(main())
