"""The request timeline: who was waiting, reading its prompt, decoding or preempted, drawn from an engine's trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ipywidgets import Dropdown, IntSlider

from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, RED, SKY, Shown, View, figure, show, tidy
from reference_impl.interfaces import Row
from reference_impl.trace import RequestArrived, RequestFinished, StepDone, Trace

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
    idle: holds its blocks, but the step's budget went to others.
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
    for step, (start, end) in life:
        if request_id in step.preempted:
            state = "preempted"
        row = _row(step, request_id)
        if row is None:
            continue
        if start > at:
            found.append(Segment(request_id, state, at, start))
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
    fig = figure(7.8, 1.9 + 0.32 * max(1, len(order)))
    top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=[max(2, len(order)), 2])
    # Edges tell neighbouring steps apart as long as they are wider than the edge. One collection per row and kind: a
    # patch per step would make a long trace slow to draw.
    edge = min(0.4, 30 / max(1, len(steps)))
    for row, request_id in enumerate(order):
        for kind, (colour, hatch) in LOOKS.items():
            spans = [(p.start, p.end - p.start) for p in parts if p.request_id == request_id and p.kind == kind]
            top.broken_barh(spans, (row - 0.36, 0.72), facecolor=colour, hatch=hatch, edgecolor="white", linewidth=edge)
    shown = [kind for kind in LOOKS if any(part.kind == kind for part in parts)]
    handles = [top.barh(0, 0, color=LOOKS[k][0], hatch=LOOKS[k][1], edgecolor="white") for k in shown]
    fig.legend(handles, shown, loc="outside upper center", ncols=len(shown) or 1, fontsize=8, frameon=False)
    tidy(top, ylabel="request")
    top.set_yticks(range(len(order)), order)
    top.set_ylim(len(order) - 0.4, -0.6)
    tidy(bottom, xlabel="step" if by == "step" else "seconds since the first arrival", ylabel="free blocks")
    text = "The trace holds no step."
    if steps:
        zero = _zero(trace)
        x = [i + 1.0 if by == "step" else s.finished_at - zero for i, s in enumerate(steps)]
        free = [s.num_free_blocks for s in steps]
        bottom.step(x, free, where="post", color=INK)
        bottom.set_ylim(0, max(free) * 1.15 + 1)
        chosen = steps[min(max(step, 1), len(steps)) - 1]
        at = steps.index(chosen)
        middle = at + 0.5 if by == "step" else (chosen.started_at + chosen.finished_at) / 2 - zero
        for ax in (top, bottom):
            ax.axvline(middle, color=RED, linewidth=1)
        rows = ", ".join(f"{r.request_id}: {r.num_tokens} from {r.start}" for r in chosen.rows)
        text = f"Step {at + 1} of {len(steps)}. Tokens computed: {rows}. "
        text += f"Preempted: {', '.join(chosen.preempted)}. " if chosen.preempted else ""
        text += f"After it: {chosen.num_free_blocks} blocks free, {chosen.num_waiting} requests waiting."
        bottom.set_title(_wrap(text), fontsize=8, loc="left")
    counts = ", ".join(f"{sum(p.kind == k for p in parts)} {k}" for k in shown)
    return show(fig, f"Timeline of {len(order)} requests over {len(steps)} steps; segments: {counts or 'none'}. {text}")


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
