"""Philox 4x32-10 bit for bit, and the uniform numbers made from it."""

from __future__ import annotations

import numpy as np
import pytest

from reference_impl.core.philox import philox, uniform

# The known answers that the authors publish with Random123 (kat_vectors, philox4x32-10).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint64)[:, None]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers_of_the_authors(counter: str, key: str, expected: str) -> None:
    assert (philox(words(counter), words(key)) == words(expected)).all()


def test_many_counters_at_once_give_what_each_gives_alone() -> None:
    counters = np.concatenate([words(c) for c, _, _ in KNOWN], axis=1)
    keys = np.concatenate([words(k) for _, k, _ in KNOWN], axis=1)
    assert (philox(counters, keys) == np.concatenate([words(e) for _, _, e in KNOWN], axis=1)).all()


def test_the_uniform_number_of_counter_zero_is_its_first_word() -> None:
    assert uniform(0, 0, 0) == np.float32(((0x6627E8D5 >> 9) + 0.5) / 2**23)


def test_every_argument_changes_the_number() -> None:
    base = {"seed": 5, "sample": 1, "position": 9, "draw": 2}
    seen = {float(uniform(**base))}
    for name in base:
        seen.add(float(uniform(**{**base, name: base[name] + 1})))
    for high in (2**32 + 5, 2**63 + 5):
        seen.add(float(uniform(**{**base, "seed": high})))
    seen.add(float(uniform(seed=5, sample=9, position=1, draw=2)))
    assert len(seen) == 8


def test_numbers_are_strictly_between_zero_and_one_and_exact_midpoints() -> None:
    u = uniform(np.arange(200_000), 0, 3)
    assert u.dtype == np.float32
    assert u.min() > 0
    assert u.max() < 1
    cells = u.astype(np.float64) * 2**23 - 0.5
    assert (cells == cells.round()).all()


@pytest.mark.parametrize("axis", ["seed", "position", "sample", "draw"])
def test_numbers_are_uniform_and_uncorrelated_along_every_axis(axis: str) -> None:
    n = 100_000
    u = uniform(**{"seed": 17, "sample": 0, "position": 0, "draw": 0, axis: np.arange(n)}).astype(np.float64)
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    chi_squared = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert 99 - 5 * (2 * 99) ** 0.5 < chi_squared < 99 + 5 * (2 * 99) ** 0.5  # mean 99, variance 2 * 99
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / n**0.5
