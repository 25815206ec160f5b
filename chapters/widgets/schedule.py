"""The schedule of a trace: which requests compute, wait or are preempted, above the rows and tokens of every step."""

from __future__ import annotations

from typing import Any

from ipywidgets import IntSlider
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

from chapters.widgets.figure import BLUE, INK, RED, SKY, Shown, View, figure, show, tidy
from chapters.widgets.timeline import LOOKS, Segment, segments
from reference_impl.observe.trace import RequestArrived, StepDone, Trace


def step_tokens(trace: Trace) -> list[tuple[int, int]]:
    """Per step (tokens of rows that compute one, tokens of longer rows): decodes and chunks."""
    return [
        (sum(r.num_tokens for r in s.rows if r.num_tokens == 1), sum(r.num_tokens for r in s.rows if r.num_tokens > 1))
        for s in trace.steps()
    ]


def draw(trace: Trace, budget: int, seats: int, step: int) -> Shown:
    """Three panels on one axis of steps: requests, running and waiting, tokens under the budget. step counts from 1."""
    parts, steps = segments(trace, "step"), trace.steps()
    order = [e.request_id for e in trace.events if isinstance(e, RequestArrived)]
    kinds = [kind for kind in LOOKS if any(part.kind == kind for part in parts)]
    last = max(1, len(steps))
    words = _in_words(steps, min(max(step, 1), last), budget, seats)
    fig, axes = _axes(order)
    _requests(axes[0], parts, order, last)
    _counts(axes[1], steps, seats, last)
    _tokens(axes[2], step_tokens(trace), budget, last)
    for ax in axes:
        ax.axvline(min(max(step, 1), last) - 0.5, color=RED, linewidth=1)
        ax.set_xlim(0, last)
    axes[0].set_title(words, fontsize=8, loc="left")
    handles = [Rectangle((0, 0), 1, 1, facecolor=LOOKS[k][0], hatch=LOOKS[k][1], edgecolor="#DDDDDD") for k in kinds]
    fig.legend(handles, kinds, loc="upper center", ncols=len(kinds) or 1, fontsize=8, frameon=False)
    preempted = sum(len(s.preempted) for s in steps)
    tokens = sum(a + b for a, b in step_tokens(trace))
    return show(
        fig,
        f"Schedule of {len(order)} requests in {len(steps)} steps under a budget of {budget} tokens and {seats} seats: "
        f"{tokens} tokens computed, {preempted} preemptions. {words}",
    )


def _axes(order: list[str]) -> tuple[Any, list[Any]]:
    """Placed in inches: a layout engine would draw everything twice."""
    rows, low = 0.2 * max(3, len(order)), 0.75
    height = 0.5 + rows + 2 * (low + 0.2) + 0.5
    fig = figure(7.8, height)
    fig.set_layout_engine("none")
    left = 0.09 + 0.008 * max((len(name) for name in order), default=1)
    bottoms = (0.5 + 2 * (low + 0.2), 0.5 + low + 0.2, 0.5)
    heights = (rows, low, low)
    axes = [
        fig.add_axes((left, bottom / height, 0.985 - left, h / height))
        for bottom, h in zip(bottoms, heights, strict=True)
    ]
    for ax in axes[:2]:
        ax.tick_params(labelbottom=False)
    return fig, axes


def _requests(ax: Any, parts: list[Segment], order: list[str], last: int) -> None:
    row = {request_id: i for i, request_id in enumerate(order)}
    for kind, (colour, hatch) in LOOKS.items():
        boxes = []
        for p in parts:
            if p.kind == kind:
                low, high = row[p.request_id] - 0.36, row[p.request_id] + 0.36
                boxes.append([(p.start, low), (p.end, low), (p.end, high), (p.start, high)])
        if boxes:
            looks = {
                "facecolor": colour,
                "hatch": hatch or None,
                "edgecolor": "white",
                "linewidth": min(0.4, 30 / last),
            }
            ax.add_collection(PolyCollection(boxes, **looks), autolim=False)
    tidy(ax, ylabel="request")
    ax.set_yticks(range(len(order)), order, fontsize=7)
    ax.set_ylim(max(len(order), 1) - 0.4, -0.6)


def _counts(ax: Any, steps: list[StepDone], seats: int, last: int) -> None:
    x = range(len(steps))
    ax.step(x, [len(s.rows) for s in steps], where="post", color=BLUE, label="rows in the step")
    ax.step(x, [s.num_waiting for s in steps], where="post", color=INK, linestyle="--", label="waiting after it")
    ax.axhline(seats, color=RED, linewidth=0.8, linestyle=":")
    tidy(ax, ylabel="requests")
    most = max([seats if seats <= 64 else 1, *(max(len(s.rows), s.num_waiting) for s in steps)], default=1)
    ax.set_ylim(0, 1.2 * most + 0.5)
    ax.legend(fontsize=7, frameon=False, loc="upper right", ncols=2)


def _tokens(ax: Any, tokens: list[tuple[int, int]], budget: int, last: int) -> None:
    x = range(len(tokens))
    decodes, chunks = [a for a, _ in tokens], [b for _, b in tokens]
    ax.bar(x, decodes, 1.0, align="edge", color=SKY, label="decode")
    ax.bar(x, chunks, 1.0, align="edge", bottom=decodes, color=BLUE, label="chunks of prompts")
    ax.axhline(budget, color=RED, linewidth=0.8, linestyle=":")
    most = max((a + b for a, b in tokens), default=1)
    ax.set_ylim(0, 1.6 * min(budget, 4 * most) if most else 1)  # the legend stands above the budget's line
    tidy(ax, "step", "tokens")
    ax.legend(fontsize=7, frameon=False, loc="upper right", ncols=2)


def _in_words(steps: list[StepDone], step: int, budget: int, seats: int) -> str:
    if not steps:
        return "The trace holds no step."
    s = steps[step - 1]
    used = sum(r.num_tokens for r in s.rows)
    chunks = [f"{r.request_id} {r.num_tokens}" for r in s.rows if r.num_tokens > 1]
    text = f"Step {step} of {len(steps)}: {len(s.rows)} of {seats} seats, {used} of {budget} tokens"
    text += f" (chunks: {', '.join(chunks[:5])}{', ...' if len(chunks) > 5 else ''})" if chunks else " (decodes only)"
    text += f"; preempted {', '.join(s.preempted)}" if s.preempted else ""
    return f"{text}; {s.num_waiting} waiting, {s.num_free_blocks} blocks free."


def schedule(trace: Trace, budget: int, seats: int) -> View:
    """What a scheduler did, step by step. budget: max_num_batched_tokens, seats: max_num_seqs, both dotted lines."""
    if budget < 1 or seats < 1:
        raise ValueError(f"expected a budget and seats of at least 1, got {budget} and {seats}")
    return View(
        {
            "step": IntSlider(
                1, 1, max(1, len(trace.steps())), description="Step", style={"description_width": "80px"},
                layout={"width": "560px"}, continuous_update=False,
            )
        },
        lambda step: draw(trace, budget, seats, step),
    )  # fmt: skip
