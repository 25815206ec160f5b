"""The core can be read alone: how long it is, how long its functions are, what it imports, what a step enters."""

from __future__ import annotations

from pathlib import Path

import pytest

import reference_impl
from reference_impl.interfaces import SamplingParams
from tests.core import reading_path as core
from tests.core.step_path import entered

PACKAGE = Path(reference_impl.__file__).parent


def test_the_path_is_all_of_the_core() -> None:
    files = {path.stem for path in (PACKAGE / "core").glob("*.py")} - {"__init__"}
    assert {f"core/{name}" for name in files} == {*core.PATH}


def test_the_core_is_short_enough_to_be_read_in_two_days() -> None:
    assert sum(core.num_tokens(PACKAGE, module) for module in core.PATH) <= core.MOST_TOKENS
    words = sum(core.source(PACKAGE, f"interfaces/{module}").count("\n") for module in core.WORDS)
    assert words <= core.MOST_LINES_OF_WORDS


@pytest.mark.parametrize("module", core.PATH)
def test_no_function_of_the_core_is_longer_than_a_screen(module: str) -> None:
    long = {name for name, lines in core.functions(PACKAGE, module) if lines > core.LONGEST_FUNCTION}
    assert not long


@pytest.mark.parametrize("module", core.PATH)
def test_the_core_imports_no_feature_neither_later_nor_by_a_string(module: str) -> None:
    rooms = {name.split("/")[0] for name in core.imports(PACKAGE, module)}
    assert not rooms & {*core.ABOVE}
    assert not core.named_features(PACKAGE, module)


@pytest.mark.parametrize("module", core.PATH)
def test_the_core_imports_itself_and_the_words(module: str) -> None:
    others = {name for name in core.imports(PACKAGE, module) if name.split("/")[0] != "interfaces"}
    assert {name for name in others if not name.startswith(core.TWINS)} <= {*core.PATH}


def test_tokens_are_those_that_say_something(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""What\nit is."""\n\nx = 1  # why\n\n\ndef f():\n    """This."""\n    return "text"\n'
    )
    assert core.num_tokens(tmp_path, "a") == len(["x", "=", "1", "def", "f", "(", ")", ":", "return", '"text"'])


def test_an_import_by_any_way_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "reference_impl"
    (package / "features").mkdir(parents=True)
    (package / "features" / "__init__.py").touch()
    (package / "a.py").write_text(
        '"""Of features."""\nfrom reference_impl.features.x import y\ndef f():\n    import reference_impl.assembly.z\n'
        "    from reference_impl import features\n    import_module('reference_impl.features.w')\n"
        "if TYPE_CHECKING:\n    from reference_impl.assembly.parts import Parts\n"
    )
    assert list(core.imports(package, "a")) == ["features/x", "assembly/z", "features"]
    assert core.named_features(package, "a") == ["reference_impl.features.w"]


def test_a_decoding_step_of_the_core_enters_few_functions(make_engine) -> None:
    engine = make_engine(block_size=16)
    engine.add([1, 2, 3], SamplingParams(max_tokens=9, temperature=0.7, seed=1, ignore_eos=True))
    engine.step()
    engine.step()
    found = entered(engine.step, PACKAGE)
    assert len(found) <= 60, found
    assert len({file for file, _ in found}) <= 18, {file for file, _ in found}
    own = [name for file, name in found if file in ("core/engine.py", "core/planner.py")]
    assert own == [
        "Engine.step", "Engine._submit", "Planner.step", "Engine._collect", "output_of", "Engine._record",
    ]  # fmt: skip
