"""The chunk-size explorer: a long prompt's TTFT against the gaps of decoding requests, over `theory.deployment`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from ipywidgets import Dropdown, SelectionSlider
from matplotlib.collections import PolyCollection
from matplotlib.ticker import LogLocator, NullLocator

from chapters.widgets.figure import BLUE, GREY, INK, RED, SKY, Shown, View, figure, show, tidy
from reference_impl.theory import latency
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model
from reference_impl.theory.units import format_seconds

MACHINES = {
    "Llama-3-8B on one H100": ("llama-3-8b", 1),
    "Llama-3-70B on four H100": ("llama-3-70b", 4),
    "Llama-3-70B on eight H100": ("llama-3-70b", 8),
}
PROMPTS = [2**n for n in range(9, 18)]  # 512 to 131,072
DECODES = [0, *(2**n for n in range(9))]  # none to 256
BUDGETS = [2**n for n in range(8, 18)]  # 256 to 131,072
CONTEXT, MFU, MBU = 1000, 0.5, 0.8


@dataclass(frozen=True)
class Reading:
    """Prefill of one prompt under a budget. steps: the seconds of each step; chunk: prompt tokens in one."""

    budget: int
    chunk: int
    steps: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Seconds to the long prompt's first token, without a queue: all steps."""
        return sum(self.steps)

    @property
    def longest_gap(self) -> float:
        """Longest gap of the requests that decode beside it: the longest step."""
        return max(self.steps)


def deployment(machine: str) -> Deployment:
    """One of MACHINES."""
    name, devices = MACHINES[machine]
    return Deployment(model(name), device("H100"), devices, mfu=MFU, mbu=MBU)


@lru_cache(maxsize=256)
def reading(machine: str, prompt: int, decodes: int, budget: int) -> Reading | None:
    """Decodes first, then a chunk, until the prompt is computed; None where the decodes leave no room for a chunk."""
    where = deployment(machine)
    chunk = min(prompt, budget - decodes)
    if chunk < 1:
        return None
    steps, done = [], 0
    while done < prompt:
        n = min(chunk, prompt - done)
        contexts = [CONTEXT + len(steps)] * decodes
        steps.append(where.step_seconds([*[1] * decodes, n], [*contexts, done]))
        done += n
    return Reading(budget, chunk, tuple(steps))


def draw(machine: str, prompt: int, decodes: int, budget: int) -> Shown:
    """Left: every budget as a point. Right: the chosen budget's steps on a time line. Or why there is no time."""
    where = deployment(machine)
    curve = [r for b in BUDGETS if (r := reading(machine, prompt, decodes, b)) is not None]
    chosen = reading(machine, prompt, decodes, budget)
    load = f"{machine}: a prompt of {prompt:,} tokens beside {decodes} decodes at context {CONTEXT:,}"
    if chosen is None:
        fig = figure(7.8, 1.2)
        why = (
            f"a budget of {budget} tokens is used up by {decodes} decodes: the prompt is never read. Raise the budget."
        )
        fig.text(0.02, 0.5, f"{load}\n{why}", fontsize=9, va="center")
        return show(fig, f"{load}: {why}")
    alone = where.tpot(CONTEXT, decodes) if decodes else 0.0
    free = int(latency.flat_prefill_tokens(where.device, mfu=MFU) / MBU)
    steps = f"{len(chosen.steps)} step{'s' if len(chosen.steps) > 1 else ''}"
    gap = f"longest gap {format_seconds(chosen.longest_gap)}" if decodes else "no request decodes"
    text = (
        f"{load}; budget {budget:,}: {steps} with up to {chosen.chunk:,} prompt tokens, TTFT "
        f"{format_seconds(chosen.ttft)}, {gap}"
    )
    usual = f" (without the prompt {format_seconds(alone)})" if decodes else ""
    fig = figure(7.8, 3.1)
    fig.set_layout_engine("none")
    left, right = fig.add_axes((0.11, 0.16, 0.43, 0.6)), fig.add_axes((0.66, 0.3, 0.32, 0.3))
    left.plot([r.ttft for r in curve], [1e3 * r.longest_gap for r in curve], "o-", color=BLUE, markersize=4)
    left.plot(chosen.ttft, 1e3 * chosen.longest_gap, "D", color=RED, markersize=8)
    labelled = {curve[0].budget, curve[-1].budget, *(b for b in (512, 2048, 8192) if b >= curve[0].budget)}
    for r in curve:
        if r.budget in labelled and (r.budget == curve[-1].budget or r.chunk < prompt - decodes):
            left.annotate(
                f"{r.budget:,}", (r.ttft, 1e3 * r.longest_gap), textcoords="offset points", xytext=(5, 4), fontsize=7
            )
    gaps = [1e3 * r.longest_gap for r in curve]
    left.set_yscale("log")  # a whole long prompt takes a thousand times a decode step
    left.set_ylim(0.7 * min([1e3 * alone] if decodes else gaps), 1.6 * max(gaps))
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:,g}")
    left.yaxis.set_minor_locator(NullLocator())
    left.tick_params(axis="y", labelsize=8)
    nearest, farthest = min(r.ttft for r in curve), max(r.ttft for r in curve)
    margin = 0.12 * (farthest - nearest) + 0.01 * farthest  # from 0 the whole curve would be one upright line
    left.set_xlim(nearest - margin, farthest + 2 * margin)
    tidy(left, "TTFT of the long prompt, s (no queue)", "longest step, ms")
    _time_line(right, chosen, decodes)
    fig.text(0.01, 0.98, f"{load}\nbudget {budget:,}: {steps}, TTFT {format_seconds(chosen.ttft)}, {gap}{usual}",
             fontsize=9, va="top")  # fmt: skip
    free_text = f"about {free} tokens in all ride under one read of the weights"
    fig.text(0.66, 0.66, f"about {free} tokens in all\nride under one read of the weights", fontsize=7, color=INK)
    if decodes:
        left.axhline(1e3 * alone, color=GREY, linewidth=1, linestyle=":")
    return show(fig, f"{text}{usual}; {free_text}. By formula, MFU {MFU:.0%}, MBU {MBU:.0%}.")


def _time_line(ax: Any, chosen: Reading, decodes: int) -> None:
    """The steps as boxes: above, hatched, what each computes of the prompt; below the decodes, which end with it."""
    ends = list(accumulate(chosen.steps[:200]))
    spans = list(zip([0.0, *ends], ends, strict=False))
    strips = {"prefill": (0.02, 0.32, BLUE, "////"), "decode": (-0.32, -0.02, SKY, "")}
    for kind in ("prefill", "decode") if decodes else ("prefill",):
        low, high, colour, hatch = strips[kind]
        boxes = [[(start, low), (end, low), (end, high), (start, high)] for start, end in spans]
        looks = {"facecolor": colour, "hatch": hatch if len(spans) <= 60 else "", "edgecolor": "white"}
        ax.add_collection(PolyCollection(boxes, linewidth=0.3, **looks), autolim=False)
    ax.set_ylim(-0.35, 0.35)
    marks = {"prefill": 0.17} | ({"decode": -0.17} if decodes else {})
    ax.set_yticks(list(marks.values()), list(marks), fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.set_xlim(0, ends[-1])
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.set_xlabel("seconds; a box: one step" + ("" if len(chosen.steps) <= 200 else " (the first 200)"), fontsize=8)


def chunk_size(model_name: str = "llama-3-8b", prompt: int = 8192, decodes: int = 32, budget: int = 512) -> View:
    """Choose a prompt, the decodes beside it and the budget of a step; see the long prompt's TTFT against the gaps.

    Numbers are rounded to the nearest choice. Floors by formula, without a queue; context of the decodes 1,000.
    """
    wide, layout = {"description_width": "120px"}, {"width": "480px"}
    machine = next((name for name, (shape, _) in MACHINES.items() if shape == model_name), None)
    if machine is None:
        raise ValueError(f"model_name: expected one of {sorted({m for m, _ in MACHINES.values()})}, got {model_name!r}")

    def choose(options: list[int], value: int, label: str) -> SelectionSlider:
        nearest = min(options, key=lambda n: abs(n - value))
        return SelectionSlider(
            options=[(f"{n:,}", n) for n in options], value=nearest, description=label, style=wide, layout=layout,
            continuous_update=False,
        )  # fmt: skip

    return View(
        {
            "machine": Dropdown(options=list(MACHINES), value=machine, description="Machine", style=wide),
            "prompt": choose(PROMPTS, prompt, "Prompt tokens"),
            "decodes": choose(DECODES, decodes, "Decodes beside it"),
            "budget": choose(BUDGETS, budget, "Budget of a step"),
        },
        draw,
    )
