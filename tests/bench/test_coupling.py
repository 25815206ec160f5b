"""How often two distributions draw alike: the formulas by brute force, and the exercise on a model that drafts for
itself."""

from __future__ import annotations

import numpy as np
import pytest

from reference_impl.assembly.config import course_model
from reference_impl.bench import coupling


@pytest.mark.parametrize("seed", range(4))
def test_the_formulas_are_what_their_definitions_say(seed: int) -> None:
    random = np.random.default_rng(seed)
    p, q = random.dirichlet(np.full(9, 0.5), 2)
    p[:seed], q[9 - seed :] = 0, 0
    p, q = p / p.sum(), q / q.sum()
    pairs = range(9)
    assert coupling.rejection(p, q) == pytest.approx(sum(min(p[i], q[i]) for i in pairs))
    wins = [
        1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in pairs) if min(p[i], q[i]) > 0 else 0.0 for i in pairs
    ]  # fmt: skip
    assert coupling.gumbel(p, q) == pytest.approx(sum(wins))
    grid = (np.arange(200_000) + 0.5) / 200_000
    same = np.searchsorted(p.cumsum(), grid) == np.searchsorted(q.cumsum(), grid)
    assert coupling.one_number(p, q) == pytest.approx(same.mean(), abs=1e-4)


def test_a_model_that_drafts_for_itself_has_every_draft_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = course_model("draft")
    found = coupling.measure(draft, draft, 2, 8)
    assert [way for way, *_ in found] == ["one-number", "gumbel", "rejection"]
    for _, drafts, kept, expected in found:
        assert drafts >= 6
        assert kept == 1.0
        assert expected == pytest.approx(1.0, abs=1e-6)
