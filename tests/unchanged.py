"""What `make test` need not repeat: tests that only compute, whose inputs are those of the last run of all tests.

A unit is a notebook, or a file of tests in one of `FOLDERS`: its outcome depends on nothing but the files of this
repository that it needs (`closure.py`) and the versions of packages. `make test-all`, and `make test` with
INFERLAB_RECORD=1, write the hash of these files for each unit to `tests/unchanged.json` when all passed. While that and
the versions are the same, `make test` runs a third of the unit's tests, drawn by the commit (`drawn.py`), and says so;
when one byte differs it runs all of them, as any other command does. What only `make test-all` runs, the slow tests,
`make test` leaves out in either case: so what it passed itself is as good a record for it.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.closure import ROOT, closure, fingerprint
from tests.drawn import PLAN
from tests.labs.proof_record import this_commit, versions

RECORD = "tests/unchanged.json"
FOLDERS = ("claims", "kernels", "layers", "models", "quantization", "simulation")
PACKAGES = ("hypothesis", "matplotlib", "ipykernel", "ipywidgets", "safetensors", "tokenizers", "transformers")
NOTEBOOKS = "tests/chapters/test_notebooks.py"
RUNS = f"{NOTEBOOKS}::test_the_notebook_runs_from_top_to_bottom["
# What the test of a notebook needs beside it; what its lint needs is all of the course, for which it looks each time.
BESIDE = ("grader/chapter_source.py", "tests/warm.py")
CHECKS = (NOTEBOOKS, "tests/chapters/prose.py")


def units(root: Path = ROOT) -> dict[str, str]:
    """Unit -> the hash of all files that its outcome depends on. A notebook is known by its source."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for path in sorted((root / "tests" / folder).rglob("test_*.py")):
            found[path.relative_to(root).as_posix()] = fingerprint(closure([path], root), root)
    for path in sorted(root.glob("chapters/[0-9]*/*.py")):
        needs = closure([path, *(root / name for name in BESIDE)], root) | {root / name for name in CHECKS}
        found[path.relative_to(root).as_posix()] = fingerprint(needs, root)
    return found


def ends_of(unit: str) -> tuple[str, str]:
    """How the names of a unit's tests begin and end."""
    if unit.startswith("chapters/"):
        path = Path(unit)
        return RUNS, f"{path.parent.name}-{path.stem}]"
    return f"{unit}::", ""


def begin(root: Path = ROOT) -> None:
    """Write what a run needs to know, once for all its processes, and what it records at its end."""
    recorded = root / RECORD
    before = json.loads(recorded.read_text("utf-8")) if recorded.is_file() else {"versions": None, "units": {}}
    now = {"versions": versions(PACKAGES), "units": units(root)}
    same = now["versions"] == before["versions"]
    unchanged = [ends_of(unit) for unit, needs in now["units"].items() if same and before["units"].get(unit) == needs]
    (root / PLAN).parent.mkdir(exist_ok=True)
    (root / PLAN).write_text(json.dumps({"commit": this_commit(), "unchanged": unchanged, "now": now}), "utf-8")


def record(root: Path = ROOT) -> None:
    """All has run as it was at `begin`, and passed."""
    now = json.loads((root / PLAN).read_text("utf-8"))["now"]
    (root / RECORD).write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", encoding="utf-8")
