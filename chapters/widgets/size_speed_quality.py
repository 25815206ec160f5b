"""Size, speed and quality of quantization methods in one picture: measured KL over bits a weight, and over the time of
a decode step at a device's limits. Colour: no other method is better or equal in both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from chapters.widgets.fewer_bits import BATCHES, CONTEXTS, DEVICES, MODELS, menu, slider
from chapters.widgets.figure import BLUE, GREY, INK, Shown, View, figure, show, tidy
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

LINE = 0.03  # of a panel's height: what a line of text takes
NAME = 0.3  # of the largest x: what a name takes beside its point


@dataclass(frozen=True)
class Method:
    """bits: per weight, scales included. kl: nats a token, measured, above 0. arithmetic: of both factors of a product
    ("fp8", "int8"); "bf16" where weights are widened first."""

    bits: float
    kl: float
    arithmetic: str = "bf16"


def gain(method: Method, model_name: str, device_name: str, batch: int, context: int) -> float:
    """How many times as fast a decode step is as in 16 bits, both at the hardware's limits, embedding and output
    projection in 16 bits. A device without the arithmetic widens the weights."""
    shape, machine = model(model_name), device(device_name)
    arithmetic = method.arithmetic if method.arithmetic in machine.dense_flops else "bf16"
    read = float(kv_cache.read_bytes(shape, method.bits, embedding_bits=16))
    plain = latency.decode_parts(shape, context, machine, batch, "bf16").bound
    return float(plain / latency.decode_parts(shape, context, machine, batch, arithmetic, read).bound)


def undominated(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """Names for which no other point is at most as large in both numbers, and smaller in one."""
    return {
        name for name, (x, y) in points.items()
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())
    }  # fmt: skip


def labels(points: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Where names are written, (x, log10 y): in a column right of the points that stand together, none over another."""
    width = max(x for x, _ in points.values())
    low, high = decades(points)
    groups: list[list[str]] = []
    for name in sorted(points, key=lambda name: points[name][0]):
        if not groups or points[name][0] - points[groups[-1][-1]][0] > NAME * width:
            groups.append([])
        groups[-1].append(name)
    found: dict[str, tuple[float, float]] = {}
    for group in groups:
        x = max(points[name][0] for name in group) + 0.05 * width
        line = (high - low) * min(LINE, 1 / len(group))
        below, above = -math.inf, high + line / 2
        heights = []
        for name in sorted(group, key=lambda name: points[name][1]):
            below = max(math.log10(points[name][1]), below + line)
            heights.append((name, below))
        for name, height in reversed(heights):  # what was pushed out at the top comes down again
            above = min(height, above - line)
            found[name] = x, above
    return found


def decades(points: Mapping[str, tuple[float, float]]) -> tuple[int, int]:
    """Powers of ten below and above all y: where the vertical axis begins and ends."""
    low, high = (math.log10(of(y for _, y in points.values())) for of in (min, max))
    return math.floor(low), max(math.ceil(high), math.floor(low) + 1)


def draw(methods: Mapping[str, Method], model_name: str, device_name: str, batch: int, context: int) -> Shown:
    gains = {name: gain(one, model_name, device_name, batch, context) for name, one in methods.items()}
    panels = (
        ("bits a weight", {name: (one.bits, one.kl) for name, one in methods.items()}),
        ("time of a step over 16 bits, at best", {name: (1 / gains[name], one.kl) for name, one in methods.items()}),
    )
    fig = figure(8.4, 5.2)
    fig.set_layout_engine("none")
    said = []
    for left, (label, points) in zip((0.11, 0.60), panels, strict=True):
        ax, best = fig.add_axes((left, 0.11, 0.38, 0.80)), undominated(points)
        heights = {name: math.log10(y) for name, (_, y) in points.items()}
        for names, mark, colour in ((points.keys() - best, "x", GREY), (best, "o", BLUE)):
            ax.plot([points[n][0] for n in names], [heights[n] for n in names], mark, color=colour, markersize=5)
        places = labels(points)
        lines = [(points[name][0], heights[name], x, y) for name, (x, y) in places.items()]
        ax.plot([[x for x, _, _, _ in lines], [x for _, _, x, _ in lines]],
                [[y for _, y, _, _ in lines], [y for _, _, _, y in lines]], color=GREY, linewidth=0.4)  # fmt: skip
        for name, (x, y) in places.items():
            ax.text(x, y, f" {name}", fontsize=6.5, color=INK if name in best else GREY, va="center")
        ax.set_xlim(0, 1.35 * max(x for x, _ in points.values()))
        low, high = decades(points)
        ax.set_ylim(low, high)
        powers = range(low, high + 1)
        ax.set_yticks(powers, [f"{10.0**n:g}" for n in powers])  # a linear axis: ticks of a logarithmic one take long
        tidy(ax, label, "KL, nats" if left < 0.5 else "")
        said.append(f"by {label}: {', '.join(sorted(best, key=lambda name: points[name]))}")
    fastest = max(gains, key=lambda name: gains[name])
    text = (
        f"a step of {model_name} on one {device_name}, batch {batch}, context {context:,}: {fastest} is "
        f"{gains[fastest]:.2f} times as fast at best"
    )
    fig.text(0.01, 0.98, text, va="top", fontsize=8.5, color=INK)
    return show(fig, f"{text}. Not dominated {'; '.join(said)}.")


def size_speed_quality(methods: Mapping[str, Method]) -> View:
    """Choose a model, a device and a load; see which methods are worth having. ValueError for a KL that is not above 0,
    which a logarithmic axis cannot show."""
    for name, method in methods.items():
        if not (method.kl > 0 and method.bits > 0):
            raise ValueError(f"{name}: expected bits and KL above 0, got {method.bits} bits, {method.kl} nats")
    return View(
        {
            "model_name": menu(MODELS, MODELS[0], "Model"),
            "device_name": menu(DEVICES, "H100", "Device"),
            "batch": slider(BATCHES, 1, "Batch"),
            "context": slider(CONTEXTS, 2048, "Context"),
        },
        lambda **values: draw(methods, **values),
    )
