"""The request timeline: when each request waited, was prefilled, decoded or was preempted, from a trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ipywidgets import Dropdown, IntSlider
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, RED, SKY, Shown, View, figure, show, tidy
from reference_impl.interfaces import Row
from reference_impl.observe.trace import RequestArrived, RequestFinished, StepDone, Trace

# kind -> (colour, hatch): each can be told from the others without colour
LOOKS = {
    "waiting": (GREY, ".."),
    "prefill": (BLUE, ""),
    "decode": (SKY, ""),
    "preempted": (RED, "xx"),
    "recompute": (ORANGE, "//"),
    "idle": ("#FFFFFF", ""),
}


@dataclass(frozen=True)
class Segment:
    """What one request did between two moments. start and end: seconds, or step numbers (a step is [n, n + 1))."""

    request_id: str
    kind: str  # waiting | prefill | decode | preempted | recompute | idle
    start: float
    end: float
    num_tokens: int = 0


def segments(trace: Trace, by: str = "step") -> list[Segment]:
    """The trace as segments. by: "step" (every step as wide as the next) or "seconds" (from the first arrival).

    prefill: tokens of the prompt, the first time. recompute: tokens that were computed before a preemption.
    idle: holds its blocks, but the step's budget went to other requests.
    """
    if by not in ("step", "seconds"):
        raise ValueError(f'by: expected "step" or "seconds", got {by!r}')
    steps = trace.steps()
    arrivals = {e.request_id: e for e in trace.events if isinstance(e, RequestArrived)}
    if not steps:
        return []
    finished = {e.request_id for e in trace.events if isinstance(e, RequestFinished)}
    zero = _zero(trace)
    spans = [
        (float(i), i + 1.0) if by == "step" else (s.started_at - zero, s.finished_at - zero)
        for i, s in enumerate(steps)
    ]
    life = list(zip(steps, spans, strict=True))
    found: list[Segment] = []
    for request_id, arrived in arrivals.items():
        start = float(sum(s.started_at < arrived.time for s in steps)) if by == "step" else arrived.time - zero
        mine = _of_one(request_id, arrived.num_prompt_tokens, start, life)
        if request_id not in finished:  # still waiting, or between two of its steps, when the trace ends
            at = mine[-1].end if mine else start
            gone = any(request_id in s.preempted for s, span in life if span[0] >= at)
            state = "preempted" if gone else "idle" if mine else "waiting"
            mine += [Segment(request_id, state, at, spans[-1][1])] if spans[-1][1] > at else []
        found += mine
    return found


def _zero(trace: Trace) -> float:
    """The first moment of the trace, in seconds on the engine's clock."""
    arrivals = [e.time for e in trace.events if isinstance(e, RequestArrived)]
    return min([*arrivals, trace.steps()[0].started_at])


def _row(step: StepDone, request_id: str) -> Row | None:
    return next((row for row in step.rows if row.request_id == request_id), None)


def _of_one(
    request_id: str, num_prompt: int, at: float, life: Iterable[tuple[StepDone, tuple[float, float]]]
) -> list[Segment]:
    found: list[Segment] = []
    state, seen = "waiting", 0  # seen: how many of its tokens were computed at least once
    passed_over = False
    for step, (start, end) in life:
        if request_id in step.preempted:
            state = "preempted"
        row = _row(step, request_id)
        if row is None:
            passed_over = True
            continue
        # Between two steps in a row lies a little host time: no request was passed over, so that is not idle.
        if start > at and (state != "idle" or passed_over):
            found.append(Segment(request_id, state, at, start))
        passed_over = False
        fresh = "prefill" if row.start < num_prompt else "decode"
        kind = "recompute" if row.start < seen else fresh
        found.append(Segment(request_id, kind, start, end, row.num_tokens))
        seen = max(seen, row.start + row.num_tokens)
        state, at = "idle", end
    return found


def draw(trace: Trace, by: str = "step", step: int = 1) -> Shown:
    """A bar per request above the free blocks; the chosen step is marked and put into words. step counts from 1."""
    parts, steps = segments(trace, by), trace.steps()
    order = [e.request_id for e in trace.events if isinstance(e, RequestArrived)]
    shown = [kind for kind in LOOKS if any(part.kind == kind for part in parts)]
    at, text = _in_words(steps, step)
    words = _wrap(text)
    fig, top, bottom = _axes(order, words.count("\n"))
    _bars(top, parts, order, min(0.4, 30 / max(1, len(steps))))
    handles = [Rectangle((0, 0), 1, 1, facecolor=LOOKS[k][0], hatch=LOOKS[k][1], edgecolor="#DDDDDD") for k in shown]
    fig.legend(handles, shown, loc="upper center", ncols=len(shown) or 1, fontsize=8, frameon=False)
    tidy(top, ylabel="request")
    top.set_yticks(range(len(order)), order)
    top.set_ylim(len(order) - 0.4, -0.6)
    top.tick_params(labelbottom=False)
    tidy(bottom, xlabel="step" if by == "step" else "seconds since the first arrival", ylabel="free blocks")
    if steps:
        zero = _zero(trace)
        x = [i + 1.0 if by == "step" else s.finished_at - zero for i, s in enumerate(steps)]
        free = [s.num_free_blocks for s in steps]
        bottom.step(x, free, where="post", color=INK)
        bottom.set_ylim(0, max(free) * 1.15 + 1)
        chosen = steps[at]
        middle = at + 0.5 if by == "step" else (chosen.started_at + chosen.finished_at) / 2 - zero
        for ax in (top, bottom):
            ax.axvline(middle, color=RED, linewidth=1)
            ax.set_xlim(0, 1.02 * x[-1])
        bottom.set_title(words, fontsize=8, loc="left")
    counts = ", ".join(f"{sum(p.kind == k for p in parts)} {k}" for k in shown)
    return show(fig, f"Timeline of {len(order)} requests over {len(steps)} steps; segments: {counts or 'none'}. {text}")


def _axes(order: list[str], more_lines: int) -> tuple[Figure, Any, Any]:
    """Figure and both axes, placed in inches: a layout engine would draw everything twice."""
    width, rows, words = 7.8, 0.32 * max(2, len(order)), 0.32 + 0.15 * more_lines
    height = 0.3 + rows + words + 0.6 + 0.5  # legend, bars, the step in words, free blocks, axis
    left = 0.75 + 0.07 * max((len(name) for name in order), default=1)
    fig = figure(width, height)
    fig.set_layout_engine("none")
    span = (left / width, 0.98 - left / width)
    bottom = fig.add_axes((span[0], 0.5 / height, span[1], 0.6 / height))
    top = fig.add_axes((span[0], (1.1 + words) / height, span[1], rows / height))
    return fig, top, bottom


def _bars(ax: Any, parts: list[Segment], order: list[str], edge: float) -> None:
    """One collection per kind for all requests: a patch per step would make a long trace slow to draw.

    edge: tells neighbouring steps apart as long as they are wider than it.
    """
    row = {request_id: i for i, request_id in enumerate(order)}
    for kind, (colour, hatch) in LOOKS.items():
        boxes = []
        for p in parts:
            if p.kind == kind:
                low, high = row[p.request_id] - 0.36, row[p.request_id] + 0.36
                boxes.append([(p.start, low), (p.end, low), (p.end, high), (p.start, high)])
        if boxes:
            looks = {"facecolor": colour, "hatch": hatch or None, "edgecolor": "white", "linewidth": edge}
            ax.add_collection(PolyCollection(boxes, **looks), autolim=False)


def _in_words(steps: list[StepDone], step: int) -> tuple[int, str]:
    """(index of the chosen step, what it did). step counts from 1 and is clipped to the steps there are."""
    if not steps:
        return 0, "The trace holds no step."
    at = min(max(step, 1), len(steps)) - 1
    chosen = steps[at]
    rows = ", ".join(f"{r.request_id}: {r.num_tokens} from {r.start}" for r in chosen.rows)
    text = f"Step {at + 1} of {len(steps)}. Tokens computed: {rows}. "
    text += f"Preempted: {', '.join(chosen.preempted)}. " if chosen.preempted else ""
    return at, text + f"After it: {chosen.num_free_blocks} blocks free, {chosen.num_waiting} requests waiting."


def _wrap(text: str, width: int = 120) -> str:
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) + 1 > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def timeline(trace: Trace, by: str = "step") -> View:
    """The life of every request of a trace: waiting, prefill, decode, preempted, recompute, and the free blocks."""
    last = max(1, len(trace.steps()))
    wide = {"description_width": "80px"}
    return View(
        {
            "by": Dropdown(options=["step", "seconds"], value=by, description="Axis", style=wide),
            "step": IntSlider(
                1, 1, last, description="Step", style=wide, layout={"width": "560px"}, continuous_update=False
            ),
        },
        lambda by, step: draw(trace, by, step),
    )
