"""What a step costs: the roofline in sums, and a fit to measured steps. Measurements here are made up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from reference_impl.simulation.calibration import fit, relative_error
from reference_impl.simulation.cost import CalibratedCost, Roofline, features, least_relative_squares
from reference_impl.simulation.measure import Measured, Shape, random_shapes
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

TRUE = np.array([5e-3, 3e-4, 1.2e-6, 4e-4, 7e-5, 2e-6, 6e-8])
SHAPES = random_shapes(240, 1, 2048, 32, 512, 16_384)


def measured(coefficients: np.ndarray, noise: float) -> list[Measured]:
    rng = np.random.default_rng(0)
    return [
        Measured(s, float(np.dot(features(s.new_tokens, s.past_tokens), coefficients) * np.exp(noise * rng.normal())))
        for s in SHAPES
    ]


@pytest.mark.parametrize(
    "deployment",
    [
        Deployment(model("llama-3-8b"), device("H100"), mfu=0.4, mbu=0.7),
        Deployment(model("llama-3-70b"), device("H100"), 4, mfu=0.5, kv_bytes=1),
        Deployment(model("llama-2-13b"), device("A100-80GB"), weight_bits=8, mbu=0.9),
    ],
    ids=lambda d: f"{d.shape.name} on {d.num_devices} {d.device.name}",
)
def test_the_roofline_in_sums_is_the_deployments(deployment: Deployment) -> None:
    fast = Roofline(deployment)
    for shape in SHAPES:
        expected = deployment.step_seconds(np.array(shape.new_tokens), np.array(shape.past_tokens))
        assert fast.step_seconds(shape.new_tokens, shape.past_tokens) == pytest.approx(expected, rel=1e-11)
    assert fast.decode_seconds(3, 60) == fast.step_seconds([1, 1, 1], [10, 20, 30])
    assert fast.cache_tokens == deployment.cache_tokens()


def test_a_fit_finds_the_coefficients_that_made_the_measurements() -> None:
    cost = fit(measured(TRUE, 0.0), 4096, 2048)
    assert cost.coefficients == pytest.approx(TRUE, rel=1e-6)
    assert cost.error["median"] < 1e-9
    assert (cost.error["fitted_steps"], cost.error["held_out_steps"]) == (162, 78)


def test_the_error_that_is_reported_is_the_noise_of_the_measurements() -> None:
    """|ln(measured / predicted)| of a normal with deviation 0.1 has the median 0.0674 and the 90th percentile 0.164."""
    cost = fit(measured(TRUE, 0.1), 4096, 2048)
    assert cost.error["median"] == pytest.approx(0.0674, abs=0.02)
    assert cost.error["p90"] == pytest.approx(0.164, abs=0.05)


def test_the_error_is_of_steps_that_the_fit_did_not_see() -> None:
    """Steps that are held out take twice as long here: the fit must not know, and the error must say so."""
    spoiled = [Measured(m.shape, m.seconds * (2 if i // 3 % 3 == 2 else 1)) for i, m in enumerate(measured(TRUE, 0.0))]
    cost = fit(spoiled, 4096, 2048)
    assert cost.coefficients == pytest.approx(TRUE, rel=1e-6)
    assert cost.error["median"] == pytest.approx(0.5)
    assert cost.error["sum"] == pytest.approx(-0.5)


def test_no_coefficient_is_negative_and_short_steps_count_as_much_as_long_ones() -> None:
    inputs = np.array([features(s.new_tokens, s.past_tokens) for s in SHAPES], dtype=float)
    shrinking = TRUE.copy()
    shrinking[2] = -1e-7  # a cache that makes a step shorter
    found = least_relative_squares(inputs, np.maximum(1e-4, inputs @ shrinking))
    assert (found >= 0).all()
    assert found[2] == 0
    two = np.array([[1.0], [1.0]])
    assert least_relative_squares(two, np.array([1.0, 100.0]))[0] == pytest.approx(1.01 / 1.0001)


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 24"):
        fit(measured(TRUE, 0.0)[:23], 4096, 2048)


def test_a_step_of_decodes_costs_what_its_sums_say() -> None:
    cost = fit(measured(TRUE, 0.1), 4096, 2048)
    assert cost.decode_seconds(3, 60) == cost.step_seconds([1, 1, 1], [10, 20, 30])
    new, past = [1, 7, 1], [100, 30, 5]
    by_hand = np.dot(cost.coefficients, [1, 2, 105, 1, 7, 30, 7 * 30 + 28])
    assert cost.step_seconds(new, past) == pytest.approx(by_hand)


def test_a_calibration_survives_its_file_and_another_file_is_refused(tmp_path: Path) -> None:
    cost = fit(measured(TRUE, 0.1), 4096, 2048, {"cpu": "this"})
    cost.save(tmp_path / "cost.json")
    assert CalibratedCost.load(tmp_path / "cost.json") == cost
    raw = json.loads((tmp_path / "cost.json").read_text())
    del raw["chunk"]
    (tmp_path / "other.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"other.json: expected the fields .*'chunk'"):
        CalibratedCost.load(tmp_path / "other.json")


def test_relative_error_is_signed_in_the_sum_only() -> None:
    found = relative_error(np.array([1.1, 0.9, 3.0]), np.array([1.0, 1.0, 2.0]))
    assert found == {"median": pytest.approx(0.1), "p90": pytest.approx(0.42), "sum": pytest.approx(0.25)}


def test_random_shapes_stay_within_what_the_engine_takes() -> None:
    kinds = set()
    for shape in random_shapes(600, 3, 300, 8, 64, 1024):
        assert len(shape.new_tokens) == len(shape.past_tokens) <= 8
        assert sum(shape.new_tokens) <= 64
        assert all(n + p < 300 for n, p in zip(shape.new_tokens, shape.past_tokens, strict=True))
        chunks = sum(n > 1 for n in shape.new_tokens)
        assert chunks <= 1 or (chunks == len(shape.new_tokens) and not any(shape.past_tokens)), "what can be measured"
        kinds.add((chunks == len(shape.new_tokens), chunks > 1, chunks > 0))
    assert len(kinds) == 4, "decodes, a lone chunk, a chunk beside decodes, several prompts"
    assert any(isinstance(s, Shape) and len(s.new_tokens) == 1 and s.new_tokens[0] > 1 for s in SHAPES)
