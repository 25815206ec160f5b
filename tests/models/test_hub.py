"""A model by its id on Hugging Face's hub: from a cache made here by hand, since nothing is fetched; and the error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.cli import app
from reference_impl.cli.options import name_of
from reference_impl.models.hub import is_hub_id, model_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As the hub's client lays it out: what refs/main names lies in snapshots."""
    folder = tmp_path / "hub" / "models--course--draft"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    shutil.copytree(course_model("draft"), folder / "snapshots" / COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("model", "is_id"),
    [
        ("Qwen/Qwen3-0.6B", True), ("course/draft", True), ("./course/draft", False), ("/course/draft", False),
        ("draft", False), ("a/b/c", False), ("../draft", False), ("course/", False), (Path("course/draft"), False),
    ],
)  # fmt: skip
def test_an_id_is_org_and_name(model: str | Path, is_id: bool) -> None:
    assert is_hub_id(model) == is_id
    assert is_id or model_folder(model) == Path(model)


def test_a_folder_here_comes_before_the_hub(cache: Path, tmp_path: Path) -> None:
    assert model_folder("course/draft") == cache / "models--course--draft" / "snapshots" / COMMIT
    (tmp_path / "course" / "draft").mkdir(parents=True)
    assert model_folder("course/draft") == Path("course/draft")


def test_a_cached_model_generates(cache: Path) -> None:
    assert cache.is_dir()
    p = SamplingParams(max_tokens=4, temperature=0)
    models = ("course/draft", course_model("draft"))
    texts = [LLM(model, dtype="float32", num_blocks=9).generate("def f(", p)[0].text for model in models]
    assert texts[0] == texts[1]


def test_from_the_command_line(cache: Path) -> None:
    words = ["generate", "def f(", "--model", "course/draft", "--max-tokens", "3"]
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, "-P", "-m", "reference_impl.cli"]
    done = subprocess.run([*program, *words], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def f(")
    assert [name_of(m) for m in ("course/draft", "draft", "/models/mine/")] == ["course/draft", "draft", "mine"]


@pytest.mark.parametrize("command", [["generate", "x", "--model"], ["serve"]])
def test_what_cannot_be_fetched_is_said_with_what_there_is(command: list[str], cache: Path) -> None:
    assert cache.is_dir()
    with pytest.raises(FileNotFoundError) as error:
        LLM("nobody/nothing")
    for part in ("no model 'nobody/nothing'", "could not be fetched", "target and draft", "course_model('target')"):
        assert part in str(error.value)
    done = CliRunner().invoke(app, [*command, "nobody/nothing"])
    assert done.exit_code == 1
    assert done.stderr == f"inferlab: error: {error.value}\n"
