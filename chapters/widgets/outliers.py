"""The outlier viewer: a layer's real activations by channel and by token, and what rounding them to INT8 does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from ipywidgets import Dropdown

from chapters.widgets.figure import BLUE, INK, ORANGE, RED, Shown, View, figure, show, tidy
from reference_impl.theory import quantization as q

SHARED = ("the whole tensor", "each token", "each channel")


def rounded_to_int8(x: q.Floats, shared: str) -> q.Floats:
    """x [tokens, channels] as INT8 stores it, one scale for what `shared` names."""
    if shared == "each channel":
        return np.ascontiguousarray(q.rounded(np.ascontiguousarray(x.T), "int8", len(x)).T)
    return q.rounded(x, "int8", x.shape[1] if shared == "each token" else None)


def draw(tensors: Mapping[str, q.Floats], tensor: str, shared: str) -> Shown:
    """Left: magnitudes, tokens by channels. Right: the largest of each channel and of each token over the rms."""
    x = np.asarray(tensors[tensor], float)
    size, rms = np.abs(x), float(np.sqrt(np.mean(x**2)))
    channels, tokens = np.sort(size.max(0))[::-1] / rms, np.sort(size.max(1))[::-1] / rms
    y = rounded_to_int8(x, shared)
    zeros = float(np.mean((y == 0) & (x != 0)))
    place = np.unravel_index(size.argmax(), size.shape)
    text = (
        f"{tensor}: the largest is {channels[0]:.0f} times the rms (token {place[0]}, channel {place[1]});\n"
        f"INT8 with a scale for {shared}: error {q.relative_error(x, y):.2%}, {zeros:.1%} become 0"
    )
    fig = figure(8.2, 3.2)
    fig.set_layout_engine("none")
    left, right = fig.add_axes((0.07, 0.18, 0.42, 0.60)), fig.add_axes((0.60, 0.18, 0.38, 0.60))
    left.imshow(np.log10(size / rms + 0.03), aspect="auto", cmap="cividis", interpolation="nearest")
    tidy(left, "channel", "token", "magnitude, logarithmic: yellow is large")
    left.grid(False)
    for values, colour, style, name in ((channels, BLUE, "-", "channels"), (tokens, ORANGE, "--", "tokens")):
        right.plot(np.linspace(0, 100, len(values)), values, style, color=colour, label=name)
    right.axhline(channels[0] / 254, color=RED, linestyle=":", label="half a step, one scale for all")
    right.set_yscale("log")
    right.legend(fontsize=8, frameon=False)
    tidy(right, "%, the largest first", "largest magnitude / rms")
    fig.text(0.01, 0.975, text, va="top", fontsize=8.5, color=INK)
    return show(
        fig, f"{text.replace(chr(10), ' ')}. The median channel's largest is {np.median(channels):.1f} times the rms."
    )


def outliers(tensors: Mapping[str, q.Floats]) -> View:
    """Choose a layer's inputs, keys or values, and what shares a scale. tensors: by name, arrays [tokens, channels]."""
    for name, x in tensors.items():
        if np.ndim(x) != 2 or not np.any(x):
            raise ValueError(f"{name}: expected [tokens, channels] that are not all 0, got {np.shape(x)}")
    wide = {"description_width": "130px"}

    def menu(options: list[str], label: str) -> Dropdown:
        return Dropdown(options=options, value=options[0], description=label, style=wide)

    return View(
        {"tensor": menu(list(tensors), "Tensor"), "shared": menu(list(SHARED), "One scale for")},
        lambda **values: draw(tensors, **values),
    )
