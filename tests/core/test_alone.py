"""The core without the features: the package is copied without these folders, and the tests of this folder run on the
copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import reference_impl

PACKAGE, TESTS = Path(reference_impl.__file__).parent, Path(__file__).parent
FEATURES = sorted(
    folder.name for folder in PACKAGE.glob("features/*") if folder.is_dir() and not folder.name.startswith("__")
)


def passes_without(folders: list[str], place: Path) -> None:
    """Copies package and tests to `place`, removes the folders, and runs the tests there."""
    package = place / "reference_impl"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    shutil.copytree(TESTS, place / "tests" / "core", ignore=shutil.ignore_patterns("__pycache__", "test_alone.py"))
    for folder in folders:
        shutil.rmtree(package / folder)
    code = (
        f"import sys; sys.path.insert(0, {str(place)!r}); import reference_impl, pytest; "
        f"assert reference_impl.__file__.startswith({str(place)!r}), reference_impl.__file__; "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-p', 'no:schemathesis', '--import-mode=importlib',"
        " '-c', 'pytest.ini', 'tests/core']))"
    )
    (place / "pytest.ini").write_text("[pytest]\n", "utf-8")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=place, capture_output=True, text=True, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_without_all_that_stands_above_it_the_core_is_whole(tmp_path: Path) -> None:
    above = ["features", "assembly", "models", "observe", "serving", "simulation", "theory", "bench", "cli"]
    passes_without(above, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_without_one_feature_the_core_is_whole(feature: str, tmp_path: Path) -> None:
    passes_without([f"features/{feature}"], tmp_path)
