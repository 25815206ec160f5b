"""The speed-up explorer: E / (v(k) + k c) over acceptance, drafts, their cost, what verifying costs, and the batch;
with points that were measured, if there are some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ipywidgets import Dropdown, FloatSlider, IntSlider, SelectionSlider

from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, RED, Shown, View, figure, show, tidy
from reference_impl.theory import speculative
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model

BATCHES = [2**n for n in range(10)]  # 1 to 512
MOST = 8  # drafts
MFU, MBU = 0.5, 0.8
Verify = Callable[[int, int], float]  # (batch, k) -> v(k)


@dataclass(frozen=True)
class Measured:
    """A speed-up that was measured. name: of what drafted, and on which text."""

    name: str
    batch: int
    num_drafts: int
    speed_up: float


@lru_cache(maxsize=1)
def _h100() -> Deployment:
    return Deployment(model("llama-3-8b"), device("H100"), mfu=MFU, mbu=MBU)


@lru_cache(maxsize=4096)
def _formula(context: int, batch: int, k: int) -> float:
    return speculative.verify_cost(_h100(), batch, context, k)


MACHINES: dict[str, Verify] = {
    "v = 1, as in the paper": lambda batch, k: 1.0,
    "8B on one H100, context 1,000": lambda batch, k: _formula(1000, batch, k),
    "8B on one H100, context 8,000": lambda batch, k: _formula(8000, batch, k),
}
CONTEXTS = {"8B on one H100, context 1,000": 1000, "8B on one H100, context 8,000": 8000}


def most_that_fit(machine: str, num_drafts: int) -> int | None:
    """Requests whose caches fit beside the weights while their drafts are verified, with 90 % of the memory in use;
    None for a machine of which the memory is not known."""
    if machine not in CONTEXTS:
        return None
    return _h100().cache_tokens() // (CONTEXTS[machine] + num_drafts + 1)


def gain(verify: Verify, acceptance: float, num_drafts: int, draft_cost: float, batch: int) -> float:
    """The formula at one point."""
    tokens = speculative.expected_tokens(acceptance, num_drafts)
    return float(speculative.speed_up(tokens, num_drafts, draft_cost, verify(batch, num_drafts)))


def draw(
    machines: Mapping[str, Verify], points: Sequence[Measured], machine: str, acceptance: float, num_drafts: int,
    draft_cost: float, batch: int,
) -> Shown:  # fmt: skip
    """Left: the speed-up over k at this batch. Right: over the batch at this k. Dotted: 1, neither gain nor loss."""
    verify = machines[machine]
    points = () if machine in MACHINES else points  # those of one machine say nothing about another's curve
    ks = range(1, MOST + 1)
    by_k = [gain(verify, acceptance, k, draft_cost, batch) for k in ks]
    by_batch = [gain(verify, acceptance, num_drafts, draft_cost, b) for b in BATCHES]
    here = gain(verify, acceptance, num_drafts, draft_cost, batch)
    best = speculative.best_num_drafts(acceptance, draft_cost, lambda k: verify(batch, k), most=MOST)
    tokens = speculative.expected_tokens(acceptance, num_drafts)
    most = most_that_fit(machine, num_drafts)
    text = (
        f"{machine}: {tokens:.2f} tokens / ({verify(batch, num_drafts):.2f} + {num_drafts} · {draft_cost:.2f}) = "
        f"{here:.2f}x at batch {batch}. Best here: {f'k = {best}' if best else 'no drafts'}."
    )
    if most is not None and batch > most:
        text += f"\nThis batch does not fit: beside the weights there is room for the caches of {most} such requests."
    fig = figure(8.2, 3.2)
    fig.set_layout_engine("none")
    left, right = fig.add_axes((0.07, 0.17, 0.40, 0.62)), fig.add_axes((0.57, 0.17, 0.41, 0.62))
    left.plot(ks, by_k, "o-", color=BLUE, markersize=4)
    right.plot(BATCHES, by_batch, "o-", color=BLUE, markersize=4, label="formula")
    if most is not None and most < BATCHES[-1]:
        right.axvspan(most, BATCHES[-1], color=GREY, alpha=0.25, linewidth=0)
        right.text(BATCHES[-1], 0, "caches do not fit ", ha="right", va="bottom", fontsize=8, color=INK)
    for ax, x in ((left, num_drafts), (right, batch)):
        ax.plot(x, here, "D", color=RED, markersize=8)
        ax.axhline(1, color=GREY, linestyle=":", linewidth=1.5)
    right.set_xscale("log", base=2)
    right.set_xticks(BATCHES, [str(b) for b in BATCHES])
    right.minorticks_off()
    _measured(left, [(p.num_drafts, p) for p in points if p.batch == batch])
    _measured(right, [(p.batch, p) for p in points if p.num_drafts == num_drafts])
    top = max([*by_k, *by_batch, *(p.speed_up for p in points), 1.2])
    for ax in (left, right):
        ax.set_ylim(0, 1.08 * top)
    tidy(left, "drafts k", "times as fast", f"batch {batch}")
    tidy(right, "requests in the batch", "", f"k = {num_drafts}")
    fig.text(0.01, 0.975, text, va="top", fontsize=9, color=INK)
    shown = f" {len(points)} measured points." if points else ""
    return show(
        fig,
        f"{text}{shown} Over the batch from 1 to {BATCHES[-1]} it goes from {by_batch[0]:.2f} to {by_batch[-1]:.2f}."
        + (f" Only up to {most} requests fit." if most is not None and most < BATCHES[-1] else ""),
    )


def _measured(ax: Any, points: Sequence[tuple[int, Measured]]) -> None:
    for marker, name in zip("s^Pv*X", dict.fromkeys(p.name for _, p in points), strict=False):
        found = [(x, p.speed_up) for x, p in points if p.name == name]
        ax.plot(*zip(*found, strict=True), marker, color=ORANGE, markeredgecolor=INK, markersize=7, linestyle="",
                label=f"measured: {name}")  # fmt: skip
    if points:
        ax.legend(fontsize=7.5, frameon=False)


def speculation(
    points: Sequence[Measured] = (), measured: Mapping[str, Verify] | None = None, acceptance: float = 0.7,
    num_drafts: int = 4, draft_cost: float = 0.05, batch: int = 1, machine: str | None = None,
) -> View:  # fmt: skip
    """Move acceptance, k, c and the batch. measured: v(k) of machines of your own, by name, beside `MACHINES`;
    points: what was measured on them, shown with their curve only."""
    machines = {**MACHINES, **(measured or {})}
    if machine is not None and machine not in machines:
        raise ValueError(f"machine: expected one of {list(machines)}, got {machine!r}")
    wide, layout = {"description_width": "150px"}, {"width": "480px"}
    common = {"style": wide, "layout": layout, "continuous_update": False}
    return View(
        {
            "machine": Dropdown(
                options=list(machines),
                value=machine or list(MACHINES)[1],
                description="v(k) of",
                style=wide,
                layout={"width": "420px"},  # its names are long
            ),
            "acceptance": FloatSlider(acceptance, min=0, max=1, step=0.01, description="Acceptance a", **common),
            "num_drafts": IntSlider(num_drafts, 1, MOST, description="Drafts k", **common),
            "draft_cost": FloatSlider(draft_cost, min=0, max=0.5, step=0.01, description="Cost of a draft c", **common),
            "batch": SelectionSlider(options=BATCHES, value=batch, description="Batch", **common),
        },
        lambda **values: draw(machines, points, **values),
    )
