"""The prefix cache at work: the real radix tree, and the same blocks as a chain of hashes, step by step.

A snapshot is taken from KV managers while an engine runs; drawing reads the snapshot only. The order of eviction is not
guessed: a copy of the index evicts everything that it may.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ipywidgets import Dropdown, IntSlider
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import Patch

from chapters.widgets.figure import INK, ORANGE, RED, SKY, Shown, View, figure, show
from reference_impl.core.kv_manager import KVManager
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.features.prefix.radix_index import Node, RadixIndex

NUMBERS = {"block": "number of the block", "holders": "requests that hold it", "eviction": "place in line for eviction"}
COLUMNS = 8  # links of the chain beside each other
GAP = 0.14  # before a node's first block, in widths of a block


@dataclass(frozen=True)
class BlockView:
    """One indexed block. place: when it would be evicted, 1 is next; None: it is held, or a block below it is."""

    block: int
    holders: int  # requests; the index's own reference is not counted
    place: int | None


Cell = tuple[float, float, float, float, "BlockView"]  # left, top, width, height, what is drawn there


@dataclass(frozen=True)
class NodeView:
    """A node of the tree: its blocks, where its segment starts (in blocks), and its place in the order of use."""

    text: str
    blocks: tuple[BlockView, ...]
    start: int
    parent: int | None  # index of the parent in Snapshot.nodes; parents come first
    owner: int  # whose prefix: keys are numbered in the order of their arrival
    last_used: int  # 1: the most recently used of all nodes


@dataclass(frozen=True)
class LinkView:
    """A link of the hash chain: the first digits of its digest and of its parent's ("" at the start of a chain)."""

    digest: str
    parent: str
    block: BlockView


@dataclass(frozen=True)
class Snapshot:
    label: str
    nodes: tuple[NodeView, ...]
    links: tuple[LinkView, ...]
    free: int


def snapshot(
    label: str, tree: KVManager, chain: KVManager, spell: Callable[[Sequence[int]], str] | None = None
) -> Snapshot:
    """What two KV managers hold after the same work, one over a RadixIndex, one over a HashIndex.

    spell: token ids -> text, for the labels of the nodes; without it the first ids are shown.
    """
    if not isinstance(tree.index, RadixIndex) or not isinstance(chain.index, HashIndex):
        raise TypeError(
            f"expected managers over a RadixIndex and a HashIndex, got {type(tree.index).__name__} and "
            f"{type(chain.index).__name__}; set prefix_cache to 'radix' and 'hash'"
        )
    return Snapshot(label, _nodes(tree, spell or _ids), _links(chain), tree.pool.num_free)


def _ids(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _seen(manager: KVManager) -> Callable[[int], BlockView]:
    """A look at each block. A copy of the index is emptied to learn the order in which blocks would be evicted."""
    index = copy.deepcopy(manager.index)
    assert index is not None
    order = index.evict(len(index), lambda block: manager.pool.ref_count(block) == 1)
    place = {block: i for i, block in enumerate(order, start=1)}
    return lambda block: BlockView(block, manager.pool.ref_count(block) - 1, place.get(block))


def _nodes(manager: KVManager, spell: Callable[[Sequence[int]], str]) -> tuple[NodeView, ...]:
    index = manager.index
    assert isinstance(index, RadixIndex)
    look, found = _seen(manager), list[NodeView]()
    used = {node: i for i, node in enumerate(reversed(index.nodes()), start=1)}
    owners = {key: i for i, key in enumerate(dict.fromkeys(key for key, _ in index.roots))}

    def visit(node: Node, start: int, parent: int | None) -> None:
        text = spell([token for block in node.segment for token in block])
        blocks = tuple(map(look, node.blocks))
        found.append(NodeView(text, blocks, start, parent, owners[node.key], used[node]))
        mine = len(found) - 1
        for child in node.children.values():
            visit(child, start + len(node.blocks), mine)

    for root in index.roots.values():
        visit(root, 0, None)
    return tuple(found)


def _links(manager: KVManager) -> tuple[LinkView, ...]:
    index = manager.index
    assert isinstance(index, HashIndex)
    look = _seen(manager)
    return tuple(
        LinkView(link.digest.hex()[:4], link.parent.digest.hex()[:4] if link.parent else "", look(link.block))
        for link in index.links()
    )


def draw(snapshots: Sequence[Snapshot], step: int = 1, number: str = "block") -> Shown:
    """The tree above, the chain below; step counts from 1; number: what is written into a block (a key of NUMBERS)."""
    if not snapshots:
        fig = figure(6, 1)
        return show(fig, "No snapshot was taken, so there is no tree to show.")
    at = min(max(step, 1), len(snapshots)) - 1
    now = snapshots[at]
    rows = _rows(now.nodes)
    most = max((max(_rows(s.nodes).values(), default=0) for s in snapshots), default=0)
    widest = max((n.start + len(n.blocks) for s in snapshots for n in s.nodes), default=1)
    deepest = max(max(1, -(-len(s.links) // COLUMNS)) for s in snapshots)
    tall, low, width = 0.62 * (most + 1), 0.42 * deepest, 8.0
    height = 0.75 + tall + 0.35 + low + 0.1
    fig = figure(width, height)
    fig.set_layout_engine("none")
    top = fig.add_axes((0.01, (0.45 + low) / height, 0.98, tall / height))
    bottom = fig.add_axes((0.01, 0.1 / height, 0.98, low / height))
    _tree(top, now.nodes, rows, number, most, widest)
    _chain(bottom, now.links, number, deepest)
    fig.text(0.01, 1 - 0.2 / height, f"Step {at + 1} of {len(snapshots)}: {now.label}", fontsize=9, weight="bold")
    fig.text(0.01, (0.2 + low) / height, "the same blocks in the hash index: digest (parent's digest)", fontsize=8)
    handles = [
        Patch(facecolor=ORANGE, hatch="//", edgecolor="white", label="held by a request"),
        Patch(facecolor=SKY, edgecolor="white", label="cached, held by no request"),
        Patch(facecolor=SKY, edgecolor=RED, linewidth=2, label="goes next"),
    ]
    fig.legend(handles=handles, loc="upper right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8,
               frameon=False)  # fmt: skip
    caption = f"in a block: {NUMBERS[number]}; before a text: 1 is the node used last"
    fig.text(0.01, 1 - 0.42 / height, caption, fontsize=8)
    return show(fig, _in_words(now, at + 1, len(snapshots)))


def _rows(nodes: Sequence[NodeView]) -> dict[int, int]:
    """A row for each node: the first child continues its parent's row, each other one starts a new row."""
    rows: dict[int, int] = {}
    last, continued = -1, set[int]()
    for i, node in enumerate(nodes):
        if node.parent is not None and node.parent not in continued:
            continued.add(node.parent)
            rows[i] = rows[node.parent]
        else:
            last += 1
            rows[i] = last
    return rows


def _tree(ax: Any, nodes: Sequence[NodeView], rows: dict[int, int], number: str, most: int, widest: int) -> None:
    several = len({node.owner for node in nodes}) > 1
    edges, cells = [], list[Cell]()
    for i, node in enumerate(nodes):
        y, x = rows[i], node.start
        for j, block in enumerate(node.blocks):
            left = x + j + (GAP if j == 0 else 0)
            cells.append((left, y, x + j + 1 - left, 0.5, block))
        if node.parent is not None:
            middle = x + GAP / 2
            edges += [[(x, rows[node.parent] + 0.25), (middle, rows[node.parent] + 0.25), (middle, y + 0.25),
                       (x + GAP, y + 0.25)]]  # fmt: skip
        room = max(8, int(len(node.blocks) * 100 / max(widest, 4)))
        owner = f"[key {node.owner + 1}] " if several and node.parent is None else ""
        text = f"{node.last_used}· {owner}{' '.join(node.text.split())}"
        ax.text(x + GAP, y - 0.06, text if len(text) <= room else text[: room - 1] + "…", fontsize=7, va="bottom",
                color=INK, family="monospace")  # fmt: skip
    ax.add_collection(LineCollection(edges, colors=INK, linewidths=1), autolim=False)
    _cells(ax, cells, number)
    if not nodes:
        ax.text(0.1, 0.3, "the tree is empty", fontsize=9)
    ax.set_xlim(-0.05, max(widest, 4) + 0.1)
    ax.set_ylim(most + 0.65, -0.35)
    ax.axis("off")


def _chain(ax: Any, links: Sequence[LinkView], number: str, lines: int) -> None:
    cells = list[Cell]()
    for i, link in enumerate(links):
        x, y = i % COLUMNS, i // COLUMNS
        cells.append((x + 0.62, y + 0.1, 0.3, 0.75, link.block))
        ax.text(x + 0.05, y + 0.5, f"{link.digest}\n({link.parent or 'key'})", fontsize=7, va="center", color=INK,
                family="monospace")  # fmt: skip
    _cells(ax, cells, number)
    ax.set_xlim(0, COLUMNS)
    ax.set_ylim(lines, 0)
    ax.axis("off")


def _cells(ax: Any, cells: Sequence[Cell], number: str) -> None:
    """One collection for each look: a patch per block would be slow to draw."""
    for looks, wanted in (
        ({"facecolor": SKY, "edgecolor": "white", "linewidth": 1}, lambda b: b.holders == 0 and b.place != 1),
        ({"facecolor": ORANGE, "edgecolor": "white", "linewidth": 1, "hatch": "//"}, lambda b: b.holders > 0),
        ({"facecolor": SKY, "edgecolor": RED, "linewidth": 2}, lambda b: b.place == 1),
    ):
        boxes = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h, block in cells if wanted(block)]
        if boxes:
            ax.add_collection(PolyCollection(boxes, **looks), autolim=False)
    for x, y, w, h, block in cells:
        back = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85} if block.holders else None
        ax.text(x + w / 2, y + h / 2, _number(block, number), ha="center", va="center", fontsize=8, color=INK,
                bbox=back)  # fmt: skip


def _number(block: BlockView, number: str) -> str:
    if number == "eviction":
        return "–" if block.place is None else str(block.place)
    return str(block.block if number == "block" else block.holders)


def _in_words(now: Snapshot, step: int, steps: int) -> str:
    blocks = [block for node in now.nodes for block in node.blocks]
    held = sum(block.holders > 0 for block in blocks)
    first = next((block.block for block in blocks if block.place == 1), None)
    recent = min(now.nodes, key=lambda node: node.last_used, default=None)
    nodes = "1 node" if len(now.nodes) == 1 else f"{len(now.nodes)} nodes"
    words = f"Step {step} of {steps}: {now.label}. The radix tree has {nodes} with {len(blocks)} blocks, "
    words += (
        f"{held} of them held by requests; the hash index has {len(now.links)} blocks. {now.free} blocks are free. "
    )
    words += f"Block {first} would be evicted next. " if first is not None else "Nothing can be evicted. "
    return words + (f"Used last: {' '.join(recent.text.split())[:40]!r}." if recent else "")


def radix_tree(snapshots: Sequence[Snapshot], step: int = 1) -> View:
    """Step through a prefix cache: nodes and their blocks, which requests hold them, and what would be evicted first.

    step: where to begin, from 1; it is the one that is seen without a front end.
    """
    last = max(1, len(snapshots))
    wide = {"description_width": "80px"}
    return View(
        {
            "step": IntSlider(min(step, last), 1, last, description="Step", style=wide, layout={"width": "560px"},
                              continuous_update=False),
            "number": Dropdown(options=[(text, name) for name, text in NUMBERS.items()], value="block",
                               description="Number", style=wide),
        },
        lambda step, number: draw(snapshots, step, number),
    )  # fmt: skip
