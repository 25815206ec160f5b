"""The layout explorer: which part of each matrix a rank of several holds, and what it shows the others for a step.

Shares are those of the engine (`features/parallel/shares.py`), the number of all-reduces is `theory.collectives`'.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from ipywidgets import Dropdown, IntSlider
from matplotlib.patches import Rectangle

from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, Shown, View, figure, show
from reference_impl.features.parallel.shares import Share, columns, divided, head_shares
from reference_impl.theory.collectives import all_reduce_message, all_reduces_per_token
from reference_impl.theory.model_shapes import ModelShape, model
from reference_impl.theory.units import format_bytes

COURSE = ModelShape("course model", 8, 256, 4, 2, 64, 768, 4096, tied_embeddings=True)
MODELS = {"course model, 32 bits": (COURSE, 4)} | {
    f"{name}, 16 bits": (model(name), 2) for name in ("qwen3-0.6b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b")
}  # shape, bytes of a number
SIZES = (1, 2, 3, 4, 8, 16, 32)
TOKENS = (1, 16, 128, 2048)


@dataclass(frozen=True)
class Layout:
    """What one rank of `size` has, and what it shows the others in a step of `tokens` rows that all sample.

    sums, logits: bytes of its tensors in all all-reduces and in the gather of logits; 0 where there is one rank.
    copies: how many ranks keep the same KV head. weight_bytes: of its matrices; norms are left out.
    """

    queries: Share
    keys: Share
    columns: Share
    vocabulary: Share
    copies: int
    weight_bytes: int
    num_sums: int
    sums: int
    logits: int


def layout(shape: ModelShape, size: int, rank: int, tokens: int, bytes_per_value: int) -> Layout:
    """ValueError, with the sizes that fit, where heads cannot be divided among so many ranks."""
    queries, keys = head_shares(shape.num_heads, shape.num_kv_heads, size)[rank]
    mlp = columns(shape.intermediate_size, size)[rank]
    vocabulary = divided(shape.vocab_size, size)[rank]
    rows = (2 * queries.length + 2 * keys.length) * shape.head_dim + (2 + shape.gated_mlp) * mlp.length
    rows = shape.layers * rows + (1 if shape.tied_embeddings else 2) * vocabulary.length
    num_sums = int(all_reduces_per_token(shape.layers)) + 1 if size > 1 else 0  # and that of the embedding
    sums = num_sums * int(all_reduce_message(tokens, shape.hidden_size, bytes_per_value))
    logits = tokens * vocabulary.length * bytes_per_value if size > 1 else 0
    copies = max(1, size // shape.num_kv_heads)
    weights = rows * shape.hidden_size * bytes_per_value
    return Layout(queries, keys, mlp, vocabulary, copies, weights, num_sums, sums, logits)


def draw(name: str, size: int, rank: int, tokens: int) -> Shown:
    """The matrices of a layer, the embedding and the lm_head, the rank's part of each hatched; below, what it shows."""
    shape, bytes_per_value = MODELS[name]
    rank = min(rank, size - 1)
    try:
        found = layout(shape, size, rank, tokens, bytes_per_value)
    except ValueError as error:
        fig = figure(8.4, 0.9)
        why = textwrap.fill(f"{name}: {error}", 110)
        fig.text(0.01, 0.9, why, va="top", fontsize=9, color=INK)
        return show(fig, " ".join(why.split()))
    text = _in_words(name, size, rank, tokens, found)
    fig = figure(8.4, 3.1)
    fig.set_layout_engine("none")
    _matrices(fig.add_axes((0.0, 0.0, 1.0, 0.80)), found, size, shape.layers)
    fig.text(0.01, 0.98, text, va="top", fontsize=9, color=INK)
    return show(fig, " ".join(text.split()))


def _in_words(name: str, size: int, rank: int, tokens: int, found: Layout) -> str:
    def ids(share: Share) -> str:
        last = share.start + share.length - 1
        return f"{share.start:,}" if share.length == 1 else f"{share.start:,} to {last:,}"

    heads = (
        f"query heads {ids(found.queries)} of {found.queries.whole}, KV heads {ids(found.keys)} of {found.keys.whole}"
    )
    if found.copies > 1:
        heads += f" (each kept by {found.copies} ranks)"
    lines = [
        f"{name}: rank {rank} of {size}. {heads[0].upper()}{heads[1:]}.",
        f"MLP columns {ids(found.columns)}, tokens {ids(found.vocabulary)} of the vocabulary; "
        f"matrices {format_bytes(found.weight_bytes)}.",
    ]
    rows = "1 row" if tokens == 1 else f"{tokens:,} rows"
    if size == 1:
        return "\n".join([*lines, "One rank has all of it, and shows nothing to others."])
    lines.append(
        f"A step of {rows}: {found.num_sums} all-reduces, {format_bytes(found.sums)}; logits gathered, "
        f"{format_bytes(found.logits)}; in all {format_bytes(found.sums + found.logits)} shown by this rank."
    )
    return "\n".join(lines)


def _matrices(ax: Any, found: Layout, size: int, layers: int) -> None:
    """Six matrices as [inputs, outputs], one behind the other; cut across where a rank has some inputs, down where it
    has some outputs."""
    # name, share, by outputs, width and height of the picture, what follows
    parts = [
        ("embedding", found.vocabulary, False, 0.8, 2.0, "all-reduce"),
        ("Q K V", found.queries, True, 1.3, 1.2, ""),
        ("O", found.queries, False, 1.0, 1.2, "all-reduce"),
        ("gate, up", found.columns, True, 2.0, 1.2, ""),
        ("down", found.columns, False, 1.0, 2.0, "all-reduce"),
        ("lm_head", found.vocabulary, True, 2.0, 1.2, "gather"),
    ]
    x, centre, ends = 0.25, 1.75, dict[str, float]()
    for name, share, by_outputs, width, height, then in parts:
        low = centre - height / 2
        ax.add_patch(Rectangle((x, low), width, height, facecolor="white", edgecolor=GREY, linewidth=1.2))
        start, part = share.start / share.whole, share.length / share.whole
        if by_outputs:
            mine = (x + width * start, low), width * part, height
        else:  # the first input on top
            mine = (x, low + height * (1 - start - part)), width, height * part
        ax.add_patch(Rectangle(*mine, facecolor=BLUE, edgecolor="white", hatch="///", linewidth=0, alpha=0.85))
        ax.text(x + width / 2, centre + height / 2 + 0.1, name, ha="center", va="bottom", fontsize=9, color=INK)
        cut = "" if size == 1 else "some outputs" if by_outputs else "some inputs"
        ax.text(x + width / 2, low - 0.1, cut, ha="center", va="top", fontsize=8, color=INK)
        x += width
        if then and size > 1:
            ax.text(x + 0.42, centre, "Σ" if then == "all-reduce" else "| |", ha="center", va="center", fontsize=14,
                    color=ORANGE, fontweight="bold")  # fmt: skip
            ax.text(x + 0.42, centre - 0.28, then, ha="center", va="top", fontsize=7.5, color=INK)
        x += 0.84 if then else 0.3
        ends[name] = x
    left, right = ends["embedding"] - 0.05, ends["down"] - 0.9
    ax.plot([left, left, right, right], [0.42, 0.32, 0.32, 0.42], color=INK, linewidth=0.8)
    ax.text((left + right) / 2, 0.26, f"each of {layers} layers", ha="center", va="top", fontsize=8, color=INK)
    ax.set_xlim(0, x)
    ax.set_ylim(0, 3.5)
    ax.axis("off")


def layout_explorer(name: str = "llama-3-70b, 16 bits", size: int = 4, rank: int = 1, tokens: int = 1) -> View:
    """Choose a model, the number of ranks, one of them, and the rows of a step. KeyError for a model not in MODELS."""
    if name not in MODELS:
        raise KeyError(f"unknown model {name!r}; expected one of {list(MODELS)}")
    wide, room = {"description_width": "90px"}, {"width": "340px"}
    return View(
        {
            "name": Dropdown(options=list(MODELS), value=name, description="Model", style=wide, layout=room),
            "size": Dropdown(options=SIZES, value=size, description="Ranks", style=wide, layout=room),
            "rank": IntSlider(
                rank, 0, max(SIZES) - 1, description="Rank", style=wide, layout=room, continuous_update=False
            ),
            "tokens": Dropdown(options=TOKENS, value=tokens, description="Rows", style=wide, layout=room),
        },
        draw,
    )
