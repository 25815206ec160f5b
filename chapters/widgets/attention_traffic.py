"""The memory-traffic counter: bytes that a head's attention over a prompt moves, over `theory.attention_traffic`."""

from __future__ import annotations

from ipywidgets import SelectionSlider
from matplotlib.patches import Rectangle

from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, Shown, View, figure, show
from reference_impl.theory import attention_traffic as theory
from reference_impl.theory.hardware import device
from reference_impl.theory.units import KiB, format_bytes

TOKENS = [2**n for n in range(9, 18)]  # 512 to 131,072
HEAD_DIMS = [64, 80, 96, 128, 192, 256]
ROWS = [16, 32, 64, 128, 256]  # queries of a tile in FlashAttention-2
SRAM = [48, 64, 100, 163, 192, 227]  # KiB of shared memory
PARTS = (
    ("scores", "scores and probabilities", GREY, "xx"),
    ("q_read", "Q read", SKY, ""),
    ("kv_read", "K and V read", BLUE, "//"),
    ("o_read", "O read", PURPLE, ".."),
    ("o_written", "O written", ORANGE, ""),
    ("statistics", "maxima and sums", GREEN, "\\\\"),
)
BYTES = 2  # of a value; maxima and sums are fp32 in real kernels, which changes less than can be seen


def orders(n: int, d: int, rows: int, sram: int) -> dict[str, theory.Moves]:
    """What each way moves, in values. sram: KiB."""
    keys = theory.flash1_key_rows(d, sram * KiB // BYTES)
    return {
        "unfused": theory.unfused_moves(n, d),
        f"FlashAttention 1, {keys} keys a tile": theory.flash1_moves(n, d, keys),
        f"FlashAttention 2, {rows} queries a tile": theory.flash2_moves(n, d, rows),
        "floor: everything once": theory.flash2_moves(n, d, n),
    }


def draw(n: int, d: int, rows: int, sram: int) -> Shown:
    """A bar for each way, cut by tensor; beside it the bytes, and how many times fewer than unfused."""
    ways = orders(n, d, rows, sram)
    unfused = ways["unfused"].total
    longest = max(moves.total for moves in ways.values())
    fig = figure(8.2, 2.7)
    fig.set_layout_engine("none")
    ax = fig.add_axes((0.26, 0.2, 0.52, 0.66))
    said = []
    for i, (name, moves) in enumerate(ways.items()):
        start = 0.0
        for field, _, colour, hatch in PARTS:
            width = getattr(moves, field) / longest
            look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
            ax.add_patch(Rectangle((start, -i - 0.35), width, 0.7, **look))
            start += width
        ax.add_patch(Rectangle((0, -i - 0.35), start, 0.7, fill=False, edgecolor=INK, linewidth=0.7))
        fewer = _compared(unfused, moves.total) if i else f"of it the scores: {moves.scores / unfused:.1%}"
        ax.text(1.02, -i, f"{format_bytes(BYTES * moves.total)}\n{fewer}", fontsize=8, va="center", color=INK)
        said.append(f"{name}: {format_bytes(BYTES * moves.total)}, {fewer}")
    ax.set_xlim(0, 1)
    ax.set_ylim(-len(ways) + 0.5, 0.5)
    ax.set_xticks([])
    ax.set_yticks([-i for i in range(len(ways))], [name.replace(", ", ",\n") for name in ways], fontsize=8)
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    for i, (_, label, colour, hatch) in enumerate(PARTS):
        x, y = 0.03 + 0.33 * (i % 3), 0.09 - 0.07 * (i // 3)
        fig.patches.append(
            Rectangle((x, y), 0.02, 0.045, facecolor=colour, hatch=hatch, edgecolor="white", transform=fig.transFigure)
        )
        fig.text(x + 0.025, y, label, fontsize=8, color=INK)
    what = f"One head over {n:,} tokens, head_dim {d}, 16-bit values, no causal mask, no L2 cache"
    fits = "" if sram * KiB <= device("H100").chip.shared_bytes_per_sm else " (more than an H100 has)"
    fig.text(0.01, 0.99, f"{what}; {sram} KiB of shared memory{fits}", fontsize=9, va="top", color=INK)
    return show(fig, f"{what}. With {sram} KiB of shared memory: {'; '.join(said)}.")


def _compared(unfused: float, moved: float) -> str:
    return f"{unfused / moved:.3g} times less" if moved <= unfused else f"{moved / unfused:.3g} times more"


def attention_traffic(tokens: int = 8192, head_dim: int = 128, rows: int = 128, sram: int = 100) -> View:
    """Choose length, head_dim, query tile and shared memory; see the bytes of each order. sram: KiB.

    Numbers are rounded to the nearest choice.
    """
    wide, layout = {"description_width": "150px"}, {"width": "460px"}

    def choose(options: list[int], value: int, label: str, unit: str = "") -> SelectionSlider:
        nearest = min(options, key=lambda n: abs(n - value))
        return SelectionSlider(
            options=[(f"{n:,}{unit}", n) for n in options], value=nearest, description=label, style=wide,
            layout=layout, continuous_update=False,
        )  # fmt: skip

    return View(
        {
            "n": choose(TOKENS, tokens, "Tokens"),
            "d": choose(HEAD_DIMS, head_dim, "head_dim"),
            "rows": choose(ROWS, rows, "Queries a tile (FA-2)"),
            "sram": choose(SRAM, sram, "Shared memory (FA-1)", " KiB"),
        },
        draw,
    )
