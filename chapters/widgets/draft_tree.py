"""The tree viewer: drafts as a tree, which of them each one sees, and the path that the target keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ipywidgets import Dropdown
from matplotlib.patches import Rectangle

from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, SKY, Shown, View, figure, show


@dataclass(frozen=True)
class Tree:
    """Drafts, parents first. names: what each says; parents: index of the draft before, -1: the text's last token.
    chances: with which the draft expects the whole path to be kept. kept: the path that the target has kept."""

    names: tuple[str, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...]
    kept: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.names)
        if not n or len(self.parents) != n or len(self.chances) != n:
            raise ValueError(f"expected a parent and a chance for each of {n} names (at least one), got "
                             f"{len(self.parents)} and {len(self.chances)}")  # fmt: skip
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"parents: expected draft {node}'s parent in [-1, {node}), got {parent}")

    def path(self, node: int) -> list[int]:
        """From the first draft to `node`."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    @property
    def depths(self) -> list[int]:
        return [len(self.path(node)) for node in range(len(self.names))]

    @property
    def mask(self) -> np.ndarray:
        """[n, n] bool: of each draft, which drafts it attends to: its path. The text before it sees, too."""
        found = np.zeros((len(self.names),) * 2, bool)
        for node in range(len(self.names)):
            found[node, self.path(node)] = True
        return found


def draw(tree: Tree, node: int) -> Shown:
    """Left: the tree; the chosen draft's path framed, the kept one hatched. Right: the mask, its row framed."""
    path, depths = tree.path(node), tree.depths
    fig = figure(8.4, 3.5)
    fig.set_layout_engine("none")
    _tree(fig.add_axes((0.01, 0.04, 0.58, 0.78)), tree, path)
    _mask(fig.add_axes((0.67, 0.12, 0.31, 0.66)), tree, node)
    words = " → ".join(tree.names[at] for at in path)
    text = (
        f"{len(tree.names)} drafts, {max(depths)} deep. Draft {node}, {tree.names[node]!r}, attends to the text and "
        f"to {len(path)} of them: {words}."
    )
    kept = " → ".join(tree.names[at] for at in tree.kept) or "none"
    tokens = "1 token" if not tree.kept else f"{len(tree.kept) + 1} tokens"
    below = f"Kept: {kept} ({tokens} with the target's own after it)"
    fig.text(0.01, 0.975, f"{text}\n{below}", va="top", fontsize=9, color=INK)
    return show(fig, f"{text} Kept by the target: {kept}.")


def _places(tree: Tree) -> list[float]:
    """A height for each draft: leaves one below another, a parent in the middle of its children."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    height, nxt = [0.0] * len(tree.names), 0.0

    def place(node: int) -> float:
        nonlocal nxt
        below = [place(child) for child in children.get(node, ())]
        if not below:
            nxt -= 1
        found = (below[0] + below[-1]) / 2 if below else nxt
        if node >= 0:
            height[node] = found
        return found

    place(-1)
    return height


def _tree(ax: Any, tree: Tree, path: Sequence[int]) -> None:
    heights, depths = _places(tree), tree.depths
    roots = [heights[node] for node, parent in enumerate(tree.parents) if parent < 0]
    root = (0.0, (roots[0] + roots[-1]) / 2)
    ax.text(*root, "text", ha="center", va="center", fontsize=8.5, bbox={"facecolor": "white", "edgecolor": GREY})
    for node, parent in enumerate(tree.parents):
        x, y = float(depths[node]), heights[node]
        start = root if parent < 0 else (float(depths[parent]), heights[parent])
        ax.plot([start[0] + 0.16, x - 0.20], [start[1], y], color=BLUE if node in path else GREY,
                linewidth=2.2 if node in path else 1.0)  # fmt: skip
        colour = GREEN if node in tree.kept else SKY if node in path else "white"
        box = {"facecolor": colour, "edgecolor": BLUE if node in path else GREY, "boxstyle": "round,pad=0.25"}
        mark = "✓ " if node in tree.kept else ""
        ax.text(x, y, f"{mark}{tree.names[node]}\n{tree.chances[node]:.2f}", ha="center", va="center", fontsize=7.5,
                bbox=box | {"alpha": 0.9}, color=INK)  # fmt: skip
    ax.set_xlim(-0.3, max(depths) + 0.4)
    ax.set_ylim(min(heights) - 0.6, max(heights) + 0.6)
    ax.axis("off")


def _mask(ax: Any, tree: Tree, node: int) -> None:
    n = len(tree.names)
    ax.imshow(np.where(tree.mask, 0.75, 0.0), cmap="Blues", vmin=0, vmax=1, interpolation="none")
    ax.add_patch(Rectangle((-0.5, node - 0.5), n, 1, fill=False, edgecolor=ORANGE, linewidth=2.2))
    every = max(1, n // 12)
    ax.set_xticks(range(0, n, every))
    ax.set_yticks(range(0, n, every))
    ax.tick_params(labelsize=7.5)
    ax.set_title("which drafts each draft sees", fontsize=8.5, loc="left")
    ax.set_xlabel("key: draft", fontsize=8)
    ax.set_ylabel("query: draft", fontsize=8)


def draft_tree(tree: Tree, node: int | None = None) -> View:
    """Choose a draft; see its path in the tree and its row in the mask."""
    options = [(f"{at}: {' → '.join(tree.names[i] for i in tree.path(at))}", at) for at in range(len(tree.names))]
    chosen = len(tree.names) - 1 if node is None else node
    wide = {"description_width": "90px"}
    return View(
        {"node": Dropdown(options=options, value=chosen, description="Draft", style=wide, layout={"width": "480px"})},
        lambda node: draw(tree, node),
    )
