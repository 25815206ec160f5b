"""The tile stepper: what online softmax keeps of each query after every tile of keys, over steps that were recorded.

Drawing reads `TileStep`s of `theory.online_softmax` only; the scores of a real layer can be recorded as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ipywidgets import Dropdown, IntSlider
from matplotlib.patches import Rectangle

from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, RED, SKY, Shown, View, figure, show
from reference_impl.theory.online_softmax import TileStep

SHOWN = 4  # dimensions of the accumulator that are written out


def draw(steps: Sequence[TileStep], step: int = 0, query: int = 0) -> Shown:
    """Left: the scores seen so far, this tile framed. Right: m, l and acc of one query before and after this tile.

    step: index into steps; query: row of the scores.
    """
    if not steps:
        return show(figure(4, 0.6), "No tiles were recorded, so there is nothing to step through.")
    step, query = min(max(step, 0), len(steps) - 1), min(max(query, 0), len(steps[0].scores) - 1)
    now = steps[step]
    lines = _in_words(steps, step, query)
    fig = figure(8.4, 3.3)
    fig.set_layout_engine("none")
    scores = np.concatenate([s.scores for s in steps], axis=1)
    ax = fig.add_axes((0.06, 0.14, 0.40, 0.72))
    _draw_scores(ax, scores, now, query)
    bars = fig.add_axes((0.56, 0.14, 0.42, 0.24))
    _draw_mean(bars, now.mean[query], steps[-1].mean[query])
    fig.text(0.01, 0.97, lines[0], va="top", fontsize=9, color=INK)
    fig.text(0.52, 0.88, "\n".join(lines[1:]), va="top", fontsize=8.5, color=INK, family="monospace")
    return show(fig, " ".join(" ".join(line.split()) for line in lines))


def _draw_scores(ax: object, scores: np.ndarray, now: TileStep, query: int) -> None:
    """Light to dark by score; what is not seen yet is left white, what is masked is hatched."""
    n, keys = scores.shape
    seen = now.first + now.scores.shape[1]
    shown = np.where((np.arange(keys) < seen) & np.isfinite(scores), scores, np.nan)
    finite = scores[np.isfinite(scores)]
    ax.imshow(shown, cmap="cividis_r", aspect="auto", vmin=finite.min(), vmax=finite.max(), interpolation="none")
    masked = np.argwhere(np.isneginf(scores[:, :seen]))
    for row, key in masked:
        ax.add_patch(Rectangle((key - 0.5, row - 0.5), 1, 1, facecolor="#F4F4F4", edgecolor=GREY, hatch="///", lw=0))
    ax.add_patch(Rectangle((now.first - 0.5, -0.5), now.scores.shape[1], n, fill=False, edgecolor=RED, linewidth=2.2))
    ax.add_patch(Rectangle((-0.5, query - 0.5), seen, 1, fill=False, edgecolor=INK, linewidth=1.2, linestyle="--"))
    ax.set_xlim(-0.5, keys - 0.5)
    ax.set_xticks(range(0, keys, now.scores.shape[1]))
    ax.set_yticks(range(n))
    ax.tick_params(labelsize=7)
    ax.set_xlabel("key; frame: this tile; white: not loaded yet", fontsize=8)
    ax.set_ylabel("query; dashed: chosen", fontsize=8)


def _draw_mean(ax: object, mean: np.ndarray, final: np.ndarray) -> None:
    at = np.arange(len(final))
    shown = np.nan_to_num(mean)
    ax.bar(at - 0.2, shown, width=0.4, color=SKY, edgecolor=BLUE, label="acc / l now")
    ax.bar(at + 0.2, final, width=0.4, color="white", edgecolor=ORANGE, hatch="//", label="in the end")
    low, high = min(0.0, shown.min(), final.min()), max(0.0, shown.max(), final.max())
    room = 0.12 * (high - low or 1.0)
    ax.set_ylim(low - room, high + room)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_xticks(at)
    ax.tick_params(labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel("dimension; plain: acc / l now; hatched: in the end", fontsize=8)


def _in_words(steps: Sequence[TileStep], step: int, query: int) -> list[str]:
    """The update as text: what came in, and m, l, acc before and after."""
    now, before = steps[step], steps[step - 1] if step else None
    tile = now.scores[query]
    last = now.first + len(tile) - 1
    old_m, old_l = (before.largest[query], before.total[query]) if before else (-np.inf, 0.0)
    old_acc = before.acc[query] if before else np.zeros_like(now.acc[query])
    visible = tile[np.isfinite(tile)]
    came = f"largest score here {visible.max():.2f}" if len(visible) else "no key here is visible"
    grew = "m grows: l and acc shrink" if now.largest[query] > old_m > -np.inf else "m stays: nothing shrinks"
    if old_m == -np.inf:
        grew = "the first keys it sees" if len(visible) else "nothing seen yet"

    def first_of(values: np.ndarray) -> str:
        more = " …" if len(values) > SHOWN else ""
        return " ".join(f"{value:6.2f}" for value in values[:SHOWN]) + more

    return [
        f"Tile {step + 1} of {len(steps)}, keys {now.first} to {last}, query {query}: {came}; {grew}.",
        f"shrink = exp(m old - m new) = {now.shrink[query]:.4f}",
        f"m      {old_m:8.3f} -> {now.largest[query]:8.3f}",
        f"l      {old_l:8.3f} -> {now.total[query]:8.3f}",
        f"       {old_l:.3f} x {now.shrink[query]:.3f} + {now.weights[query].sum():.3f}",
        f"acc    {first_of(old_acc)}",
        f"    -> {first_of(now.acc[query])}",
        f"acc/l  {first_of(now.mean[query])}",
    ]


def tile_stepper(steps: Sequence[TileStep], step: int = 0, query: int = 0) -> View:
    """Step through the tiles; see one query's maximum, sum and accumulator before and after each."""
    wide = {"description_width": "90px"}
    last = max(len(steps) - 1, 0)
    rows = list(range(len(steps[0].scores))) if steps else [0]
    return View(
        {
            "step": IntSlider(min(step, last), 0, last, description="Tile", style=wide, layout={"width": "420px"}),
            "query": Dropdown(options=rows, value=min(query, rows[-1]), description="Query", style=wide),
        },
        lambda step, query: draw(steps, step, query),
    )
