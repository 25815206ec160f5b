"""`inferlab grade prove LAB`: do the lab's checks accept what is right and see what is wrong? In a checkout only."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from grader.saying import stop


def prove(
    lab: Annotated[str, typer.Argument(help="Number or folder of the lab, such as 02.")],
    sample: Annotated[int, typer.Option(min=1, help="Mechanical mutants to try, drawn by --seed.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="Try all of them instead.")] = False,
    seed: Annotated[str, typer.Option(help="Draws the sample.")] = "0",
    secrets: Annotated[int, typer.Option(min=1, help="Secrets with which the hidden checks run.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the mechanical mutants.")] = 1,
) -> None:
    """Try the stub, the reference, the variants and the mutants of a lab, and then mechanical mutants of its solution.

    A mechanical mutant is a small slip (`<` for `<=`, one more, a statement left out). What passes every check is
    printed: it is harmless, which tests/labs/LAB/survivors.yaml says with the reason, or the checks have a hole.
    """
    from grader.study.workspace import data_root

    root = data_root()
    found = sorted((root / "solutions").glob(f"{lab}*_*/*.py" if lab.isdecimal() else f"{lab}/*.py"))
    if len(found) != 1 or not (root / "tests" / "labs").is_dir():
        there = ", ".join(sorted(path.parent.name for path in (root / "solutions").glob("[0-9]*_*/*.py"))) or "none"
        stop(f"expected a lab of a checkout, which has solutions/ and tests/labs/: {there}; got {lab!r}")
    source, folder = found[0], root / "tests" / "labs" / found[0].parent.name
    python = [sys.executable, "-P", "-W", "ignore", "-m"]
    cases = subprocess.run([*python, "grader.proofs.proof", str(source), str(folder)]).returncode
    asked = ["--seed", seed, "--secrets", str(secrets), *([] if every else ["--sample", str(sample)])]
    mechanical = [*python, "grader.proofs.mechanical", str(source.with_suffix(".ipynb")), str(folder), *asked]
    running = [subprocess.Popen([*mechanical, "--shard", f"{shard}/{jobs}"]) for shard in range(jobs)]
    statuses = [process.wait() for process in running]
    raise typer.Exit(1 if cases or any(statuses) else 0)
