"""The benchmark of adaptive drafts where none pay."""

from __future__ import annotations

import math
import random

import pytest

from reference_impl.bench import adaptive
from reference_impl.bench import speculative as bench


def test_each_method_and_plain_decoding_itself_is_held_against_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "NEW_TOKENS", 8)
    monkeypatch.setattr(bench, "BATCHES", (2,))
    monkeypatch.setattr(adaptive, "LOSING", ("early-exit",))
    found = adaptive.run(2, model="draft")
    assert [(case["workload"], case["requests"]) for case in found["cases"]] == [("repeats", 2), ("code", 2)]
    for case in found["cases"]:
        assert [*case["variants"]] == [adaptive.BESIDE, "early-exit"]
        assert case["variants"][adaptive.BESIDE]["guesses"] == 0
        for row in case["variants"].values():
            assert row["runs"] == 2
            assert row["min"] <= row["median"] <= row["max"]
            assert row["of_the_median"] == (row["min"], row["max"]), "two values say no more"
    text = adaptive.lines(found)
    assert len(text) == 2 * 3 + 1
    assert "plain beside plain" in text[1]


@pytest.mark.parametrize("num", [1, 2, 5, 6, 9, 20, 50, 51])
def test_the_interval_holds_the_median_in_19_of_20_samples(num: int) -> None:
    low, high = adaptive.interval_of_median([*map(float, range(num))])
    assert low + high == num - 1
    if num < 6:
        assert (low, high) == (0, num - 1)
        return

    def inside(rank: int) -> float:
        return 1 - 2 * sum(math.comb(num, heads) for heads in range(rank + 1)) / 2**num

    assert inside(int(low)) >= 0.95 > inside(int(low) + 1)
    draw = random.Random(num)
    held = 0
    for _ in range(1000):
        below, above = adaptive.interval_of_median([draw.random() for _ in range(num)])
        held += below <= 0.5 <= above
    assert held >= 930
