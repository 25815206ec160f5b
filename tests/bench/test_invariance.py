"""The benchmark of batch_invariant=True runs both ways on the same requests."""

from __future__ import annotations

from reference_impl.bench import invariance


def test_each_case_is_timed_both_ways(random_model, monkeypatch) -> None:
    monkeypatch.setattr(invariance, "CASES", {"two": (2, 3, 4), "a prompt": (1, 20, 1)})
    found = invariance.run(random_model("float32"), rounds=2)
    assert set(found) == {"two", "a prompt"}
    for case in found.values():
        assert set(case["seconds"]) == {"together", "each by itself"}
        assert case["times_as_long"]["runs"] == 2
