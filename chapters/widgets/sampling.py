"""Temperature, top-k, top-p and one uniform number over a model's real distribution: what stays and what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from ipywidgets import FloatSlider, IntSlider

from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, Shown, View, figure, show, tidy

Distribution = Callable[[float, int, float], np.ndarray]  # (temperature, top_k, top_p) -> probabilities [vocab_size]


def draw(
    distribution: Distribution, names: Sequence[str], shown: int, temperature: float, top_k: int, top_p: float, u: float
) -> Shown:
    """Bars of the most likely tokens, before the filters and after; the token that u gives is marked."""
    plain, kept = distribution(temperature, 0, 1.0), distribution(temperature, top_k, top_p)
    cumulative = np.cumsum(kept)
    drawn = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    order = np.argsort(-plain, kind="stable")[:shown]
    if drawn not in order:
        order = np.append(order[:-1], drawn)
    place = np.arange(len(order))
    fig = figure(7.8, 3.3)
    fig.set_layout_engine("none")  # fixed margins: a layout engine draws everything twice
    ax = fig.add_axes((0.09, 0.28, 0.89, 0.62))
    ax.bar(place - 0.2, plain[order], 0.4, color=GREY, label="after temperature")
    colours = [ORANGE if i == drawn else BLUE for i in order]
    ax.bar(place + 0.2, kept[order], 0.4, color=colours, hatch="//", edgecolor="white", label="after top-k and top-p")
    ax.set_xticks(place, [repr(names[i]) for i in order], rotation=60, ha="right", fontsize=7)
    at = int(np.flatnonzero(order == drawn)[0]) + 0.2
    ax.plot(at, kept[drawn] + 0.04 * kept.max(), marker="v", linestyle="", color=INK, label="drawn")
    ax.set_ylim(0, 1.12 * float(kept.max()))
    tidy(ax, ylabel="probability")
    ax.legend(fontsize=8, frameon=False)
    count = int((kept > 0).sum())
    cut = 1 - float(plain[kept > 0].sum())
    text = (
        f"{count:,} of {len(kept):,} tokens stay; {cut:.1%} of the probability was cut off; "
        f"u = {u:.2f} draws {names[drawn]!r} ({kept[drawn]:.1%})"
    )
    ax.set_title(text, fontsize=9, loc="left", color=INK)
    return show(fig, f"Temperature {temperature:g}, top-k {top_k or 'off'}, top-p {top_p:g}. {text}.")


def sampling(distribution: Distribution, names: Sequence[str], shown: int = 16) -> View:
    """Move the filters and the uniform number. distribution: the sampler's own; names: the text of each token id."""
    wide, layout = {"description_width": "110px"}, {"width": "480px"}

    def slider(value: float, low: float, high: float, step: float, label: str) -> FloatSlider:
        return FloatSlider(
            value, min=low, max=high, step=step, description=label, style=wide, layout=layout, continuous_update=False
        )

    return View(
        {
            "temperature": slider(1.0, 0.0, 2.0, 0.1, "Temperature"),
            "top_k": IntSlider(
                0, 0, 64, description="Top-k (0: off)", style=wide, layout=layout, continuous_update=False
            ),
            "top_p": slider(0.9, 0.05, 1.0, 0.05, "Top-p"),
            "u": slider(0.5, 0.0, 0.99, 0.01, "u"),
        },
        lambda temperature, top_k, top_p, u: draw(distribution, names, shown, temperature, top_k, top_p, u),
    )
