"""What the distillations of `compress.py` learn from: which texts, and whose."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parents[2] / "datasets" / "course_model"
STEPS = 20


@pytest.fixture
def compress() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    try:
        import compress

        yield compress
    finally:
        sys.path.remove(str(FOLDER))


def test_on_policy_every_text_was_written_by_the_student_a_few_steps_before(
    compress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With models that only show what they are given: a text consists of the step at which its student wrote it, or of
    999, where the target did. A run of 20 steps, as it is recorded, used to write once, at its beginning."""
    given: list[Tensor] = []

    class Model(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            given.append(ids)
            return torch.zeros(*ids.shape, 3)

    def written(folder: Path, prompts: list[list[int]], temperature: float, seed: int = 0) -> Tensor:
        return torch.full((len(prompts), compress.LENGTH // 2), seed // 1000 if temperature else 999)

    def learn(model: nn.Module, steps: int, lr: float, loss_of: Any) -> None:
        for step in range(steps):
            given.clear()
            loss_of(step)
            whose[-1].append(set(given[0].unique().tolist()))

    def load(name: str) -> Model:
        whose.append([])
        return Model()

    whose: list[list[set[int]]] = []
    rows = SimpleNamespace(text=range(10_000))
    for name, value in (
        ("written", written), ("learn", learn), ("load", load), ("load_target", lambda device: Model()),
        ("save_as", lambda *_: None),
    ):  # fmt: skip
        monkeypatch.setattr(compress, name, value)
    monkeypatch.setattr(compress.base, "Rows", lambda *_: rows)
    monkeypatch.setattr(compress.distillation, "response", lambda logits, ids: logits.sum())
    found = compress.distill(STEPS)
    assert list(found["losses"]) == ["response", "logits", "on-policy"]
    assert whose[0] == whose[1] == [{999}] * STEPS
    assert whose[2] == [{step - step % compress.RENEWED} for step in range(STEPS)]
    assert compress.RENEWED < 8
