"""Mixed precision: which layers get which scheme under a budget of bits.

Each layer is tried in each scheme while all others stay as they are; the harm done (KL to the unquantized model, or the
error of the output) is taken to add up over layers. Then the choice of least harm is exact: a table of what can be
had for how many bits, a layer at a time, without what another choice beats in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """The cost of a scheme. bits: of the layer's weight, scales included. harm: what it does to the model, 0 for
    none."""

    bits: int
    harm: float


def allocate(costs: Mapping[str, Mapping[str, Cost]], budget: int) -> dict[str, str]:
    """{layer: scheme} of least harm in sum with at most `budget` bits. costs: {layer: {scheme: Cost}}.

    Raises ValueError where even the smallest schemes do not fit.
    """
    for layer, choices in costs.items():
        if not choices:
            raise ValueError(f"allocate: {layer}: expected at least one scheme, got none")
    least_left = sum(min(cost.bits for cost in choices.values()) for choices in costs.values())
    if least_left > budget:
        raise ValueError(
            f"budget: expected at least {least_left:,} bits, which the smallest schemes take, got {budget:,}"
        )
    # bits -> (harm, the choices made, last first, as nested pairs)
    table: dict[int, tuple[float, tuple]] = {0: (0.0, ())}
    for choices in costs.values():
        least_left -= min(cost.bits for cost in choices.values())
        grown: dict[int, tuple[float, tuple]] = {}
        for bits, (harm, made) in table.items():
            for scheme, cost in choices.items():
                total, worse = bits + cost.bits, harm + cost.harm
                if total + least_left <= budget and (total not in grown or worse < grown[total][0]):
                    grown[total] = (worse, (scheme, made))
        table = _pareto(grown)
    made, chosen = min(table.values(), key=lambda entry: entry[0])[1], []
    while made:
        chosen.append(made[0])
        made = made[1]
    return dict(zip(costs, reversed(chosen), strict=True))


def _pareto(table: dict[int, tuple[float, tuple]]) -> dict[int, tuple[float, tuple]]:
    """The table without entries that another beats in bits and harm."""
    kept, least = {}, float("inf")
    for bits in sorted(table):
        if table[bits][0] < least:
            kept[bits], least = table[bits], table[bits][0]
    return kept
