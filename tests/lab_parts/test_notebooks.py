"""A lab's notebook knows the engine by its users' names and `lab_parts`, so that an interface can change without it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import reference_impl

LABS = sorted(Path("solutions").glob("*/*.py"))
OPEN = (  # modules that labs may name: no interface of the engine is among them
    "reference_impl.assembly.lab_parts", "reference_impl.theory", "reference_impl.observe.metrics",
    "reference_impl.features.baselines", "reference_impl.kernels.own_kernel",
    "reference_impl.bench.quality", "reference_impl.models.quantization.packing",  # measures; two codes in a byte
)  # fmt: skip


def test_there_are_labs() -> None:
    assert len(LABS) >= 6


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.parent.name)
def test_a_notebook_imports_no_interface_of_the_engine(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    used = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    used |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    engine = {module for module in used if module.split(".")[0] == "reference_impl"}
    closed = {module for module in engine if not module.startswith(OPEN) and module != "reference_impl"}
    assert not closed, f"{path}: {closed}"
    assert "reference_impl.assembly.lab_parts" in used


def test_lab_parts_are_all_there() -> None:
    from reference_impl.assembly import lab_parts

    assert all(hasattr(lab_parts, name) for name in lab_parts.__all__)
    assert not set(lab_parts.__all__) & set(reference_impl.__all__)
