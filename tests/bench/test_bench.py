"""What is said about speed comes from a stamped result, and the harness does what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reference_impl.bench import cpu, harness, peer

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_shows_the_stamped_result_and_no_other_figures_of_speed():
    result = json.loads((ROOT / "reference_impl" / "bench" / "results" / "cpu.json").read_text())
    assert cpu.markdown(result) in (ROOT / "reference_impl" / "bench" / "README.md").read_text()
    assert result["stamp"]["commit"] != "unknown"


def test_candidates_take_turns_and_the_first_round_is_thrown_away():
    calls: list[str] = []
    seconds = harness.interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == list("abbaabba")
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_taken_round_by_round():
    assert harness.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "runs": 3}


def test_texts_that_part_where_it_is_no_near_tie_stop_the_benchmark():
    import torch

    class Peer:
        def next_logits(self, tokens: list[int]) -> torch.Tensor:
            return torch.tensor([0.0, 1.0, 0.999])

    same = [1] * cpu.NEW_TOKENS
    near, far = [1, 2, *same[2:]], [1, 0, *same[2:]]
    assert peer.agreement(Peer(), [[1]], [same], [same])["rows_equal"] == 1
    parted = peer.agreement(Peer(), [[1]], [same], [near])
    assert parted["largest_gap_where_rows_part"] == pytest.approx(0.001, rel=1e-3)
    with pytest.raises(RuntimeError, match="not a near-tie"):
        peer.agreement(Peer(), [[1]], [same], [far])
