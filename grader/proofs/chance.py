"""No fault of a lab's mutants is found by luck: every case with another secret, directly, fails exactly its checks.

Hidden tests draw their inputs from a course's secret. Where a check sees a fault in some draws only, two students with
the same mistake get different points, and handing in again is a lottery.

    python -m grader.proofs.chance solutions/02_kv_cache/kv_cache.py tests/labs/02_kv_cache [--secrets A,B] [--only A,B]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from grader.examination.examiner import prepare
from grader.labs.percent_file import percent_lab
from grader.proofs.direct import compute_as_in_a_learners_process, kept_kernels, run_directly
from grader.proofs.proof import Case, Reached, cases

SECRETS = ("autumn",)  # besides `proof`, with which the proof itself runs every case


def surprises(reached: Reached, case: Case, secrets: Sequence[str]) -> Iterator[str]:
    """What a case does with one of the secrets and should not, one sentence each, by the checks that its own cells
    have to do with; the reference by all."""
    lab = reached.by(case.submission) if case.kind != "reference" else reached.lab
    for secret in secrets:
        statuses = run_directly(lab, case.submission, secret.encode())
        failed = {check for check, status in statuses.items() if status != "passed"}
        for check in sorted(failed - case.fails):
            yield f"{case.kind} {case.name}: fails {check} with the secret {secret!r}, unexpectedly"
        for check in sorted(case.fails - failed):
            yield f"{case.kind} {case.name}: passes {check} with the secret {secret!r}, which it should fail"


def main() -> int:
    """Print what depends on luck, as the first lines of this file say; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lab", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--secrets", default=",".join(SECRETS))
    parser.add_argument("--only", help="names of cases, with commas; all without it")
    arguments = parser.parse_args()
    compute_as_in_a_learners_process()
    lab, secrets = percent_lab(arguments.lab), arguments.secrets.split(",")
    found = [case for case in cases(lab, arguments.folder) if case.kind != "stub"]
    if arguments.only is not None:
        wanted = set(arguments.only.split(","))
        if unknown := wanted - {case.name for case in found}:
            parser.error(f"--only: no case {', '.join(sorted(unknown))} in {arguments.folder}")
        found = [case for case in found if case.name in wanted]
    seen, reached = 0, Reached(lab)
    prepare(lab, secrets[0].encode())  # imports what the forks need, and loads its model, once for all
    with kept_kernels():
        for case in found:
            for line in surprises(reached, case, secrets):
                seen += 1
                print(line, flush=True)
    print(f"{len(found)} cases with {', '.join(secrets)}: " + (f"{seen} by luck" if seen else "as they must be"))
    return 1 if seen else 0


if __name__ == "__main__":
    sys.exit(main())
