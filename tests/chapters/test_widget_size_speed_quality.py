"""Size, speed and quality: gains are those of chapter 07b's bounds, and a method is grey only if another beats it."""

import itertools
import math
import re

import pytest

from chapters.widgets import size_speed_quality
from chapters.widgets.size_speed_quality import LINE, Method, gain, labels, undominated
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

METHODS = {
    "int4": Method(4.125, 0.05), "worse int4": Method(4.125, 0.06), "int8": Method(8.125, 0.001),
    "fp8": Method(8.0, 0.007, "fp8"), "sixteen": Method(16.0, 1e-6),
}  # fmt: skip


def test_at_batch_1_a_gain_is_the_ratio_of_bytes_and_in_a_large_batch_that_of_peaks() -> None:
    shape, h100 = model("llama-3-8b"), device("H100")
    read = float(kv_cache.read_bytes(shape, 4.125, embedding_bits=16))
    cache = float(kv_cache.bytes_per_token(shape)) * 256
    whole = float(kv_cache.read_bytes(shape, 16, embedding_bits=16))
    assert gain(METHODS["int4"], "llama-3-8b", "H100", 1, 256) == pytest.approx(
        (whole + cache) / (read + cache), rel=0.01
    )
    assert gain(METHODS["sixteen"], "llama-3-8b", "H100", 1, 256) == 1
    assert gain(METHODS["int4"], "llama-3-8b", "H100", 1024, 256) == pytest.approx(1, abs=0.05)
    # In FP8 the step becomes bound by bytes again, so that it gains less than the ratio of the peaks.
    flops = 1024 * latency.decode_flops(shape, 256)
    moved = float(kv_cache.read_bytes(shape, 8, embedding_bits=16)) + 1024 * cache
    slow, fast = float(flops / h100.peak("bf16")), max(float(flops / h100.peak("fp8")), moved / h100.bandwidth)
    assert gain(METHODS["fp8"], "llama-3-8b", "H100", 1024, 256) == pytest.approx(slow / fast, rel=0.01)
    assert slow / fast < h100.peak("fp8") / h100.peak("bf16")
    assert gain(METHODS["fp8"], "llama-3-8b", "A100-80GB", 1024, 256) == pytest.approx(1, abs=0.05)  # it widens


def test_a_method_is_dominated_by_one_that_is_no_worse_in_both_and_better_in_one() -> None:
    points = {
        "a": (1.0, 3.0),
        "b": (2.0, 2.0),
        "c": (2.0, 2.5),
        "twin of b": (2.0, 2.0),
        "d": (3.0, 1.0),
        "e": (3.0, 3.0),
    }
    assert undominated(points) == {"a", "b", "twin of b", "d"}


def test_a_large_batch_leaves_only_what_multiplies_in_fewer_bits_ahead() -> None:
    view = size_speed_quality(METHODS)
    assert "by bits a weight: int4, fp8, int8, sixteen;" in view.shown.alt
    view.controls["context"].value = 256  # a longer one makes the cache the limit, which no method here makes smaller
    view.controls["batch"].value = 1024
    best = re.search(r"by time of a step over 16 bits, at best: ([^.]*)", view.shown.alt)
    assert best is not None
    assert best[1].split(", ")[0] == "fp8"
    assert "int4" not in best[1].split(", ")
    assert re.search(r'<img [^>]*alt="a step of [^"]{20,}"', view.picture.value)


def test_no_two_names_stand_on_each_other() -> None:
    points = {f"m{n}": (4 + n % 3 / 10, 0.05 + n / 1000) for n in range(9)} | {"far": (8.0, 0.05)}
    places = labels(points)
    heights = sorted(places[name][1] for name in points if name != "far")
    assert min(b - a for a, b in itertools.pairwise(heights)) > 0.02
    assert places["far"][1] == pytest.approx(math.log10(0.05))


def test_names_of_points_a_little_apart_share_a_column_that_stays_inside_the_panel() -> None:
    points = {f"two {n}": (2.0, 2 - n / 10) for n in range(6)} | {
        f"four {n}": (4.2, 0.06 + n / 1000) for n in range(14)
    }
    points |= {"eight": (8.0, 0.0003)}
    places = labels(points)
    column = [places[name] for name in points if name != "eight"]
    assert len({x for x, _ in column}) == 1
    heights = sorted(y for _, y in column)
    assert min(b - a for a, b in itertools.pairwise(heights)) > 0.9 * LINE * 5  # five decades: 10 to 0.0001
    assert heights[-1] < 1
    assert heights[0] > -2
    assert places["eight"] == pytest.approx((8.0 * 1.05, math.log10(0.0003)))


def test_what_a_logarithmic_axis_cannot_show_is_refused() -> None:
    with pytest.raises(ValueError, match="exact: expected bits and KL above 0, got 16 bits, 0.0 nats"):
        size_speed_quality({"exact": Method(16, 0.0)})
