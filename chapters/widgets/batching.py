"""Seats over steps: the same requests under one scheduler and another, drawn from the traces of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ipywidgets import Dropdown, IntSlider
from matplotlib.collections import PolyCollection

from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, YELLOW, Shown, View, figure, show
from reference_impl.observe.trace import RequestArrived, RequestFinished, Trace

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW)


@dataclass(frozen=True)
class Stay:
    """A request on a seat from step `start` up to, not including, `end`; the steps from `ended` on were in vain."""

    request_id: str
    seat: int
    start: int
    ended: int
    end: int


def stays(trace: Trace) -> list[Stay]:
    """Which request held which seat, and when. A request takes the lowest free seat with its first row, and leaves it
    when it has finished or is preempted; a row that samples nothing although its tokens are computed is in vain (a
    static batch's padding)."""
    steps = trace.steps()
    finished = {e.request_id: e.time for e in trace.events if isinstance(e, RequestFinished)}
    seated: dict[str, tuple[int, int]] = {}  # request -> seat, first step
    computed: dict[str, int] = {}
    useful: dict[str, int] = {}  # request -> one past its last useful step
    found = []

    def leave(request_id: str, step: int) -> None:
        seat, start = seated.pop(request_id)
        found.append(Stay(request_id, seat, start, useful.get(request_id, step), step))

    for i, step in enumerate(steps):
        for request_id in [r for r in seated if r in step.preempted or finished.get(r, 1e99) <= step.started_at]:
            leave(request_id, i)
        for row in step.rows:
            if row.request_id not in seated:
                taken = {seat for seat, _ in seated.values()}
                seated[row.request_id] = (next(s for s in range(len(taken) + 1) if s not in taken), i)
            if row.start + row.num_tokens > computed.get(row.request_id, 0):
                useful[row.request_id] = i + 1
                computed[row.request_id] = row.start + row.num_tokens
        for request_id in step.preempted:
            computed.pop(request_id, None)
    for request_id in list(seated):
        leave(request_id, len(steps))
    return sorted(found, key=lambda s: (s.start, s.seat))


def draw(runs: Mapping[str, Mapping[str, Trace]], load: str, step: int) -> Shown:
    """A panel per scheduler, all on one axis of steps; the chosen step is marked and counted. step counts from 1."""
    traces = runs[load]
    seats = {name: stays(trace) for name, trace in traces.items()}
    length = max((len(trace.steps()) for trace in traces.values()), default=1) or 1
    rows = {name: max((s.seat for s in found), default=0) + 1 for name, found in seats.items()}
    title, gap, axis = 0.3, 0.1, 0.5  # inches above a panel, below it, and below the last for numbers and label
    height = sum(0.2 * n + title + gap for n in rows.values()) - gap + axis
    fig = figure(7.8, height)
    fig.set_layout_engine("none")
    top, lines = height, []
    for name, trace in traces.items():
        panel = 0.2 * rows[name]
        top -= title
        ax = fig.add_axes((0.09, (top - panel) / height, 0.89, panel / height))
        lines.append(_panel(ax, name, trace, seats[name], rows[name], min(step, length), length))
        top -= panel + gap
    ax.tick_params(labelbottom=True)
    ax.set_xlabel("step", fontsize=9)
    return show(fig, f"Load: {load}. " + " ".join(lines))


def _panel(ax: Any, name: str, trace: Trace, found: list[Stay], rows: int, step: int, length: int) -> str:
    order = [e.request_id for e in trace.events if isinstance(e, RequestArrived)]
    colour = {request_id: COLOURS[i % len(COLOURS)] for i, request_id in enumerate(order)}
    for kind, looks in (("ended", {"linewidth": 0.6}), ("end", {"hatch": "////", "edgecolor": GREY, "linewidth": 0.4})):
        spans = [(s.start, s.ended, s) if kind == "ended" else (s.ended, s.end, s) for s in found]
        spans = [(a, b, s) for a, b, s in spans if b > a]
        boxes = [[(a, s.seat - 0.42), (b, s.seat - 0.42), (b, s.seat + 0.42), (a, s.seat + 0.42)] for a, b, s in spans]
        faces = [colour[s.request_id] if kind == "ended" else "white" for _, _, s in spans]
        if boxes:
            ax.add_collection(PolyCollection(boxes, facecolor=faces, **({"edgecolor": "white"} | looks)), autolim=False)
    for s in found:
        if s.ended - s.start >= length / 18:
            ax.text((s.start + s.ended) / 2, s.seat, s.request_id, fontsize=6.5, ha="center", va="center", color=INK,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip
    useful, held = sum(s.ended - s.start for s in found), sum(s.end - s.start for s in found)
    steps, at = len(trace.steps()), step - 1
    busy = [s for s in found if s.start <= at < s.ended]
    vain = [s for s in found if s.ended <= at < s.end]
    waiting = trace.steps()[at].num_waiting if at < steps else 0
    ax.axvline(at + 0.5, color=RED, linewidth=1)
    ax.set_xlim(0, length)
    ax.set_ylim(rows - 0.4, -0.6)
    ax.set_yticks(range(rows), [f"seat {i + 1}" for i in range(rows)], fontsize=6)
    ax.tick_params(labelbottom=False, labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)
    words = f"{name}: {steps} steps, {useful / (rows * steps) if steps else 0:.0%} of the seats useful"
    now = f"step {step}: {len(busy)} useful, {len(vain)} in vain, {waiting} waiting" if at < steps else "has ended"
    ax.set_title(f"{words}; {now}", fontsize=8, loc="left")
    return f"{words}, {held - useful} seat-steps in vain; {now}."


def batching(runs: Mapping[str, Mapping[str, Trace]]) -> View:
    """Compare schedulers. runs: for each load, the trace of each scheduler that served it. Hatched: rows in vain."""
    if not runs or not all(runs.values()):
        raise ValueError("runs: expected at least one load with at least one scheduler's trace, got none")
    first = next(iter(runs))
    last = max(len(trace.steps()) for traces in runs.values() for trace in traces.values())
    wide = {"description_width": "80px"}
    return View(
        {
            "load": Dropdown(options=list(runs), value=first, description="Lengths", style=wide),
            "step": IntSlider(
                1, 1, max(1, last), description="Step", style=wide, layout={"width": "560px"}, continuous_update=False
            ),
        },
        lambda load, step: draw(runs, load, step),
    )
