"""The error explorer: a tensor rounded to a format, scales shared by some neighbours, and an outlier if you like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from ipywidgets import Dropdown, FloatSlider

from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, RED, Shown, View, figure, show, tidy
from reference_impl.theory import quantization as q

GROUPS = {"the whole tensor": None, "128": 128, "64": 64, "32": 32, "16": 16}
SCALES: dict[str, q.ScaleFormat] = {"16 bits": "exact", "E8M0 (MX)": "e8m0", "E4M3 (NVFP4)": "e4m3"}
MX = ("int8", "e4m3", "e5m2", "e2m1")  # what the MX formats of FORMATS are made of
ROWS = 64  # of a tensor: enough for its error, and few enough to be drawn while a slider moves
OUTLIERS = {"none": 0, "10 times the rms": 10, "30 times the rms": 30, "100 times the rms": 100}


def with_outlier(x: q.Floats, times: float) -> q.Floats:
    """x [rows, columns]; in the first row one value becomes `times` the root mean square of all."""
    changed = np.array(x, float)
    if times:
        changed[0, 0] = times * np.sqrt(np.mean(changed**2))
    return changed


def draw(
    tensors: Mapping[str, q.Floats], tensor: str, format_name: str, group: str, scales: str, outlier: str, clip: float
) -> Shown:
    """Left: the first group, and where its format has values. Right: the error of every format, same groups.

    Power-of-two scales belong to the MX formats: with E8M0 the others are not shown.
    """
    x, size, kind = with_outlier(tensors[tensor], OUTLIERS[outlier]), GROUPS[group], SCALES[scales]
    if kind == "e8m0" and format_name not in MX:
        text = f"{format_name} has no {scales} scales: choose one of {', '.join(MX)}, or other scales."
        fig = figure(8.2, 1.0)
        fig.text(0.01, 0.5, text, va="center", fontsize=9, color=INK)
        return show(fig, text)
    compared = MX if kind == "e8m0" else tuple(q.FORMATS)
    found = {name: q.rounded(x, name, size, kind, clip) for name in compared}
    errors = {name: q.relative_error(x, y) for name, y in found.items()}
    mine = found[format_name]
    zeros = float(np.mean((mine == 0) & (x != 0)))
    bits = q.stored_bits(format_name, size, kind)
    text = f"{tensor} as {format_name}: {bits:g} bits a value, error {errors[format_name]:.2%}, {zeros:.1%} become 0"
    fig = figure(8.2, 3.2)
    fig.set_layout_engine("none")
    left, right = fig.add_axes((0.1, 0.17, 0.43, 0.66)), fig.add_axes((0.66, 0.17, 0.32, 0.66))
    _group(left, x, format_name, size, kind, clip)
    names = list(errors)[::-1]
    colours = [ORANGE if name == format_name else BLUE for name in names]
    place = [np.log10(1 + 100 * errors[name]) for name in names]  # a symlog axis takes longer to draw
    right.barh(names, place, color=colours)
    right.set_xticks(np.log10([1, 2, 11, 101]), ["0", "1", "10", "100"])
    for i, name in enumerate(names):
        right.text(place[i] + 0.02, i, f"{errors[name]:.2%}", va="center", fontsize=8, color=INK)
    right.set_xlim(0, 2.8)
    tidy(right, "error, % of the tensor's rms", "", f"{'MX' if kind == 'e8m0' else 'all'} formats, same groups")
    fig.text(0.01, 0.975, text, va="top", fontsize=9, color=INK)
    best = min(errors, key=errors.__getitem__)
    return show(fig, f"{text}. Groups: {group}, scales in {scales}, outlier: {outlier}. The least error has {best}.")


def _group(ax: Any, x: q.Floats, format_name: str, size: int | None, kind: q.ScaleFormat, clip: float) -> None:
    """The values that share the first scale as a histogram, and the values of the format at that scale as lines."""
    shown = x.ravel() if size is None else x.reshape(-1, size)[0]
    largest = np.abs(x).max() if size is None else np.abs(x.reshape(-1, size)).max(1)
    values = q.FORMATS[format_name]
    scale = float(np.ravel(q.scales_of(clip * np.atleast_1d(largest), values.reach, kind))[0])
    counts, _, _ = ax.hist(shown, bins=61, color=GREY, histtype="stepfilled")  # one path, not 61 bars
    top = float(counts.max())
    ax.vlines(values.values * scale, -0.16 * top, -0.03 * top, color=RED, linewidth=1)
    ax.set_ylim(-0.18 * top, 1.08 * top)
    tidy(ax, "value", "how many", "values of the first group; red: what the format has")


def rounding(
    tensors: Mapping[str, q.Floats], format_name: str = "int4", group: str = "the whole tensor", outlier: str = "none"
) -> View:
    """Choose a tensor, a format, the values that share a scale, the scale's own format, an outlier, and clipping.

    tensors: by name, arrays [rows, columns] whose columns 128 divides; of each the first ROWS rows are shown.
    """
    for name, x in tensors.items():
        if np.ndim(x) != 2 or x.shape[1] % 128:
            raise ValueError(f"{name}: expected [rows, columns] with a multiple of 128 columns, got {np.shape(x)}")
    wide, layout = {"description_width": "130px"}, {"width": "620px"}

    def menu(options: Any, value: str, label: str) -> Dropdown:
        return Dropdown(options=list(options), value=value, description=label, style=wide)

    return View(
        {
            "tensor": menu(tensors, next(iter(tensors)), "Tensor"),
            "format_name": menu(q.FORMATS, format_name, "Format"),
            "group": menu(GROUPS, group, "One scale for"),
            "scales": menu(SCALES, "16 bits", "Scales in"),
            "outlier": menu(OUTLIERS, outlier, "One outlier of"),
            "clip": FloatSlider(
                1.0, min=0.05, max=1, step=0.05, description="Scale made for this share of the largest",
                style={"description_width": "270px"}, layout=layout,
                continuous_update=False,
            ),
        },
        lambda **values: draw({name: x[:ROWS] for name, x in tensors.items()}, **values),
    )  # fmt: skip
