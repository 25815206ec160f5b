"""The occupancy explorer: what a compiled kernel uses of an SM, and which resource runs out first.

Lines come from the compile table (reference_impl/kernels/compiled.json), the arithmetic from `theory.occupancy`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ipywidgets import Dropdown, IntSlider

import reference_impl
from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, SKY, Shown, View, figure, show, tidy
from reference_impl.theory import occupancy as theory
from reference_impl.theory.occupancy import SMS, Occupancy
from reference_impl.theory.units import KiB

TABLE = Path(reference_impl.__file__).parent / "kernels/compiled.json"
RESOURCES = ("registers", "shared memory", "warps", "blocks")


@cache
def table() -> dict[str, dict[str, Any]]:
    """The compile table: "kernel, architecture" -> what the compiler reported."""
    lines: dict[str, dict[str, Any]] = json.loads(TABLE.read_text("utf-8"))
    return lines


def kernels() -> list[str]:
    """Names of the table's lines without their architecture."""
    return sorted({name.rpartition(", ")[0] for name in table()})


def taken(kernel: str, gpu: str, fewer_registers: int = 0, shared_percent: int = 100) -> dict[str, int] | None:
    """What a block of the kernel uses, with the given changes; None where the table has no such line."""
    line = table().get(f"{kernel}, {gpu}")
    if line is None:
        return None
    return {
        "num_warps": line["options"].get("num_warps", 4),
        "registers": max(1, line["registers"] - fewer_registers),
        "shared_bytes": line["shared_bytes"] * shared_percent // 100,
    }


def draw(kernel: str, gpu: str, fewer_registers: int, shared_percent: int) -> Shown:
    """Left: warps that each resource allows. Right: the same over the registers of a thread; the kernel as a point."""
    takes = taken(kernel, gpu, fewer_registers, shared_percent)
    if takes is None:
        why = f"{kernel} is not compiled for {gpu} ({SMS[gpu].parts}): it has no types or no matrix units for it."
        fig = figure(7.8, 0.9)
        fig.text(0.02, 0.4, why, fontsize=9, color=INK)
        return show(fig, why)
    it = theory.occupancy(gpu, **takes)
    words = describe(kernel, takes, it)
    fig = figure(7.8, 3.4)
    left, right = fig.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_limits(left, it)
    _draw_steps(right, gpu, takes, it)
    fig.suptitle("\n".join(words), fontsize=9, x=0.01, ha="left")
    return show(fig, f"Occupancy. {' '.join(words)}")


def describe(kernel: str, takes: dict[str, int], it: Occupancy) -> list[str]:
    """What the picture says."""
    warps, sm = takes["num_warps"], it.sm
    warp_word = "warp" if warps == 1 else "warps"
    size = f"{takes['shared_bytes'] / KiB:,.4g} KiB of shared memory"
    lines = [
        f"{kernel} on {sm.name} ({sm.parts}).",
        f"A block has {warps} {warp_word}, {takes['registers']} registers per thread, {size}.",
    ]
    if it.blocks == 0:
        return [*lines, f"IT CANNOT BE LAUNCHED: an SM has too little for one block ({', '.join(it.binding)})."]
    also = " and ".join(it.binding)
    blocks = f"{it.blocks} {'block' if it.blocks == 1 else 'blocks'}"
    return [*lines, f"An SM holds {blocks}: {it.warps} of {sm.max_warps} warps ({it.share:.0%}), limited by {also}."]


def _draw_limits(ax: Any, it: Occupancy) -> None:
    """A bar per resource that the kernel uses."""
    for y, name in enumerate(reversed(RESOURCES)):
        if name not in it.limits:
            ax.text(0.5, y, "not used", va="center", fontsize=8, color=INK)
            continue
        warps, binds = it.limits[name] * it.warps_per_block, name in it.binding
        shown = min(warps, 1.25 * it.sm.max_warps)  # a bar far beyond the SM's own limit would say nothing more
        ax.barh(y, shown, color=ORANGE if binds else SKY, hatch="//" if binds else "", edgecolor="white")
        text = f"{warps} (binds)" if binds else f"{warps}"
        ax.text(shown + 0.01 * it.sm.max_warps, y, text, va="center", fontsize=8, color=INK)
    ax.axvline(it.sm.max_warps, color=GREY, linestyle="--", linewidth=1.2)
    tidy(ax, f"warps per SM (dashed: its {it.sm.max_warps})")
    ax.set_yticks(range(len(RESOURCES)), list(reversed(RESOURCES)), fontsize=8)
    ax.set_xlim(0, 1.55 * it.sm.max_warps)


def _draw_steps(ax: Any, gpu: str, takes: dict[str, int], it: Occupancy) -> None:
    counts = range(8, it.sm.max_registers + 1)
    held = [theory.occupancy(gpu, takes["num_warps"], n, takes["shared_bytes"]).warps for n in counts]
    ax.step(counts, held, where="post", color=BLUE, linewidth=1.6)
    ax.plot(takes["registers"], it.warps, "o", color=ORANGE, markeredgecolor=INK, markersize=8)
    ax.annotate("this kernel", (takes["registers"], it.warps), (0, 8), textcoords="offset points", fontsize=8)
    tidy(ax, "registers per thread", "warps per SM")
    ax.set_ylim(0, 1.12 * it.sm.max_warps)
    ax.set_xlim(0, it.sm.max_registers + 8)


def occupancy(
    kernel: str = "flash_attention, head_dim 128: flash_attention",
    gpu: str = "sm_90",
    fewer_registers: int = 0,
    shared_percent: int = 100,
) -> View:
    """Choose a compiled kernel and a GPU; see what limits the warps of an SM, and what less of it would change."""
    wide, layout = {"description_width": "120px"}, {"width": "480px"}
    return View(
        {
            "kernel": Dropdown(options=kernels(), value=kernel, description="Kernel", style=wide, layout=layout),
            "gpu": Dropdown(
                options=[(f"{sm.name}: {sm.parts}", sm.name) for sm in SMS.values()], value=gpu, description="GPU",
                style=wide,
            ),
            "fewer_registers": IntSlider(
                fewer_registers, 0, 160, 8, description="Registers less", style=wide, layout=layout,
                continuous_update=False,
            ),
            "shared_percent": IntSlider(
                shared_percent, 25, 200, 25, description="Shared, %", style=wide, layout=layout,
                continuous_update=False,
            ),
        },
        draw,
    )  # fmt: skip
