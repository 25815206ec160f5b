"""The ranks of a traced run over time: when each computed a step, and when it waited for others or had no step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipywidgets import IntSlider
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, RED, SKY, Shown, View, figure, show, tidy
from reference_impl.interfaces import StepDone
from reference_impl.observe.trace import idle_share

# kind -> (colour, hatch): steps take turns with two colours, and each can be told from waiting without colour
LOOKS = {"computes, even step": (BLUE, ""), "computes, odd step": (SKY, ""), "waits for a rank": (ORANGE, "//")}


def boxes(steps: Sequence[StepDone]) -> dict[str, list[tuple[int, float, float]]]:
    """By kind (rank, start, end), in ms from the first start. Of a rank's time in a step the trace has how long it
    waited, not when: that is put at the beginning, where a stage waits for the one before it."""
    zero = min(time.started_at for step in steps for time in step.ranks)
    found: dict[str, list[tuple[int, float, float]]] = {kind: [] for kind in LOOKS}
    computes = [kind for kind in LOOKS if kind.startswith("computes")]
    for number, step in enumerate(steps):
        for rank, time in enumerate(step.ranks):
            start, end = ((at - zero) * 1e3 for at in (time.started_at, time.finished_at))
            begins = min(start + time.waited * 1e3, end)
            if begins > start:
                found["waits for a rank"].append((rank, start, begins))
            found[computes[number % 2]].append((rank, begins, end))
    return found


def draw(steps: Sequence[StepDone], step: int) -> Shown:
    """A bar per rank; the chosen step is framed and put into words. step counts from 1."""
    steps = [each for each in steps if each.ranks]
    if not steps:
        return show(figure(4, 1), "The trace holds no step of several ranks, so there is nothing to draw.")
    num_ranks, at = len(steps[0].ranks), min(max(step, 1), len(steps)) - 1
    found, words = boxes(steps), _in_words(steps, at)
    fig = figure(7.8, 1.2 + 0.36 * num_ranks)
    ax = fig.subplots()
    end = max(high for parts in found.values() for *_, high in parts)
    for rank in range(num_ranks):
        ax.add_patch(Rectangle((0, rank - 0.38), end, 0.76, facecolor="none", edgecolor=GREY, hatch="..", linewidth=0))
    for kind, parts in found.items():
        colour, hatch = LOOKS[kind]
        corners = [[(a, r - 0.38), (b, r - 0.38), (b, r + 0.38), (a, r + 0.38)] for r, a, b in parts]
        looks: dict[str, Any] = {"facecolor": colour, "hatch": hatch or None, "edgecolor": "white", "linewidth": 0.4}
        ax.add_collection(PolyCollection(corners, **looks), autolim=False)
    zero = min(time.started_at for each in steps for time in each.ranks)
    for rank, time in enumerate(steps[at].ranks):
        start, width = (time.started_at - zero) * 1e3, (time.finished_at - time.started_at) * 1e3
        frame = Rectangle((start, rank - 0.38), width, 0.76, facecolor="none", edgecolor=RED, linewidth=2, zorder=4)
        ax.add_patch(frame)
    ax.set_xlim(0, end)
    ax.set_ylim(num_ranks - 0.4, -0.6)
    ax.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    tidy(ax, "ms since the first step began; dotted: no step")
    ax.grid(False)
    ax.set_title(words, fontsize=8, loc="left")
    handles = [Rectangle((0, 0), 1, 1, facecolor=c, hatch=h, edgecolor=INK, linewidth=0.3) for c, h in LOOKS.values()]
    fig.legend(handles, list(LOOKS), loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return show(fig, f"{num_ranks} ranks over {len(steps)} steps, idle {idle_share(steps):.0%} of the time. {words}")


def _in_words(steps: Sequence[StepDone], at: int) -> str:
    step, zero = steps[at], min(time.started_at for each in steps for time in each.ranks)
    said = [
        f"rank {rank} from {(time.started_at - zero) * 1e3:.1f} to {(time.finished_at - zero) * 1e3:.1f} ms, "
        f"waited {time.waited * 1e3:.1f}"
        for rank, time in enumerate(step.ranks[:4])
    ]
    tokens = sum(row.num_tokens for row in step.rows)
    return f"Step {at + 1} of {len(steps)}, {tokens} tokens: {'; '.join(said)}."


def rank_timeline(steps: Sequence[StepDone]) -> View:
    """When each rank of a traced run computed, waited for another, or had no step."""
    last = max(1, sum(bool(step.ranks) for step in steps))
    slider = IntSlider(
        1, 1, last, description="Step", style={"description_width": "80px"}, layout={"width": "560px"},
        continuous_update=False,
    )  # fmt: skip
    return View({"step": slider}, lambda step: draw(steps, step))
