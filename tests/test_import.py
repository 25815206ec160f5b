"""What an import costs: torch when an engine name is first used, and never what a GPU or a test needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import reference_impl

HOME = str(Path(reference_impl.__file__).parent.parent)


def loaded_by(statement: str, blocked: tuple[str, ...] = ()) -> set[str]:
    """Names in sys.modules after the statement, in a fresh process in which `blocked` cannot be imported."""
    code = (
        f"import sys, json; sys.path.insert(0, {HOME!r}); sys.modules.update(dict.fromkeys({list(blocked)!r}))\n"
        f"{statement}\n"
        "print(json.dumps([name for name, module in sys.modules.items() if module is not None]))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = (
    "torch",
    "triton",
    "transformers",
    "matplotlib",
    "tokenizers",
    "safetensors",
    "numpy",
    "ipywidgets",
    "pydantic",
)


def test_import_reference_impl_needs_neither_torch_nor_triton_nor_anything_else() -> None:
    assert not loaded_by("import reference_impl", HEAVY) & set(HEAVY)


def test_interfaces_need_only_the_standard_library() -> None:
    modules = {name.partition(".")[0] for name in loaded_by("import reference_impl.interfaces")}
    before = {name.partition(".")[0] for name in loaded_by("pass")}
    assert modules - before <= sys.stdlib_module_names | {"reference_impl"}


@pytest.mark.parametrize("room", "core.scheduler core.kv_manager assembly.scheduler assembly.kv".split())
def test_scheduler_and_blocks_never_see_a_tensor(room: str) -> None:
    assert not loaded_by(f"import reference_impl.{room}", HEAVY) & set(HEAVY)


def test_theory_computes_without_torch() -> None:
    rooms = sorted(p.stem for p in (Path(HOME) / "reference_impl" / "theory").glob("*.py") if p.stem != "__init__")
    assert rooms
    assert "torch" not in loaded_by("\n".join(f"import reference_impl.theory.{r}" for r in rooms), ("torch", "triton"))


def test_the_engine_runs_where_triton_and_transformers_are_missing() -> None:
    missing = ("triton", "transformers", "matplotlib", "ipywidgets", "IPython", "pydantic", "scipy")
    modules = loaded_by(
        "import reference_impl.assembly.llm, reference_impl.assembly.engine, reference_impl.models.loader", missing
    )
    assert not modules & set(missing)
    assert {"torch", "tokenizers", "safetensors"} <= modules


def test_llm_pulls_in_nothing_heavy_beyond_torch_and_the_file_readers() -> None:
    added = loaded_by("import reference_impl.assembly.llm") - loaded_by("import torch, tokenizers, safetensors")
    heavy = {"transformers", "triton", "matplotlib", "ipywidgets", "pydantic", "scipy", "pandas", "jinja2"}
    assert not {name.partition(".")[0] for name in added} & heavy


def test_every_public_name_is_there_and_others_are_not() -> None:
    for name in reference_impl.__all__:
        assert getattr(reference_impl, name).__module__.startswith("reference_impl.")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = reference_impl.nothing


@pytest.mark.parametrize("line", ["import reference_impl.engine", "from reference_impl.kv.manager import KVManager"])
def test_an_older_notebook_is_told_where_modules_are(line: str) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", line], capture_output=True, text=True, cwd="/")
    assert "ModuleNotFoundError: No module named 'reference_impl." in done.stderr
    assert "`inferlab learn --update` lays its present version beside yours" in done.stderr


def test_a_notebook_of_the_time_when_features_were_called_annexes_gets_the_same_modules() -> None:
    import reference_impl.annexes.baselines.ragged as older
    from reference_impl.annexes.baselines import ragged

    from reference_impl.features.baselines import ragged as newer

    assert older is ragged is newer
    assert newer.__spec__ is not None
    assert newer.__spec__.name == "reference_impl.features.baselines.ragged"


def test_what_a_module_lacks_is_an_import_error_as_everywhere() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from reference_impl import nothing"], capture_output=True, text=True, cwd="/"
    )
    assert "ImportError: cannot import name 'nothing'" in done.stderr


def test_a_command_of_the_grader_compiles_no_grammar_when_it_imports_nbgrader() -> None:
    """jsonschema imports rfc3987_syntax where it is there, and that parses a grammar: 2.5 s of each command."""
    command = "import grader.entry as e; sys.argv = ['inferlab', 'grade', '--help']"
    quiet = "import contextlib, io\nwith contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):"
    modules = loaded_by(f"{command}\n{quiet} e.command()\nimport nbformat")
    assert "jsonschema" in modules
    assert not modules & {"rfc3987_syntax", "lark"}
