"""The proof of a lab by machine: no small slip in the solution passes its checks.

    python -m grader.proofs.mechanical solutions/02_kv_cache/kv_cache.ipynb [tests/labs/02_kv_cache] [--sample 20] ...

Each mutant of `mutator.py` runs directly, as in a learner's notebook, by the checks that its cell has to do with: first
by the released notebook's with the public seed, as a learner sees it, and what passes there by the hidden ones with
several secrets. What passes everywhere is a survivor: it does what the solution does, or the checks have a hole.
`survivors.yaml` in the folder names those that do no harm, each with the reason; any other is a problem, and so is one
of the list that is killed by now. That a check says the same through the examiner is for `proof.py` to show.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from grader.checks import PUBLIC_SECRET
from grader.examination.examiner import prepare
from grader.examination.submission import Submission
from grader.labs.lab import Lab, LabError, load_lab
from grader.proofs.direct import compute_as_in_a_learners_process, kept_kernels, run_directly
from grader.proofs.mutator import Mutant, mutants
from grader.proofs.proof import Reached, with_checks

SURVIVORS = "survivors.yaml"
OPEN = ("survivor", "some secrets")  # the verdicts that need a new case or a reason


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. killed_by: the first check that failed, of the visible run or of the first secret whose
    run saw it. seeds: how many runs of the secrets saw it; None where the visible run did."""

    mutant: Mutant
    killed_by: str | None
    seeds: int | None
    of: int

    @property
    def word(self) -> str:
        if self.seeds is None:
            return "visible"
        return "hidden" if self.seeds == self.of else "some secrets" if self.seeds else "survivor"


class Bench:
    """A lab's checks: visible with the public seed, and hidden with each secret. A check has killed only if the
    reference passes it in the same run."""

    def __init__(self, solution: Path, num_secrets: int):
        self.lab = load_lab(solution)
        released = solution.parents[2] / "labs" / solution.parent.name / solution.name
        hidden = Reached(self.lab)
        secrets = [f"mutant {number}".encode() for number in range(num_secrets)]
        solved = hidden.solved
        self.runs = [(Reached(load_lab(released), solved), PUBLIC_SECRET), *((hidden, secret) for secret in secrets)]
        self._passed: set[tuple[int, str]] = set()  # run, check: the reference does
        prepare(self.lab, secrets[0])  # imports what the forks need, and loads its model, once for all
        gc.freeze()  # a fork's garbage collection need not touch, and so copy, what was there before

    def verdict(self, mutant: Mutant, harmless: bool = False) -> Verdict:
        """The verdict on a mutant. harmless: it is expected to pass. One secret with which it does is then enough."""
        if failed := self._killer(mutant, 0):
            return Verdict(mutant, failed, None, len(self.runs) - 1)
        killers = []
        for run in range(1, len(self.runs)):
            if failed := self._killer(mutant, run):
                killers.append(failed)
            elif harmless:
                break
        return Verdict(mutant, killers[0] if killers else None, len(killers), len(self.runs) - 1)

    def _killer(self, mutant: Mutant, run: int) -> str | None:
        """The first check that fails. Raises LabError if the reference fails it, too."""
        reached, secret = self.runs[run]
        answers = Submission({**reached.solved, mutant.cell: mutant.source})
        failed = first_failed(reached.by(answers), answers, secret)
        if failed and (run, failed) not in self._passed:
            # Alone: no check needs what another one made.
            if first_failed(with_checks(reached.lab, {failed}), Submission(dict(reached.solved)), secret):
                raise LabError(f"{self.lab.slug}: the reference itself fails {failed} in run {run}")
            self._passed.add((run, failed))
        return failed


def first_failed(lab: Lab, submission: Submission, secret: bytes) -> str | None:
    """The first check of `lab` that does not pass, directly."""
    statuses = run_directly(lab, submission, secret, to_first_failure=True)
    return next((check for check, status in statuses.items() if status != "passed"), None)


def drawn(solution: Path, sample: int | None, seed: str) -> tuple[list[Mutant], int]:
    """The mutants to try, and how many there are: all, or `sample` of them, of all cells by turns, as the seed says."""
    made = [list(mutants(cell)) for cell in load_lab(solution).of_kind("solution")]
    num_made = sum(map(len, made))
    if sample is None or sample >= num_made:
        return list(itertools.chain(*made)), num_made
    draw = random.Random(f"{solution.parent.name} {seed}")
    places = [[(cell, number) for number in draw.sample(range(len(of)), len(of))] for cell, of in enumerate(made)]
    draw.shuffle(places)  # whose turn is last may have one mutant fewer
    by_turns = filter(None, itertools.chain(*itertools.zip_longest(*places)))
    return [made[cell][number] for cell, number in sorted(itertools.islice(by_turns, sample))], num_made


def harmless(folder: Path) -> dict[str, str]:
    """Survivors that do no harm, with the reasons. Raises LabError for one without."""
    file = folder / SURVIVORS
    found = (yaml.safe_load(file.read_text("utf-8")) or {}) if file.exists() else {}
    if bad := [key for key, reason in found.items() if not isinstance(reason, str) or len(reason.split()) < 3]:
        raise LabError(f"{file}: expected a reason, a sentence, got none for {bad[0]!r}")
    return dict(found)


def problems(verdicts: Sequence[Verdict], known: dict[str, str]) -> list[str]:
    """One sentence for each survivor that has no reason, and for each reason of a mutant that is killed by now."""
    found = []
    for verdict in verdicts:
        mutant, listed = verdict.mutant, verdict.mutant.key in known
        place = f"line {mutant.line} ({mutant.rule})"
        if verdict.word in OPEN and not listed:
            seen = "passes all checks" if verdict.word == "survivor" else f"is seen by {verdict.seeds} of {verdict.of}"
            found.append(f"{seen}, {place}: {mutant.key}")
        elif verdict.word not in OPEN and listed:
            found.append(f"is killed by {verdict.killed_by}, so take it from {SURVIVORS}, {place}: {mutant.key}")
    return found


def main() -> int:
    """Prints each mutant that no learner's check sees, and what is wrong; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("solution", type=Path, help="the solution's notebook")
    parser.add_argument("folder", type=Path, nargs="?", help=f"where {SURVIVORS} is")
    parser.add_argument(
        "--sample", type=int, help="so many, drawn by the seed, of each cell by turns; all if not given"
    )
    parser.add_argument("--seed", default="0")
    parser.add_argument("--secrets", type=int, default=3)
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="of N processes the I-th, from 0")
    parser.add_argument("--json", type=Path, help="where to write each mutant's verdict")
    parser.add_argument("--again", type=Path, nargs="+", metavar="JSON",
                        help="only what survived, or passed some secrets, in these files of --json")  # fmt: skip
    options = parser.parse_args()
    compute_as_in_a_learners_process()
    known = harmless(options.folder) if options.folder else {}
    chosen, made = drawn(options.solution, options.sample, options.seed)
    if options.again:
        rows = [row for path in options.again for row in json.loads(path.read_text("utf-8"))]
        open_keys = {row["key"] for row in rows if row["verdict"] in OPEN}
        chosen = [mutant for mutant in chosen if mutant.key in open_keys]
    shard, num_shards = map(int, options.shard.split("/"))
    with kept_kernels():
        bench = Bench(options.solution, options.secrets)
        verdicts = list(_told(bench, chosen[shard::num_shards], known))
    wrong = problems(verdicts, known)
    counts = ", ".join(f"{count} {word}" for word, count in Counter(v.word for v in verdicts).most_common())
    print(f"{bench.lab.slug}: of {made} mutants {len(verdicts)} were tried: {counts}")
    print("\n".join(wrong) or "every survivor has a reason")
    if options.json:
        rows = [{**vars(v.mutant), "key": v.mutant.key, "verdict": v.word, "killed_by": v.killed_by} for v in verdicts]
        options.json.write_text(json.dumps(rows, indent=1), "utf-8")
    return 1 if wrong else 0


def _told(bench: Bench, chosen: Sequence[Mutant], known: Collection[str]) -> Iterator[Verdict]:
    for mutant in chosen:
        verdict = bench.verdict(mutant, harmless=mutant.key in known)
        if verdict.word != "visible":
            print(f"{verdict.word}: {mutant.key}", flush=True)
        yield verdict


if __name__ == "__main__":
    sys.exit(main())
