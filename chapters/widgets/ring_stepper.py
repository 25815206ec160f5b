"""The ring stepper: an all-reduce message by message, over `theory.schedules`: a ring, and what competes with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ipywidgets import Dropdown, IntSlider

from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, Shown, View, figure, show
from reference_impl.theory.schedules import ALL_REDUCES, Step, schedule

SIZES = tuple(range(2, 9))
PART = 1024  # bytes of one part of n
MOST_STEPS = 2 * (max(SIZES) - 1)


def summands(n: int, done: int) -> np.ndarray:
    """[rank, part]: of how many ranks a ring's parts hold the sum, after so many of its steps."""
    held = np.ones((n, n), int)
    for step in range(done):
        before = held.copy()
        for rank in range(n):
            part = (rank - step) % n
            arrived = before[rank, part]
            held[(rank + 1) % n, part] = before[(rank + 1) % n, part] + arrived if step < n - 1 else arrived
    return held


def draw(name: str, n: int, step: int) -> Shown:
    """Left: ranks in a circle, and the messages of the step. Right: for a ring, of how many ranks each part holds the
    sum; for others the bytes that each rank has sent."""
    per_node = max(1, n // 2) if name == "hierarchical" else n
    try:
        steps = schedule(name, PART * n, n, per_node)
    except ValueError as error:
        fig = figure(8.4, 0.7)
        fig.text(0.01, 0.85, str(error), va="top", fontsize=9, color=INK)
        return show(fig, str(error))
    step = min(step, len(steps))
    text = _in_words(name, n, per_node, steps, step)
    fig = figure(8.4, 3.5)
    fig.set_layout_engine("none")
    _circle(fig.add_axes((0.0, 0.0, 0.42, 0.80)), n, per_node, steps[step - 1] if step else None)
    right = fig.add_axes((0.50, 0.15, 0.47, 0.56))
    if name == "ring":
        _parts(right, summands(n, step))
    else:
        _sent(right, n, steps[:step])
    fig.text(0.01, 0.98, text, va="top", fontsize=9, color=INK)
    return show(fig, " ".join(text.split()))


def _in_words(name: str, n: int, per_node: int, steps: Sequence[Step], step: int) -> str:
    where = f", {n // per_node} nodes of {per_node}" if name == "hierarchical" else ""
    head = f"{name}, {n} ranks{where}: {len(steps)} steps for {n} parts of {PART:,} bytes."
    sent = np.zeros(n, int)
    for each in steps[:step]:
        np.add.at(sent, each.source, each.num_bytes)
    total = f"Sent so far by the busiest rank: {int(sent.max()):,} bytes."
    if not step:
        return f"{head}\nStep 0: each rank has its own numbers; nothing is sent yet. {total}"
    messages = steps[step - 1].messages
    a, b, size = messages[0]
    what = f"Step {step}: {len(messages)} {'message' if len(messages) == 1 else 'messages'}"
    lines = f"{head}\n{what}, such as {size:,} bytes from rank {a} to rank {b}. {total}"
    if name == "ring":
        held = summands(n, step)
        whole = int((held == n).sum())
        phase = "parts are added on the way" if step < n else "whole sums are handed on"
        lines += f"\n{phase.capitalize()}; {whole} of {n * n} places hold the whole sum."
    return lines


def _circle(ax: Any, n: int, per_node: int, step: Step | None) -> None:
    angles = np.pi / 2 - 2 * np.pi * np.arange(n) / n
    x, y = np.cos(angles), np.sin(angles)
    for a, b, size in step.messages if step is not None else ():
        start, end = np.array([x[a], y[a]]), np.array([x[b], y[b]])
        along = (end - start) / np.linalg.norm(end - start)
        crosses = a // per_node != b // per_node
        style = {
            "arrowstyle": "-|>",
            "color": ORANGE if crosses else BLUE,
            "linestyle": "--" if crosses else "-",
            "linewidth": 0.8 + min(2.2, size / PART / 2),
            "mutation_scale": 11,
            "shrinkA": 0,
            "shrinkB": 0,
            "connectionstyle": "arc3,rad=0.12",
        }
        ax.annotate("", end - 0.2 * along, start + 0.2 * along, arrowprops=style)
    for rank in range(n):
        ax.text(x[rank], y[rank], str(rank), ha="center", va="center", fontsize=10, color=INK,
                bbox={"boxstyle": "circle,pad=0.35", "facecolor": "white", "edgecolor": GREY})  # fmt: skip
    ax.set_xlim(-1.45, 1.45)
    ax.set_ylim(-1.25, 1.25)
    ax.set_aspect("equal")
    ax.axis("off")


def _parts(ax: Any, held: np.ndarray) -> None:
    n = len(held)
    for rank in range(n):
        for part in range(n):
            whole = held[rank, part] == n
            ax.barh(rank, 0.92, 0.86, left=part - 0.46, color=GREEN if whole else BLUE,
                    alpha=0.9 if whole else 0.15 + 0.5 * held[rank, part] / n)  # fmt: skip
            ax.text(part, rank, str(held[rank, part]), ha="center", va="center", fontsize=8.5, color=INK,
                    fontweight="bold" if whole else "normal")  # fmt: skip
    ax.set_xticks(range(n))
    ax.set_yticks(range(n))
    ax.invert_yaxis()
    ax.tick_params(labelsize=8, length=0)
    ax.set_xlabel("part", fontsize=8.5)
    ax.set_ylabel("rank", fontsize=8.5)
    ax.set_title(f"the sum of how many ranks ({n}: whole)", fontsize=8.5, loc="left")
    ax.spines[:].set_visible(False)


def _sent(ax: Any, n: int, steps: Sequence[Step]) -> None:
    sent = np.zeros(n)
    for each in steps:
        np.add.at(sent, each.source, each.num_bytes)
    ax.bar(range(n), sent / PART, color=BLUE)
    ax.axhline(2 * (n - 1), color=ORANGE, linestyle="--", linewidth=1.2)
    ax.text(n - 0.5, 2 * (n - 1), "a ring, in all", ha="right", va="bottom", fontsize=8, color=INK)
    ax.set_xticks(range(n))
    ax.set_ylim(0, max(2.6 * (n - 1), 1.15 * float(sent.max()) / PART, 1))
    ax.tick_params(labelsize=8)
    ax.set_xlabel("rank", fontsize=8.5)
    ax.set_ylabel("parts sent so far", fontsize=8.5)
    ax.spines[["top", "right"]].set_visible(False)


def ring_stepper(name: str = "ring", n: int = 4, step: int = 2) -> View:
    """Choose an all-reduce, the number of ranks, and a step. ValueError for a name not in ALL_REDUCES."""
    if name not in ALL_REDUCES:
        raise ValueError(f"expected one of {', '.join(ALL_REDUCES)}, got {name!r}")
    wide, room = {"description_width": "90px"}, {"width": "340px"}
    return View(
        {
            "name": Dropdown(options=ALL_REDUCES, value=name, description="All-reduce", style=wide, layout=room),
            "n": Dropdown(options=SIZES, value=n, description="Ranks", style=wide, layout=room),
            "step": IntSlider(
                step, 0, MOST_STEPS, description="Step", style=wide, layout=room, continuous_update=False
            ),
        },
        draw,
    )
