"""A proof of a lab, in a process of its own: it forks, which a test worker with threads must not."""

from __future__ import annotations

import os
from pathlib import Path

from tests.warm import Warm

HERE = Path(__file__).parent
# What runs directly has the quick interpreter; a learner's process stays as it is.
QUICKLY = """
import os, runpy, sys
from pathlib import Path
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
from grader.examination.attempt import kernel_names
from grader.labs.lab import load_lab
if kernel_names(load_lab(Path(sys.argv[2]).with_suffix(".ipynb"))):
    from tests.interpreter import quicken
    quicken()
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def prove(warm: Warm, module: str, source: Path, *arguments: str) -> None:
    """Runs `grader.proofs.MODULE` on a lab's source, the folder of its cases, and these arguments: it must end well."""
    done = warm.run(("-c", QUICKLY, f"grader.proofs.{module}", str(source), *arguments), os.environ)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def folder(source: Path) -> Path:
    """Where the variants and mutants of a lab are."""
    return HERE / source.parent.name
