"""What a cache saves over a whole generation, over `reference_impl.theory.latency`: counts, and a floor in seconds."""

from __future__ import annotations

from ipywidgets import Dropdown, SelectionSlider

from chapters.widgets.figure import BLUE, INK, ORANGE, Shown, View, figure, show, tidy
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import DEVICES, device
from reference_impl.theory.model_shapes import MODELS, model
from reference_impl.theory.units import format_seconds

PROMPTS = [2**n for n in range(18)]  # 1 to 131,072
NEW = [2**n for n in range(13)]  # 1 to 4,096


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
    axes = fig.subplots(1, 3)
    for ax, (title, slow, fast, text) in zip(axes, panels, strict=False):
        tidy(ax, title=f"{title}\nratio {slow / fast:,.4g}")
        ax.title.set_fontsize(9)
        ax.bar([0, 1], [slow, fast], color=[ORANGE, BLUE], hatch=["//", ""], edgecolor="white")
        ax.set_yscale("log")
        ax.set_ylim(fast / 10, slow * 10)
        ax.set_xticks([0, 1], ["no cache", "cache"])
        for x, value in ((0, slow), (1, fast)):
            ax.annotate(text(value), (x, value), ha="center", va="bottom", fontsize=8, color=INK)
    if not fits:
        axes[2].axis("off")
        axes[2].text(0.5, 0.5, f"the weights do not fit\none {device_name}:\nno time to give", ha="center", va="center")
    seconds = (format_seconds(without.seconds), format_seconds(cached.seconds)) if fits else ("no time", "no time")
    return show(
        fig,
        f"{model_name}, {prompt} prompt tokens and {new} new ones on one {device_name}. Without a cache: "
        f"{without.linear_tokens} tokens through the matrices, {without.attention_pairs} pairs, {seconds[0]}. "
        f"With a cache: {cached.linear_tokens}, {cached.attention_pairs}, {seconds[1]}.",
    )


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
