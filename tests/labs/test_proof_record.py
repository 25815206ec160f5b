"""When a lab is proven in full, and when a sample is enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.labs import proof_record
from tests.labs.proof_record import SOURCES, depends_on, path_of, plan, record

SOURCE = SOURCES[1]
COMMIT = "0123abc"


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("INFERLAB_QUICK", raising=False)  # this may be a quick run
    (tmp_path / SOURCE.parent.name).mkdir()
    return tmp_path


@pytest.mark.parametrize("kind", proof_record.PROOFS)
def test_a_lab_without_a_record_is_proven_in_full_and_with_one_by_a_sample(records: Path, kind: str) -> None:
    assert plan(SOURCE, kind, COMMIT, records).sample is None
    record(SOURCE, kind, records)
    planned = plan(SOURCE, kind, COMMIT, records)
    assert planned.sample == COMMIT
    assert "other versions" not in planned.why


def test_a_quick_run_samples_whatever_changed(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERLAB_QUICK", "1")
    assert plan(SOURCE, "proof", COMMIT, records).sample == COMMIT


def test_after_a_change_of_what_the_proof_depends_on_the_run_says_that_all_of_it_is_due(records: Path) -> None:
    """It is no longer: six labs in full, after a change of one interface, once took more time than a run may."""
    record(SOURCE, "proof", records)
    path = path_of(SOURCE, "proof", records)
    path.write_text(path.read_text().replace(depends_on(SOURCE, "proof"), "0" * 64))
    planned = plan(SOURCE, "proof", COMMIT, records)
    assert planned.sample == COMMIT
    assert "ALTHOUGH" in planned.why
    assert "make test-all" in planned.why
    assert f"its last full proof (at {proof_record.this_commit()[:12]})" in planned.why


def test_other_versions_of_torch_or_python_sample_and_say_so(records: Path) -> None:
    record(SOURCE, "proof", records)
    path = path_of(SOURCE, "proof", records)
    raw = json.loads(path.read_text())
    raw["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(raw))
    planned = plan(SOURCE, "proof", COMMIT, records)
    assert planned.sample == COMMIT
    assert "torch" in planned.why
    assert "not 1.0" in planned.why


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_a_proof_depends_on_the_lab_its_cases_the_grader_and_the_parts_it_uses(source: Path) -> None:
    cases = (proof_record.RECORDS / source.parent.name).rglob("*.py")
    needed = proof_record.closure([proof_record.ROOT / proof_record.PROOFS["proof"], source, *cases])
    names = {path.relative_to(proof_record.ROOT).as_posix() for path in needed}
    assert {
        source.relative_to(proof_record.ROOT).as_posix(),
        "grader/proofs/proof.py",
        "grader/examination/examiner.py",
        "grader/learner_side/learner.py",
        "reference_impl/interfaces/request.py",
        "reference_impl/assembly/engine.py",
    } <= names
    assert not any(
        name.startswith(("reference_impl/serving", "reference_impl/bench/load", "grader/courses")) for name in names
    )
