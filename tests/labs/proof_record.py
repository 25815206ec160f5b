"""What was proven of a lab in full, and when it has to be again.

`make test-all` proves every lab in full and writes beside its cases the fingerprint of all that the proof depends on
(the lab's source, its cases, the grader, the parts of the engine that it uses: `tests/closure.py`). `make test` tries
a sample of each lab, drawn by the commit, and all of one lab, whose turn it is. A change of what all labs use (an
interface of the engine) therefore makes no run of it longer; the run then says which labs wait for `make test-all`.
Other versions of torch or Python are no change of ours: the sample runs with them, and the run says so.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.closure import closure, fingerprint

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9]*_*/*.py"))
PROOFS = {
    "proof": "grader/proofs/proof.py", "conventions": "grader/proofs/convention_proof.py",
    "mechanical": "grader/proofs/mechanical.py", "chance": "grader/proofs/chance.py",
}  # fmt: skip
RECORDS = ROOT / "tests" / "labs"


@dataclass(frozen=True)
class Plan:
    """sample: the seed to draw with, None for everything. why: in words, for the one who reads the run."""

    sample: str | None
    why: str


def depends_on(source: Path, kind: str) -> str:
    """The fingerprint of what a proof (one of PROOFS) of this lab depends on."""
    own = RECORDS / source.parent.name
    cases = {
        "proof": own.rglob("*.py"), "chance": own.rglob("*.py"),
        "conventions": source.parent.glob("conventions/**/*.*"),
        "mechanical": own.glob("survivors.yaml"),
    }[kind]  # fmt: skip
    return fingerprint(closure([ROOT / PROOFS[kind], source, *cases]))


def versions(also: Iterable[str] = ()) -> dict[str, str]:
    """Of Python and of the packages that compute a lab's results; the build of torch (`+cpu`) does not count."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("torch", "triton", "numpy", *also):
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "none"
    return found


def path_of(source: Path, kind: str, records: Path = RECORDS) -> Path:
    return records / source.parent.name / f"{kind}.json"


def record(source: Path, kind: str, records: Path = RECORDS) -> None:
    """Write that this proof was made in full and found nothing."""
    made = {"commit": this_commit(), "depends_on": depends_on(source, kind), "versions": versions()}
    text = json.dumps(made, indent=2)
    path_of(source, kind, records).write_text(text + "\n", encoding="utf-8")


def plan(source: Path, kind: str, commit: str, records: Path = RECORDS) -> Plan:
    """What `make test` runs of this proof at this commit."""
    name, path = source.parent.name, path_of(source, kind, records)
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if os.environ.get("INFERLAB_QUICK"):  # make test-quick
        return Plan(commit, f"{name}: a sample; `make test` decides whether this {kind} has to be made in full")
    if not recorded:
        return Plan(None, f"{name}: in full, since it has no record of a full {kind}")
    if recorded["depends_on"] != depends_on(source, kind):
        return Plan(
            commit,
            f"{name}: a sample drawn by {commit[:12]}, ALTHOUGH what it depends on changed after its last full {kind} "
            f"(at {recorded.get('commit', 'a commit not recorded')[:12]}); "
            "make test-all proves it in full",
        )
    why = f"{name}: a sample drawn by {commit[:12]}, since nothing that it depends on changed"
    there, here = recorded["versions"], versions()
    if other := [f"{key} {here[key]}, not {there[key]}" for key in here if here[key] != there.get(key)]:
        why += f"; its full {kind} was made with other versions ({'; '.join(other)})"
    return Plan(commit, why)


@functools.cache
def this_commit() -> str:
    """The commit's hash; outside of git, a hash of the course's manifest, which changes with the course."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=120
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return fingerprint([ROOT / "chapters" / "course.yaml"])
