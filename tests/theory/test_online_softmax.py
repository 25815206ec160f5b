"""Online softmax: the notes after each tile are their definitions, and the end is softmax, however it is cut."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.theory.online_softmax import record


def softmax_mean(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(1, keepdims=True))
    mean: np.ndarray = weights @ values / weights.sum(1, keepdims=True)
    return mean


@given(st.integers(1, 40), st.integers(1, 45), st.floats(0.1, 300), st.integers(0, 2**32 - 1))
def test_after_every_tile_the_notes_are_what_their_definitions_say(keys, tile, spread, seed) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    scores, values = spread * rng.standard_normal((3, keys)), rng.standard_normal((keys, 2))
    steps = record(scores, values, tile)
    assert len(steps) == -(-keys // tile)
    for step in steps:
        seen = step.first + step.scores.shape[1]
        m = scores[:, :seen].max(1)
        weights = np.exp(scores[:, :seen] - m[:, None])
        np.testing.assert_array_equal(step.largest, m)
        np.testing.assert_allclose(step.total, weights.sum(1), rtol=1e-12)
        np.testing.assert_allclose(step.acc, weights @ values[:seen], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(steps[-1].mean, softmax_mean(scores, values), rtol=1e-9, atol=1e-12)


def test_a_larger_maximum_shrinks_what_was_there_and_a_smaller_one_does_not() -> None:
    steps = record([[2.0, 2.0, 2.0, 2 + np.log(3), 0.0]], np.ones((5, 1)), 3)
    assert steps[0].total == [3]
    assert steps[1].shrink == pytest.approx([1 / 3])
    assert steps[1].total == pytest.approx([2 + np.exp(-2 - np.log(3))])
    for before, after in itertools.pairwise(record([[5.0, 1.0, 0.0]], np.ones((3, 1)), 1)):
        assert after.shrink == [1]
        assert after.total > before.total


def test_a_query_that_sees_nothing_yet_stays_at_zero_and_is_no_nan_later() -> None:
    scores = [[-np.inf, -np.inf, 1.0], [-np.inf, 2.0, 1.0]]
    values = np.array([[np.inf], [3.0], [5.0]])[1:]
    steps = record(np.array(scores)[:, 1:], values, 1)
    assert steps[0].total.tolist() == [0, 1]
    assert np.isneginf(steps[0].largest[0])
    assert np.isnan(steps[0].mean[0, 0])
    assert steps[1].mean[0, 0] == 5


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected scores \[n, keys\].*got \(2, 3\), \(4, 1\)"):
        record(np.zeros((2, 3)), np.zeros((4, 1)), 2)
    with pytest.raises(ValueError, match="tile >= 1"):
        record(np.zeros((2, 3)), np.zeros((3, 1)), 0)
