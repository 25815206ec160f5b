"""What fewer bits buy: the bound of a decode step and of a prefill, with weights, arithmetic and cache each in a format
of its own, beside the same in 16 bits."""

from __future__ import annotations

from collections.abc import Iterable

from ipywidgets import Dropdown, SelectionSlider

from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, Shown, View, figure, show, tidy
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import ModelShape, model
from reference_impl.theory.units import format_seconds

WEIGHTS = {"16 bits": 16.0, "8 bits": 8.0, "INT4, groups of 128": kv_cache.bits_per_weight(4, 128)}
ARITHMETIC = {"16 bits": "bf16", "FP8": "fp8", "INT8": "int8"}
CACHES = {"16 bits": 2.0, "8 bits": 1.0, "4 bits, groups of 32": kv_cache.bits_per_weight(4, 32) / 8}
BATCHES = [2**n for n in range(11)]
CONTEXTS = [2**n for n in range(8, 18)]
DEVICES = ("A100-80GB", "H100", "H200", "MI300X", "B200")
MODELS = ("llama-3-8b", "llama-3-70b")


def step(
    shape: ModelShape, device_name: str, weights: str, arithmetic: str, cache: str, batch: int, context: int
) -> latency.DecodeParts:
    """Embedding and output projection stay in 16 bits. KeyError for arithmetic that the device does not have."""
    read = kv_cache.read_bytes(shape, WEIGHTS[weights], embedding_bits=16)
    return latency.decode_parts(
        shape, context, device(device_name), batch, ARITHMETIC[arithmetic], float(read), CACHES[cache]
    )


def fits(shape: ModelShape, device_name: str, weights: str, cache: str) -> int:
    """Tokens of cache beside the weights in 0.9 of one device's memory; 0 where the weights do not fit."""
    held = kv_cache.weight_bytes(shape, WEIGHTS[weights], embedding_bits=16)
    each = kv_cache.bytes_per_token(shape, CACHES[cache])
    return int(kv_cache.tokens_that_fit(device(device_name).capacity, held, each))


def draw(
    model_name: str, device_name: str, weights: str, arithmetic: str, cache: str, batch: int, context: int
) -> Shown:
    """Bars: the parts of a step in 16 bits and as chosen. Line: the gain over the batch."""
    shape = model(model_name)
    if ARITHMETIC[arithmetic] not in device(device_name).dense_flops:
        text = f"{device_name} does not multiply {arithmetic}: choose another arithmetic, or another device."
        fig = figure(8.2, 1.0)
        fig.text(0.01, 0.5, text, va="center", fontsize=9, color=INK)
        return show(fig, text)
    plain = step(shape, device_name, "16 bits", "16 bits", "16 bits", batch, context)
    chosen = step(shape, device_name, weights, arithmetic, cache, batch, context)
    tokens = [fits(shape, device_name, *kinds) for kinds in (("16 bits", "16 bits"), (weights, cache))]
    short = "" if batch * context <= tokens[1] else f" (this batch has {batch * context:,}: too many)"
    room = f"{tokens[1]:,} tokens of cache fit{short}, in 16 bits {tokens[0]:,}"
    took = (
        f"{model_name} on one {device_name}, batch {batch}, context {context:,}: {format_seconds(plain.bound)} → "
        f"{format_seconds(chosen.bound)}, {plain.bound / chosen.bound:.2f} times as fast at best"
    )
    fig = figure(8.2, 3.2)
    fig.set_layout_engine("none")
    left, right = fig.add_axes((0.13, 0.17, 0.42, 0.58)), fig.add_axes((0.65, 0.17, 0.33, 0.58))
    for row, one in enumerate((chosen, plain)):
        labels = ("weights", "cache", "arithmetic") if row == 0 else (None, None, None)
        left.barh(row + 0.17, one.weights * 1e3, 0.3, color=BLUE, label=labels[0])
        left.barh(row + 0.17, one.cache * 1e3, 0.3, left=one.weights * 1e3, color=GREEN, hatch="//", edgecolor="white",
                  label=labels[1])  # fmt: skip
        left.barh(row - 0.17, one.arithmetic * 1e3, 0.3, color=ORANGE, label=labels[2])
        left.text(one.bound * 1e3, row, f"  {format_seconds(one.bound)}", va="center", fontsize=8, color=INK)
    left.set_yticks([0, 1], ["chosen", "16 bits"])
    left.set_xlim(0, 1.25e3 * max(plain.bound, chosen.bound))
    left.legend(fontsize=8, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    tidy(left, "milliseconds")
    gains = [
        step(shape, device_name, "16 bits", "16 bits", "16 bits", b, context).bound
        / step(shape, device_name, weights, arithmetic, cache, b, context).bound
        for b in BATCHES
    ]
    right.plot(BATCHES, gains, "o-", color=BLUE, markersize=4)
    right.axhline(1, color=GREY, linestyle=":")
    right.set_xscale("log", base=2)
    right.set_xticks(BATCHES[::2], [str(b) for b in BATCHES[::2]])
    right.minorticks_off()
    right.set_ylim(0, 1.1 * max(gains))
    tidy(right, "batch", "times as fast")
    fig.text(0.01, 0.985, f"{took}\n{room}", va="top", fontsize=8.5, color=INK)
    over_batch = f"Over the batch from 1 to {BATCHES[-1]} from {gains[0]:.2f} to {gains[-1]:.2f} times."
    return show(fig, f"{took}; {room}. {over_batch}")


def menu(options: Iterable[str], value: str, label: str) -> Dropdown:
    return Dropdown(options=list(options), value=value, description=label, style={"description_width": "120px"})


def slider(options: list[int], value: int, label: str) -> SelectionSlider:
    return SelectionSlider(
        options=[(f"{n:,}", n) for n in options], value=value, description=label, continuous_update=False,
        style={"description_width": "120px"}, layout={"width": "480px"},
    )  # fmt: skip


def fewer_bits(
    weights: str = "INT4, groups of 128", arithmetic: str = "16 bits", cache: str = "16 bits", batch: int = 1,
    context: int = 2048,
) -> View:  # fmt: skip
    """Choose model, device and formats; see what a decode step is bound by, with which gain, and what fits."""
    return View(
        {
            "model_name": menu(MODELS, MODELS[0], "Model"),
            "device_name": menu(DEVICES, "H100", "Device"),
            "weights": menu(WEIGHTS, weights, "Weights"),
            "arithmetic": menu(ARITHMETIC, arithmetic, "Arithmetic"),
            "cache": menu(CACHES, cache, "Cache"),
            "batch": slider(BATCHES, batch, "Batch"),
            "context": slider(CONTEXTS, context, "Context"),
        },
        draw,
    )
