"""What a cache saves over a whole generation, over `reference_impl.theory.latency`: counts, and a floor in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ipywidgets import Dropdown, SelectionSlider

from chapters.widgets.figure import BLUE, INK, ORANGE, Shown, View, figure, show
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import DEVICES, device
from reference_impl.theory.model_shapes import MODELS, model
from reference_impl.theory.units import format_seconds

PROMPTS = [2**n for n in range(18)]  # 1 to 131,072
NEW = [2**n for n in range(13)]  # 1 to 4,096
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def draw(model_name: str, prompt: int, new: int, device_name: str) -> Shown:
    """Three pairs of bars: tokens through the matrices, attention pairs, seconds at the hardware's limits."""
    shape, machine = model(model_name), device(device_name)
    precision = "bf16" if "bf16" in machine.dense_flops else "fp16"
    without, cached = (latency.generation_cost(shape, prompt, new, machine, c, precision) for c in (False, True))
    panels = [
        ("tokens through the matrices", without.linear_tokens, cached.linear_tokens, "{:,}".format),
        ("query-key pairs", without.attention_pairs, cached.attention_pairs, "{:,}".format),
    ]
    fits = kv_cache.weight_bytes(shape) <= machine.capacity
    if fits:  # a time for weights that do not fit would be a fiction
        panels.append(("seconds, lower bound", without.seconds, cached.seconds, format_seconds))
    fig = figure(7.5, 2.6)
    fig.set_layout_engine("none")  # fixed margins: a layout engine draws everything twice
    for left, (title, slow, fast, text) in zip((0.05, 0.385, 0.72), panels, strict=False):
        _pair(fig.add_axes((left, 0.12, 0.26, 0.66)), f"{title}\nratio {slow / fast:,.4g}", slow, fast, text)
    if not fits:
        words = f"the weights do not fit\none {device_name}:\nno time to give"
        fig.text(0.85, 0.45, words, ha="center", va="center")
    seconds = (format_seconds(without.seconds), format_seconds(cached.seconds)) if fits else ("no time", "no time")
    return show(
        fig,
        f"{model_name}, {prompt} prompt tokens and {new} new ones on one {device_name}. Without a cache: "
        f"{without.linear_tokens} tokens through the matrices, {without.attention_pairs} pairs, {seconds[0]}. "
        f"With a cache: {cached.linear_tokens}, {cached.attention_pairs}, {seconds[1]}.",
    )


def _pair(ax: Any, title: str, slow: float, fast: float, text: Callable[[float], str]) -> None:
    """Two bars of logarithmic height. The axis itself is linear: the ticks of a log axis take longest to draw."""
    tops = [math.log10(value) for value in (slow, fast)]
    floor = math.floor(tops[1]) - 1
    ax.set_title(title, fontsize=9, loc="left")
    ax.bar([0, 1], [top - floor for top in tops], bottom=floor, color=[ORANGE, BLUE], width=0.7)
    ax.set_ylim(floor, tops[0] + 1)
    ax.set_xticks([0, 1], ["no cache", "cache"])
    decades = range(floor, math.ceil(tops[0]) + 1, max(1, (math.ceil(tops[0]) - floor) // 4))
    ax.set_yticks(decades, [f"10{str(n).translate(_RAISED)}" for n in decades], fontsize=8)  # mathtext takes longer
    ax.spines[["top", "right"]].set_visible(False)
    for x, top, value in zip((0, 1), tops, (slow, fast), strict=True):
        ax.annotate(text(value), (x, top), ha="center", va="bottom", fontsize=8, color=INK)


def savings(model_name: str = "llama-3-8b", prompt: int = 1024, new: int = 256, device_name: str = "H100") -> View:
    """Choose a model and lengths; see operation counts and time bounds with and without a cache, one request alone."""
    wide = {"description_width": "120px"}
    layout = {"width": "480px"}
    dense = [name for name, shape in sorted(MODELS.items()) if shape.active_params is None]
    return View(
        {
            "model_name": Dropdown(options=dense, value=model_name, description="Model", style=wide),
            "prompt": SelectionSlider(
                options=[(f"{n:,}", n) for n in PROMPTS], value=prompt, description="Prompt tokens", style=wide,
                layout=layout, continuous_update=False,
            ),
            "new": SelectionSlider(
                options=[(f"{n:,}", n) for n in NEW], value=new, description="New tokens", style=wide, layout=layout,
                continuous_update=False,
            ),
            "device_name": Dropdown(options=list(DEVICES), value=device_name, description="Device", style=wide),
        },
        draw,
    )  # fmt: skip
