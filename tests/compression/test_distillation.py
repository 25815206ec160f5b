"""The losses against their formulas, and what each makes of a student that cannot be the teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reference_impl.models.compression.distillation import agreement, forward_kl, response, reverse_kl


def test_the_losses_are_their_formulas() -> None:
    random = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 5, generator=random) for _ in range(2))
    p, q = (t.double().softmax(-1).numpy() for t in (teacher, student))
    assert float(forward_kl(student, teacher)) == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-5)
    assert float(reverse_kl(student, teacher)) == pytest.approx((q * np.log(q / p)).sum(-1).mean(), rel=1e-5)
    tokens = teacher.argmax(-1)
    picked = np.take_along_axis(q, tokens.numpy()[..., None], -1)
    assert float(response(student, tokens)) == pytest.approx(-np.log(picked).mean(), rel=1e-5)
    assert agreement(student, teacher) == (p.argmax(-1) == q.argmax(-1)).mean()


def test_forward_covers_both_of_a_teacher_s_modes_and_reverse_keeps_to_one() -> None:
    """A student with one bump, over 21 tokens, and a teacher with two of unlike height: found by trying all places."""
    at = torch.arange(21.0)
    teacher = torch.logaddexp(-((at - 4) ** 2) / 2, -((at - 16) ** 2) / 2 - 0.3)
    grid = [(float(m), float(w)) for m in np.linspace(0, 20, 81) for w in np.linspace(0.5, 8, 31)]

    def best(loss: object) -> tuple[float, float]:
        assert callable(loss)
        return min(grid, key=lambda g: float(loss((-((at - g[0]) ** 2) / (2 * g[1] ** 2))[None], teacher[None])))

    middle, wide = best(forward_kl)
    mode, narrow = best(reverse_kl)
    assert 6 < middle < 14
    assert wide > 3
    assert abs(mode - 4) < 1
    assert narrow < 2
