"""The stages of a model, step by step: which batch each stage computes, and which part of the time it is idle."""

from __future__ import annotations

from typing import Any

from ipywidgets import Dropdown, IntSlider
from matplotlib.patches import Rectangle

from chapters.widgets.figure import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, YELLOW, Shown, View, figure, show, tidy
from reference_impl.theory import pipeline

COLOURS = (BLUE, ORANGE, SKY, GREEN, YELLOW, PURPLE)  # of batches; each also has its number
TURNS = {"once, then empty": 1, "decoding, four tokens": 4}
WORK = {"equal": 1.0, "the last has the head": 1.3}  # of the last stage


def draw(stages: int, batches: int, turns: int, last: float, moment: int) -> Shown:
    """The schedule up to the moment: how many pieces of work have begun. last: seconds of the last stage, others 1."""
    seconds = [1.0] * (stages - 1) + [last]
    slots = sorted(pipeline.schedule(seconds, batches, turns), key=lambda slot: (slot.start, slot.stage))
    begun = slots[: max(1, min(moment, len(slots)))]
    end = max(slot.end for slot in slots)
    words = _in_words(begun, slots, stages, turns)
    fig = figure(7.8, 0.9 + 0.34 * stages)
    ax = fig.subplots()
    for stage in range(stages):
        ax.add_patch(Rectangle((0, stage - 0.4), end, 0.8, facecolor="none", edgecolor=GREY, hatch="..", linewidth=0))
    for slot in begun:
        now = slot is begun[-1]
        ax.add_patch(_box(slot, now))
        ax.text(
            (slot.start + slot.end) / 2, slot.stage, str(slot.batch), ha="center", va="center", fontsize=8,
            fontweight="bold" if now else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
        )  # fmt: skip
    ax.set_xlim(0, end)
    ax.set_ylim(stages - 0.4, -0.6)
    ax.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    tidy(ax, "time, in units of one stage's work; dotted: idle")
    ax.grid(False)
    ax.set_title(words, fontsize=8, loc="left")
    return show(fig, f"{stages} stages, {batches} batches, {len(begun)} of {len(slots)} pieces of work. {words}")


def _box(slot: pipeline.Slot, now: bool) -> Any:
    colour = COLOURS[slot.batch % len(COLOURS)]
    return Rectangle(
        (slot.start, slot.stage - 0.4), slot.end - slot.start, 0.8, facecolor=colour,
        edgecolor=RED if now else "white", linewidth=2 if now else 0.6, zorder=3 if now else 2,
    )  # fmt: skip


def _in_words(begun: list[pipeline.Slot], slots: list[pipeline.Slot], stages: int, turns: int) -> str:
    slot = begun[-1]
    text = f"Stage {slot.stage} computes batch {slot.batch}" + (f", token {slot.turn + 1}" if turns > 1 else "")
    text += f", from {slot.start:g} to {slot.end:.3g}. "
    same = [other.stage for other in begun if other.start <= slot.start < other.end]
    text += f"Busy then: {len(same)} of {stages} stages. "
    return text + f"Idle over the whole picture: {pipeline.idle_share(slots):.0%}."


def stages(num_stages: int = 4, batches: int = 4, turns: int = 1) -> View:
    """A pipeline to step through: stages, batches in flight, filled once or decoding, equal stages or a longer last."""
    wide = {"description_width": "90px"}
    options: dict[str, Any] = {"style": wide, "layout": {"width": "560px"}, "continuous_update": False}
    most = 8 * 8 * max(TURNS.values())
    return View(
        {
            "num_stages": Dropdown(options=[2, 3, 4, 8], value=num_stages, description="Stages", style=wide),
            "batches": IntSlider(batches, 1, 8, description="Batches", **options),
            "turns": Dropdown(options=list(TURNS.items()), value=turns, description="Load", style=wide),
            "last": Dropdown(options=list(WORK.items()), value=1.0, description="Stages are", style=wide),
            "moment": IntSlider(most, 1, most, description="Up to piece", **options),
        },
        lambda num_stages, batches, turns, last, moment: draw(num_stages, batches, turns, last, moment),
    )
