"""The latency budget: every control at both ends, refusals in words, advice for each missed objective."""

import itertools
import re
from typing import Any

import pytest

from chapters.widgets import latency_budget
from chapters.widgets.figure import Shown
from chapters.widgets.latency_budget import BATCHES, COUNTS, OUTPUTS, PROMPTS, USES, WEIGHTS, draw
from reference_impl.theory.deployment import Deployment, request_time
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model


def shown(**changes: Any) -> Shown:
    base: dict[str, Any] = {
        "use": "chat", "model_name": "llama-3-8b", "device_name": "H100", "devices": 1, "weights": "16 bit",
        "prompt": 2048, "output": 256, "batch": 1, "queue_ms": 0, "mfu": 50, "mbu": 80,
    }  # fmt: skip
    return draw(**(base | changes))


def ends(control: Any) -> tuple[Any, Any]:
    if hasattr(control, "options"):
        values = [value for _, value in control._options_full]
        return values[0], values[-1]
    return control.min, control.max


@pytest.mark.usefixtures("painted")
def test_every_control_works_at_both_ends() -> None:
    view = latency_budget()
    for control in view.controls.values():
        before = control.value
        for value in ends(control):
            control.value = value
            assert re.search(r'<img [^>]*alt="[^"]{20,}"', view.picture.value), (control.description, value)
            assert "nan" not in view.shown.alt.lower()
        control.value = before
    for low_or_high in (0, 1):
        for control in view.controls.values():
            control.value = ends(control)[low_or_high]
        assert view.shown.alt


def test_every_corner_of_the_sliders_gives_a_time_or_a_reason() -> None:
    spaces = ((PROMPTS[0], PROMPTS[-1]), (OUTPUTS[0], OUTPUTS[-1]), (BATCHES[0], BATCHES[-1]), (COUNTS[0], COUNTS[-1]))
    for prompt, output, batch, devices in itertools.product(*spaces):
        alt = shown(model_name="llama-3.1-405b", prompt=prompt, output=output, batch=batch, devices=devices).alt
        assert ("no latency to give" in alt) != ("TTFT" in alt and "TPOT" in alt), alt


def test_weights_that_do_not_fit_get_a_reason_and_no_time() -> None:
    alt = shown(model_name="llama-3-70b").alt
    assert "no latency to give" in alt
    assert "at least 2 devices" in alt
    assert "TTFT" not in alt
    assert "no latency to give" not in shown(model_name="llama-3-70b", devices=4).alt


def test_caches_that_do_not_fit_beside_the_weights_are_refused() -> None:
    assert "cached tokens" in shown(prompt=4096, batch=256).alt


def test_a_context_the_model_was_not_made_for_is_refused() -> None:
    assert "context of llama-3-8b" in shown(prompt=8192).alt


def test_a_precision_the_device_lacks_is_refused_by_name() -> None:
    alt = shown(device_name="A100-80GB", weights="fp8, weights and arithmetic").alt
    assert "no peak for 'fp8'" in alt
    assert "TTFT" in shown(device_name="T4", model_name="qwen3-0.6b").alt  # no bf16 either, but fp16


def test_the_times_are_those_of_the_formula() -> None:
    where = Deployment(model("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)
    time = request_time(where, 2048, 256, queue=0.1)
    assert f"TPOT {1000 * time.tpot:.2f} ms" in shown(queue_ms=100).alt
    assert f"TTFT {1000 * time.ttft:.0f} ms" in shown(queue_ms=100).alt


def test_each_missed_objective_says_what_would_help() -> None:
    assert "the queue alone" in shown(use="voice", queue_ms=500).alt
    late = shown(use="voice", prompt=4096, mfu=20).alt
    fits = int(re.search(r"at most ([\d,]+) tokens fits", late).group(1).replace(",", ""))  # type: ignore[union-attr]
    assert 0 < fits < 4096
    assert "TTFT met" in shown(use="voice", prompt=fits - fits % 16, mfu=20).alt
    assert "TPOT MISSED" in shown(device_name="L4", mbu=20).alt
    assert "total MISSED" in shown(use="code completion", output=1024).alt


def test_batch_work_has_no_objective_per_request() -> None:
    alt = shown(use="batch", queue_ms=2000).alt
    assert "no objective per request" in alt
    assert "MISSED" not in alt


@pytest.mark.parametrize("weights", list(WEIGHTS))
@pytest.mark.parametrize("use", list(USES))
def test_every_use_and_precision_is_drawn(use: str, weights: str) -> None:
    assert "by formula" in shown(use=use, weights=weights).alt
