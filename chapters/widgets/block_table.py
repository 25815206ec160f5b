"""The block-table stepper: which request holds which physical block, how often, and what was copied, step by step.

A snapshot is taken from an engine between two of its steps; drawing reads snapshots only. It shows the first KV group.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ipywidgets import Dropdown, IntSlider
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, YELLOW, Shown, View, figure, show
from reference_impl.interfaces import NO_BLOCK, BlockPair

if TYPE_CHECKING:  # it would bring torch with it
    from reference_impl.assembly.engine import Engine

# What each request looks like, in the order in which they came; names are written into the blocks as well.
LOOKS = ((BLUE, ""), (ORANGE, "//"), (GREEN, ".."), (SKY, "\\\\"), (YELLOW, "--"), (RED, "++"))
SHARED, CACHED = (PURPLE, "xx"), (GREY, "oo")
COLUMNS = 6  # blocks beside each other
COLOURLESS = ("white", "")


@dataclass(frozen=True)
class Snapshot:
    """What the KV manager knows after a step (0: before the first). Integers and names, no tensors."""

    step: int
    block_size: int
    tables: dict[str, tuple[int, ...]]  # of every request that is not finished; () while it waits
    computed: dict[str, int]  # tokens whose keys and values are in the cache
    references: tuple[int, ...]  # per block; 0 is free
    free: tuple[int, ...]  # in the order in which the pool would hand them out
    copies: tuple[BlockPair, ...] = ()
    preempted: tuple[str, ...] = ()

    def holders(self, block: int) -> list[str]:
        return [name for name, table in self.tables.items() if block in table]

    def filled(self, block: int) -> int:
        """Slots of the block that hold a key and a value, of the holder that has computed most of it."""
        size = self.block_size
        found = [self.computed[name] - self.tables[name].index(block) * size for name in self.holders(block)]
        return max(0, min(size, max(found))) if found else (size if self.references[block] else 0)


def snapshot(engine: Engine) -> Snapshot:
    """The engine's block tables and reference counts now, between two steps."""
    steps = engine.trace.steps()
    pool = copy.deepcopy(engine.block_pool)  # so that all its free blocks can be allocated
    return Snapshot(
        step=len(steps),
        block_size=engine.config.block_size,
        tables={name: tuple(request.block_table) for name, request in engine.requests.items()},
        computed={name: request.num_computed_tokens for name, request in engine.requests.items()},
        references=tuple(engine.block_pool.ref_count(block) for block in range(engine.num_blocks)),
        free=tuple(pool.allocate(pool.num_free)),
        copies=steps[-1].transfers.copies if steps else (),
        preempted=steps[-1].preempted if steps else (),
    )


def draw(frames: Sequence[Snapshot], step: int = 0, request: str = "", position: int = 0) -> Shown:
    """The pool on the left, the tables on the right; the slot of one position of one request is marked.

    step: index into frames. A request that is not there in this step is said to be gone or waiting.
    """
    if not frames:
        return show(figure(4, 0.6), "No snapshots were recorded, so there are no blocks to show.")
    now = frames[min(max(step, 0), len(frames) - 1)]
    names = list(dict.fromkeys(name for frame in frames for name in frame.tables))
    looks = {name: LOOKS[i % len(LOOKS)] for i, name in enumerate(names)}
    spot, words = _look_up(now, request, position)
    rows = -(-len(now.references) // COLUMNS)
    height = 0.62 * max(rows, 0.75 * len(names) + 0.5) + 0.3
    fig = figure(8.4, height + 0.62)
    fig.set_layout_engine("none")
    total = height + 0.62
    pool = fig.add_axes((0.01, 0.0, 0.56, height / total))
    tables = fig.add_axes((0.60, 0.0, 0.40, height / total))
    _draw_pool(pool, now, looks, spot, rows, height)
    longest = max((len(t) for frame in frames for t in frame.tables.values()), default=1)
    _draw_tables(tables, now, names, looks, request, position, longest, height)
    what = _in_words(frames, now)
    fig.text(0.01, 1 - 0.08 / total, f"{what}\n{words}", va="top", fontsize=8.5, color=INK)
    held = "; ".join(f"{name}: {list(table)}" for name, table in now.tables.items()) or "no request holds a block"
    shared = {block: count for block, count in enumerate(now.references) if count > 1}
    return show(
        fig,
        f"{what} Block tables: {held}. Free list, next first: {list(now.free)}. "
        f"Blocks with more than one reference: {shared or 'none'}. {words}",
    )


def _look_up(now: Snapshot, request: str, position: int) -> tuple[tuple[int, int] | None, str]:
    """((block, offset), the translation in words) of one position; None where there is nothing to read."""
    table = now.tables.get(request)
    if table is None:
        return None, f"Request {request} is not in the engine now." if request else "No request is chosen."
    if not table:
        return None, f"Request {request} waits and holds no block."
    index, offset = divmod(position, now.block_size)
    if index >= len(table):
        return None, f"Position {position} of {request}: no block yet, its table has {len(table)} entries."
    block = table[index]
    if block == NO_BLOCK:
        return None, f"Position {position} of {request} has fallen out of the window."
    if position < now.computed[request]:
        state = "filled"
    elif offset < now.filled(block):  # the block is shared, and another holder is ahead
        state = f"filled by another request, not by {request} yet"
    else:
        state = "reserved, not written yet"
    slot = block * now.block_size + offset
    return (block, offset), (
        f"Position {position} of {request}: entry {position} // {now.block_size} = {index} of its table is "
        f"block {block}, offset {position} % {now.block_size} = {offset}, slot {slot} ({state})."
    )


def _in_words(frames: Sequence[Snapshot], now: Snapshot) -> str:
    before = next((f for f in reversed(frames) if f.step < now.step), None)
    gone = [name for name in before.tables if name not in now.tables] if before else []
    new = [name for name in now.tables if before is not None and name not in before.tables]
    parts = [
        f"copied: {', '.join(f'{pair.src} to {pair.dst}' for pair in now.copies)}" if now.copies else "",
        f"preempted: {', '.join(now.preempted)}" if now.preempted else "",
        f"new: {', '.join(new)}" if new else "",
        f"gone: {', '.join(gone)}" if gone else "",
    ]
    events = "; ".join(part for part in parts if part)
    return (
        f"After step {now.step}: {len(now.free)} of {len(now.references)} blocks free{'; ' + events if events else ''}."
    )


def _draw_pool(
    ax: Axes, now: Snapshot, looks: dict[str, tuple[str, str]], spot: tuple[int, int] | None, rows: int, height: float
) -> None:
    """A box per block with as many cells as slots, filled from the left."""
    boxes: dict[tuple[str, str], list[list[tuple[float, float]]]] = {}
    for block, count in enumerate(now.references):
        x, y = block % COLUMNS, -(block // COLUMNS)
        holders = now.holders(block)
        look = SHARED if len(holders) > 1 else looks[holders[0]] if holders else CACHED
        boxes.setdefault(COLOURLESS, []).append(_box(x, y, 0.88))
        if count:
            boxes.setdefault(look, []).append(_box(x, y, 0.88 * now.filled(block) / now.block_size))
        label = f"{block}  refs {count}" if count else f"{block}  free"
        ax.text(x, y + 0.50, label, fontsize=7.5, color=INK, va="bottom")
        for pair in now.copies:
            if pair.dst == block:
                ax.text(x, y - 0.04, f"copy of {pair.src}", fontsize=7, color=RED, va="top")
        owner = " ".join(holders) or ("cached" if count else "")
        if owner:
            ax.text(
                x + 0.44, y + 0.22, owner, fontsize=8, ha="center", va="center", color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85},
            )  # fmt: skip
    for (colour, hatch), polygons in boxes.items():
        style = {
            "facecolor": colour,
            "hatch": hatch or None,
            "edgecolor": "white" if hatch or colour != "white" else INK,
        }
        ax.add_collection(PolyCollection(polygons, linewidth=0.7, **style), autolim=False)
    outlines = [_box(b % COLUMNS, -(b // COLUMNS), 0.88) for b in range(len(now.references))]
    ax.add_collection(PolyCollection(outlines, facecolor="none", edgecolor=INK, linewidth=0.8), autolim=False)
    if spot is not None:
        block, offset = spot
        x, width = block % COLUMNS, 0.88 / now.block_size
        cell = _box(x + offset * width, -(block // COLUMNS), width)
        ax.add_collection(PolyCollection([cell], facecolor="none", edgecolor=RED, linewidth=2.2), autolim=False)
    ax.set_xlim(-0.03, COLUMNS)
    ax.set_ylim(1.0 - height / 0.62, 1.0)
    ax.axis("off")


def _draw_tables(
    ax: Axes,
    now: Snapshot,
    names: list[str],
    looks: dict[str, tuple[str, str]],
    request: str,
    position: int,
    longest: int,
    height: float,
) -> None:
    """A row of block numbers per request, in the order of its tokens."""
    step = min(0.12, 0.80 / max(1, longest))
    ax.text(0.0, 0.86, "block tables", fontsize=8.5, color=INK, va="bottom")
    for row, name in enumerate(names):
        y, table = -0.75 * row, now.tables.get(name)
        colour, hatch = looks[name]
        key = [[(0, y + 0.1), (0.05, y + 0.1), (0.05, y + 0.5), (0, y + 0.5)]]
        ax.add_collection(PolyCollection(key, facecolor=colour, hatch=hatch or None, edgecolor="white"), autolim=False)
        state = "not there" if table is None else f"{now.computed[name]} tokens" if table else "waits"
        ax.text(0.06, y + 0.56, f"{name}: {state}", fontsize=8, color=INK, va="bottom")
        for i, block in enumerate(table or ()):
            chosen = name == request and i == position // now.block_size
            ax.text(
                0.06 + step * (i + 0.5), y + 0.29, "-" if block == NO_BLOCK else str(block), fontsize=8, ha="center",
                va="center", color=INK,
                bbox={"boxstyle": "square,pad=0.25", "facecolor": "white", "edgecolor": RED if chosen else GREY,
                      "linewidth": 1.8 if chosen else 0.8},
            )  # fmt: skip
    order = " ".join(map(str, now.free[:14])) + (" ..." if len(now.free) > 14 else "") if now.free else "empty"
    ax.text(0.0, 0.62 - 0.75 * len(names), f"free list, next first: {order}", fontsize=8.5, color=INK, va="top")
    ax.set_xlim(0, 1)
    ax.set_ylim(1.0 - height / 0.62, 1.0)
    ax.axis("off")


def _box(x: float, y: float, width: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + 0.46), (x, y + 0.46)]


def block_table(frames: Sequence[Snapshot], request: str | None = None, start: int = 0, position: int = 0) -> View:
    """Step through the snapshots of a run; choose a position and see where it lies. start: index of the first shown."""
    names = list(dict.fromkeys(name for frame in frames for name in frame.tables))
    longest = max((len(t) * f.block_size for f in frames for t in f.tables.values()), default=1)
    wide = {"description_width": "80px"}
    slider = {"style": wide, "layout": {"width": "560px"}, "continuous_update": False}
    last, end = max(0, len(frames) - 1), max(1, longest - 1)
    chosen = request if request in names else names[0] if names else ""
    return View(
        {
            "step": IntSlider(min(start, last), 0, last, description="Snapshot", **slider),
            "request": Dropdown(options=names or [""], value=chosen, description="Request", style=wide),
            "position": IntSlider(min(position, end), 0, end, description="Position", **slider),
        },
        lambda step, request, position: draw(frames, step, request, position),
    )
