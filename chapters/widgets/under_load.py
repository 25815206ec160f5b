"""Waiting under load: the formulas of queueing theory (`theory.queueing`) against points of a simulated engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from ipywidgets import Dropdown, SelectionSlider
from matplotlib.ticker import MaxNLocator, NullLocator

from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, RED, Shown, View, figure, show, tidy
from reference_impl.theory import queueing
from reference_impl.theory.units import format_seconds

MEASURES = {"wait for the first step": "wait", "time to first token": "ttft", "time per output token": "tpot"}
STATISTICS = ("mean", "p50", "p90", "p99")
EXPONENTIAL = "if waits are exponential"
FLOOR = 1e-4  # seconds; on a logarithmic axis no wait at all stands here
SHARES = np.linspace(0.02, 0.985, 60)


class Point(Protocol):
    """At one load. wait, ttft, tpot: seconds by statistic, of all runs, and the least and greatest of the runs."""

    load: float
    rate: float
    running: float
    preempted: int


class Line(Protocol):
    """One setting. capacity: requests per second at saturation; servers: how many are served together there; scv: of
    the seconds in service; cv: of the gaps between arrivals."""

    capacity: float
    servers: float
    scv: float
    cv: float

    @property
    def points(self) -> Sequence[Point]: ...


Key = tuple[str, str, str]  # seats, arrivals, outputs
ShortRun = Callable[[str, str, str, float, int], Any]  # a Key, requests per second, seed -> queue, ttft, tpot: arrays


def formula(line: Line, servers: int, share: float, statistic: str) -> float:
    """Seconds of waiting at `share` of the capacity, for `servers` servers that have this capacity together.

    Queueing theory gives the mean. A percentile assumes that those who wait do so exponentially long, which is exact
    for exponential service and a third off at low load for others.
    """
    rate, service = share * line.capacity, servers / line.capacity
    mean = queueing.ggc_wait_seconds(rate, service, servers, line.cv**2, line.scv)
    if statistic == "mean":
        return mean
    probability = queueing.waiting_probability(rate, service, servers)
    return queueing.wait_percentile(mean, probability, float(statistic[1:]))


def draw(
    lines: Mapping[Key, Line], short_run: ShortRun, alone: Mapping[str, float],
    seats: str, arrivals: str, outputs: str, measure: str, statistic: str, load: float, seed: int,
) -> Shown:  # fmt: skip
    """Left: seconds over the share of the capacity. Right: how many are served together. alone: of an idle engine."""
    line, of = lines[seats, arrivals, outputs], MEASURES[measure]
    servers = max(1, round(line.servers))
    curves = _curves(line, servers, of, statistic, alone[of])
    assumed = statistic != "mean" and of != "tpot"  # theory has the mean only
    chosen = next(p for p in line.points if p.load == load)
    value, least, greatest = getattr(chosen, of)[statistic]
    short = _short(short_run(seats, arrivals, outputs, chosen.rate, seed), of, statistic) if seed else None

    fig = figure(7.8, 3.9)
    fig.set_layout_engine("none")  # placed by hand: a layout engine draws everything twice
    left, right = fig.add_axes((0.09, 0.13, 0.53, 0.6)), fig.add_axes((0.71, 0.13, 0.26, 0.6))
    for (name, at), style, colour in zip(curves.items(), ("--", ":"), (INK, BLUE), strict=False):
        label = f"{name}, {EXPONENTIAL}" if assumed else name
        left.plot(100 * SHARES, np.maximum([at(share) for share in SHARES], FLOOR), style, color=colour, label=label)
    seen = np.array([getattr(p, of)[statistic] for p in line.points]).clip(FLOOR)  # [points, (all, least, greatest)]
    loads = [100 * p.load for p in line.points]
    left.vlines(loads, seen[:, 1], seen[:, 2], color=ORANGE, linewidth=3, alpha=0.6)
    left.plot(loads, seen[:, 0], "o", color=ORANGE, markersize=5, label="engine, simulated")
    if short is not None:
        left.plot(100 * load, max(short, FLOOR), "X", color=RED, markersize=9, label="a run of 100 requests")
    left.axvline(100 * load, color=GREY, linewidth=1, zorder=0)
    left.set_yscale("log")
    highest = max(seen.max(), short or 0, *(at(load) for at in curves.values()))
    left.set_ylim(0.7 * min(seen.min(), alone[of] or highest), 6 * highest)
    left.yaxis.set_minor_locator(NullLocator())  # half of the time went into ticks
    tidy(left, "load, % of the capacity", "seconds")
    left.legend(fontsize=7, frameon=False, loc="upper left")
    right.plot(loads, [p.running for p in line.points], "o-", color=ORANGE, markersize=5)
    right.axhline(line.servers, color=GREY, linestyle=":")
    right.text(2, line.servers, f"full: {line.servers:.0f}", fontsize=7, va="bottom")
    right.set_ylim(0, 1.2 * line.servers)
    right.yaxis.set_major_locator(MaxNLocator(4))
    tidy(right, "load, %", "served together")
    for ax, marks in ((left, (0, 25, 50, 75, 100)), (right, (0, 50, 100))):
        ax.set_xlim(0, 100)
        ax.set_xticks(marks)
        ax.tick_params(labelsize=8)
    ratios = [f"{name} {_time(at(load))}{_ratio(at(load), value)}" for name, at in curves.items()]
    texts = [
        f"{seats}; {arrivals}; {outputs}. Capacity {line.capacity:.2f} requests/s, then {line.servers:.0f} together",
        f"{statistic} of the {measure} at {load:.0%}, {chosen.rate:.2f} requests/s: engine {_time(value)} "
        f"(runs: {_time(least)} to {_time(greatest)})",
        f"formula{f', {EXPONENTIAL}' if assumed else ''}: {'; '.join(ratios)}",
        f"preempted {chosen.preempted} times"
        + ("" if short is None else f"; a run of 100 requests says {_time(short)}"),
    ]
    fig.text(0.01, 0.985, "\n".join(texts), fontsize=8.5, va="top")
    return show(fig, ". ".join(texts) + ". Simulated on an H100 by formula.")


def _curves(
    line: Line, servers: int, of: str, statistic: str, alone: float
) -> dict[str, Callable[[float], float]]:  # fmt: skip
    """Formulas by name: seconds over the share of the capacity."""
    if of == "tpot":
        return {"a server as fast as when idle": lambda share: alone}

    def waiting(count: int) -> Callable[[float], float]:
        return lambda share: alone + formula(line, count, share, statistic)

    one = {"one server of this capacity" if servers > 1 else "one server": waiting(1)}
    return one if servers == 1 else one | {f"{servers} servers": waiting(servers)}


def _short(result: Any, of: str, statistic: str) -> float:
    values = np.asarray(getattr(result, "queue" if of == "wait" else of))
    values = values[~np.isnan(values)]
    return float(values.mean() if statistic == "mean" else np.percentile(values, float(statistic[1:])))


def _time(seconds: float) -> str:
    return "none" if seconds < FLOOR else format_seconds(seconds)


def _ratio(formula: float, engine: float) -> str:
    return f", {formula / engine:.2g}x the engine's" if min(formula, engine) >= FLOOR else ""


def under_load(lines: Mapping[Key, Line], short_run: ShortRun, alone: Mapping[str, float]) -> View:
    """Choose seats, arrivals, outputs and a load; see how long requests wait, and which formula is near.

    lines, short_run, alone: those of `reference_impl.bench.under_load`. The short run is made while you watch.
    """
    wide, layout = {"description_width": "120px"}, {"width": "480px"}

    def menu(options: Sequence[str], value: str, label: str) -> Dropdown:
        return Dropdown(options=list(options), value=value, description=label, style=wide, layout=layout)

    def slider(options: Sequence[tuple[str, Any]], value: Any, label: str) -> SelectionSlider:
        return SelectionSlider(
            options=options, value=value, description=label, style=wide, layout=layout, continuous_update=False
        )

    seats, arrivals, outputs = (list(dict.fromkeys(key[i] for key in lines)) for i in range(3))
    loads = [p.load for p in next(iter(lines.values())).points]
    return View(
        {
            "seats": menu(seats, seats[0], "Served together"),
            "arrivals": menu(arrivals, arrivals[0], "Arrivals"),
            "outputs": menu(outputs, outputs[0], "Outputs"),
            "measure": menu(list(MEASURES), next(iter(MEASURES)), "Measure"),
            "statistic": menu(STATISTICS, "p99", "Statistic"),
            "load": slider([(f"{p:.0%}", p) for p in loads], loads[-1], "Load"),
            "seed": slider([("none", 0), *((f"seed {n}", n) for n in range(1, 6))], 0, "A short run"),
        },
        lambda **chosen: draw(lines, short_run, alone, **chosen),
    )
