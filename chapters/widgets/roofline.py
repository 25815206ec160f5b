"""The roofline explorer: where a step of a model lands on a device, over `reference_impl.theory.roofline`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ipywidgets import Dropdown, SelectionSlider

from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, RED, Shown, View, figure, show, tidy
from reference_impl.theory import kv_cache
from reference_impl.theory import roofline as theory
from reference_impl.theory.hardware import DEVICES, Device, device
from reference_impl.theory.model_shapes import MODELS, ModelShape, model
from reference_impl.theory.units import format_bytes, format_seconds

BATCHES = [2**n for n in range(13)]  # 1 to 4,096
CACHED = [0, *(2**n for n in range(7, 21))]  # 0, then 128 to 1,048,576
NEW = [2**n for n in range(16)]  # 1 to 32,768
COUNTS = [1, 2, 4, 8, 16]
WEIGHT_BITS = {
    "16 bit": kv_cache.bits_per_weight(16),
    "8 bit": kv_cache.bits_per_weight(8),
    "4 bit, groups of 128": kv_cache.bits_per_weight(4, 128),
}
CACHE_TYPES = {"16 bit": 2.0, "8 bit": 1.0, "4 bit": 0.5}
ARITHMETIC = ("bf16", "fp16", "tf32", "fp32", "fp8", "int8", "fp4")
# A format the device lacks is converted to one it has, and runs at that one's speed; the first it has is taken.
RUNS_AS = {
    "bf16": ("fp16", "fp32"), "fp16": ("bf16", "fp32"), "tf32": ("fp32",), "fp32": (),
    "fp8": ("bf16", "fp16", "fp32"), "int8": ("bf16", "fp16", "fp32"), "fp4": ("fp8", "bf16", "fp16", "fp32"),
}  # fmt: skip


@dataclass(frozen=True)
class Placed:
    """What the picture shows, from the formulas: the point, the sweep over batches, and what memory says."""

    point: theory.Placement
    sweep: theory.Placement  # the same step at each of BATCHES
    sweep_fits: np.ndarray  # which of those have room
    ceiling: float  # FLOP/byte that no batch exceeds; infinite where no cache is read
    needed: float
    usable: float
    precision: str
    note: str  # empty, or what is drawn instead of the chosen format


def several(one: Device, count: int) -> Device:
    """`count` devices as one: peak, bandwidth and capacity add up, and communication is left out."""
    return replace(
        one,
        dense_flops={name: count * value for name, value in one.dense_flops.items()},
        bandwidth=count * one.bandwidth,
        capacity=count * one.capacity,
    )


def runs_as(one: Device, precision: str) -> tuple[str, str]:
    """(precision whose peak counts, a sentence where that is not the requested one)."""
    if precision in one.dense_flops:
        return precision, ""
    other = next(name for name in RUNS_AS[precision] if name in one.dense_flops)
    return other, f"{one.name} has no {precision} peak: drawn with {other}, which it has"


def placed(
    shape: ModelShape,
    one: Device,
    count: int,
    batch: int,
    past: int,
    new: int,
    weights: str,
    arithmetic: str,
    cache: str,
) -> Placed:
    """The step and its neighbours on `count` devices."""
    machine = several(one, count)
    precision, note = runs_as(one, arithmetic)
    bits, kv = WEIGHT_BITS[weights], CACHE_TYPES[cache]
    held, read = float(kv_cache.weight_bytes(shape, bits)), float(kv_cache.read_bytes(shape, bits))
    options: dict[str, Any] = {"precision": precision, "weights": read, "kv_bytes": kv}
    batches, usable = np.array(BATCHES), 0.9 * machine.capacity
    return Placed(
        theory.place(shape, machine, batch, past, new, **options),
        theory.place(shape, machine, batches, past, new, **options),
        held + kv_cache.cache_bytes(shape, past + new, batches.astype(float), kv) <= usable,
        # Without weights only the cache traffic of each sequence is left: the limit of a growing batch. A prompt that
        # reads no cache only writes one; what would limit it are activations, and those are left out here.
        float(theory.step_intensity(shape, 1, past, new, weights=0, kv_bytes=kv)) if past else np.inf,
        held + float(kv_cache.cache_bytes(shape, past + new, batch, kv)),
        usable,
        precision,
        note,
    )


def draw(
    model_name: str, device_name: str, devices: int, batch: int, past: int, new: int, weights: str, arithmetic: str,
    cache: str,
) -> Shown:  # fmt: skip
    """The roof, the step as a point under it, the same step at other batches, and the ceiling set by cache reads."""
    shape, one = model(model_name), device(device_name)
    it = placed(shape, one, devices, batch, past, new, weights, arithmetic, cache)
    lines = describe(it)
    where = f"{devices} x {device_name}, {it.precision}" if devices > 1 else f"{device_name}, {it.precision}"
    what = f"{model_name}: {batch:,} x {new:,} new {'token' if new == 1 else 'tokens'} over {past:,} cached, on {where}"
    fig = figure(7.8, 4.2)
    fig.set_layout_engine("none")  # fixed margins: a layout engine draws everything twice
    ax = fig.add_axes((0.12, 0.12, 0.86, 0.65))
    _draw_roof(ax, several(one, devices), it)
    ax.set_title("\n".join([what, *lines]), fontsize=9, loc="left")
    ax.legend(fontsize=8, framealpha=1, edgecolor="white", loc="lower right")
    return show(fig, f"Roofline. {'. '.join([what, *lines])}.")


def describe(it: Placed) -> list[str]:
    """What the picture says: what was drawn instead, where the point lies, whether it can exist."""
    p = it.point
    bound = "compute" if p.compute_bound else "bandwidth"
    limit = f"no batch exceeds {_plain(it.ceiling)}" if np.isfinite(it.ceiling) else "no cache is read"
    sizes = f"{format_bytes(it.needed)} of {format_bytes(it.usable)} usable (90 %)"
    return [
        *([it.note] if it.note else []),
        f"intensity {_plain(p.intensity)} FLOP/byte without activations, ridge {p.ridge:,.0f}; {limit}",
        f"bound by {bound}: at most {p.utilization:.2%} of the dense peak, {_plain(p.attainable / 1e12)} TFLOP/s",
        # A time for a step that has no room would be a fiction.
        f"DOES NOT FIT: needs {sizes}; no time to give"
        if it.needed > it.usable
        else f"fits: {sizes}; floor of the step {format_seconds(float(p.seconds))}",
    ]


def _plain(value: Any) -> str:
    """Four significant digits, without an exponent."""
    return f"{float(f'{float(value):.4g}'):,.10g}"


def _draw_roof(ax: Any, machine: Device, it: Placed) -> None:
    """Both axes hold log10 of what their labels say: log axes of matplotlib take three times as long to draw."""
    p, log = it.point, np.log10
    low, high = min(0.25, float(p.intensity) / 2), max(4 * p.ridge, 2 * float(np.max(it.sweep.intensity)))
    roof = np.array([low, p.ridge, high])
    reach = theory.attainable_flops(roof, machine, it.precision) / 1e12
    ax.plot(log(roof), log(reach), color=INK, linewidth=2, label="roof")
    ax.axvline(log(p.ridge), color=GREY, linestyle="--", linewidth=1.2, label=f"ridge {p.ridge:,.0f} FLOP/byte")
    if it.ceiling < high:
        ax.axvline(log(it.ceiling), color=RED, linestyle=":", linewidth=1.8, label="limit of any batch, by the cache")
    marks = f"batch {BATCHES[0]}, 2, 4 ... {BATCHES[-1]:,}"
    for room, colour, size, label in ((True, BLUE, 14, f"{marks}: has room"), (False, GREY, 10, f"{marks}: no room")):
        some = it.sweep_fits == room
        if some.any():
            ax.plot(log(it.sweep.intensity[some]), log(it.sweep.attainable[some] / 1e12), "|", color=colour,
                    markersize=size, markeredgewidth=1.6, label=label)  # fmt: skip
    fits, at = it.needed <= it.usable, (log(p.intensity), log(p.attainable / 1e12))
    ax.plot(*at, "o", markersize=10, markeredgecolor=ORANGE if fits else RED, markeredgewidth=2,
            color=ORANGE if fits else "white", label="this step" if fits else "this step (does not fit)")  # fmt: skip
    ax.plot([at[0], at[0]], [at[1], log(reach[-1])], color=GREEN, linewidth=1, label="peak that it cannot use")
    tidy(ax, "arithmetic intensity, FLOP per byte", "TFLOP/s that can be reached")
    low_y = min(reach[0], float(p.attainable) / 1e12)
    ax.set_xlim(log(low) - 0.05, log(high) + 0.05)
    ax.set_ylim(log(low_y) - 0.15, log(reach[-1]) + 0.3)
    for axis, ends in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        decades = range(int(np.ceil(ends[0])), int(np.floor(ends[1])) + 1)
        axis.set_ticks(list(decades), [f"{10.0**n:,.6g}" for n in decades])


def roofline(
    model_name: str = "llama-3-70b",
    device_name: str = "H100",
    devices: int = 4,
    batch: int = 1,
    past: int = 8192,
    new: int = 1,
    weights: str = "16 bit",
    arithmetic: str = "bf16",
    cache: str = "16 bit",
) -> View:
    """Place a step of a model on a device's roofline. new = 1 and past > 0 is decode, past = 0 is prefill.

    Numbers are rounded to those of the sliders. Dense models only: what a mixture of experts reads depends on routing.
    """

    def near(options: list[int], value: int) -> int:
        return min(options, key=lambda n: abs(n - value))

    wide, layout = {"description_width": "120px"}, {"width": "480px"}

    def slider(options: list[int], value: int, description: str) -> SelectionSlider:
        return SelectionSlider(
            options=[(f"{n:,}", n) for n in options], value=near(options, value), description=description, style=wide,
            layout=layout, continuous_update=False,
        )  # fmt: skip

    def menu(options: Any, value: str, description: str) -> Dropdown:
        return Dropdown(options=list(options), value=value, description=description, style=wide)

    dense = [name for name, shape in sorted(MODELS.items()) if shape.active_params is None]
    return View(
        {
            "model_name": menu(dense, model_name, "Model"),
            "device_name": menu(DEVICES, device_name, "Device"),
            "devices": slider(COUNTS, devices, "Devices"),
            "batch": slider(BATCHES, batch, "Requests"),
            "past": slider(CACHED, past, "Cached tokens"),
            "new": slider(NEW, new, "New tokens"),
            "weights": menu(WEIGHT_BITS, weights, "Weights"),
            "arithmetic": menu(ARITHMETIC, arithmetic, "Arithmetic"),
            "cache": menu(CACHE_TYPES, cache, "Cache"),
        },
        draw,
    )
