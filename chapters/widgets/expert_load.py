"""Experts on ranks: what each rank computes, with a skew, replicas of hot experts, and a placement by load."""

from __future__ import annotations

from collections.abc import Sequence

from ipywidgets import Dropdown

from chapters.widgets.figure import BLUE, ORANGE, RED, Shown, View, figure, show, tidy
from reference_impl.theory import experts

NUM_EXPERTS = 64
SKEWS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
REPLICAS = (0, 16, 32, 64)  # divided evenly by all numbers of ranks


def placement_of(loads: Sequence[float], ranks: int, replicas: int, placed: bool) -> list[list[int]]:
    """The experts of each rank: by load, or in order, where only the hottest have replicas, at the ranks in turn."""
    if placed:
        return experts.placed(loads, ranks, replicas)
    counts = experts.replicas(loads, len(loads) + replicas)
    slots = [expert for expert, count in enumerate(counts) for _ in range(count)]
    each = len(slots) // ranks
    return [slots[rank * each : (rank + 1) * each] for rank in range(ranks)]


def draw(skew: float, ranks: int, replicas: int, placed: bool) -> Shown:
    """A bar per rank; the busiest one is hatched. Experts' popularity is 1 / r^skew, the r-th in order of number."""
    loads = [float(rank) ** -skew for rank in range(1, NUM_EXPERTS + 1)]
    placement = placement_of(loads, ranks, replicas, placed)
    work = experts.rank_loads(loads, placement)
    mean = sum(work) / ranks
    ratio, busiest = experts.imbalance(work), work.index(max(work))
    fig = figure(7.4, 2.6)
    ax = fig.subplots()
    bars = ax.bar(range(ranks), [load / mean for load in work], color=BLUE, edgecolor="white")
    bars[busiest].set_facecolor(ORANGE)
    bars[busiest].set_hatch("//")
    ax.axhline(1, color=RED, linestyle="--", linewidth=1)
    tidy(ax, "rank (dashed: mean)", "work, over the mean")
    words = f"The busiest rank, {busiest}, has {ratio:.2f} times the mean: a step takes that many times as long."
    ax.set_title(words, fontsize=8, loc="left")
    how = "placed by load" if placed else "in order"
    return show(fig, f"{NUM_EXPERTS} experts and {replicas} replicas on {ranks} ranks, {how}, skew {skew:g}. {words}")


def expert_load(skew: float = 1.0, ranks: int = 8) -> View:
    """What each rank computes of a mixture whose experts are unequally popular."""
    wide = {"description_width": "100px"}
    return View(
        {
            "skew": Dropdown(options=SKEWS, value=skew, description="Skew", style=wide),
            "ranks": Dropdown(options=(4, 8, 16), value=ranks, description="Ranks", style=wide),
            "replicas": Dropdown(options=REPLICAS, value=0, description="Replicas", style=wide),
            "placed": Dropdown(
                options=[("in order", False), ("by load", True)], value=False, description="Placement", style=wide
            ),
        },
        draw,
    )
