"""Experts over ranks: how unequal the work is, and what replicas of hot experts and a capacity do about it.

loads: for each expert of a layer how many (token, expert) pairs it gets, as an engine counts them or a router is
expected to send them. A step takes as long as its busiest rank: the others wait at the second all-to-all.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence


def imbalance(rank_loads: Sequence[float]) -> float:
    """How many times as long a step takes as it would with the work spread evenly: the largest over the mean. 1 where
    there is no work."""
    total = sum(rank_loads)
    return max(rank_loads) * len(rank_loads) / total if total else 1.0


def rank_loads(loads: Sequence[float], placement: Sequence[Sequence[int]]) -> list[float]:
    """What each rank computes. placement: the experts of each rank; one that stands in several places has as many
    replicas, which share its pairs evenly. ValueError for an expert that is nowhere, or unknown."""
    copies = Counter(expert for experts in placement for expert in experts)
    if (wrong := copies.keys() ^ {*range(len(loads))}) != set():
        raise ValueError(f"placement: expected each expert from 0 to {len(loads) - 1}, wrong for {sorted(wrong)}")
    return [sum(loads[expert] / copies[expert] for expert in experts) for experts in placement]


def replicas(loads: Sequence[float], num_slots: int) -> list[int]:
    """How many slots each expert gets: one, and of those left over the next always goes to the expert whose replicas
    have most work each. ValueError for fewer slots than experts."""
    if num_slots < len(loads):
        raise ValueError(f"num_slots: expected at least {len(loads)}, one for each expert, got {num_slots}")
    counts = [1] * len(loads)
    hottest = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(hottest)
    for _ in range(num_slots - len(loads)):
        _, expert = hottest[0]
        counts[expert] += 1
        heapq.heapreplace(hottest, (-loads[expert] / counts[expert], expert))
    return counts


def placed(loads: Sequence[float], num_ranks: int, num_redundant: int = 0) -> list[list[int]]:
    """The experts of each rank, as many on each: the heaviest first, each to the rank that has least to do and a slot
    left. num_redundant: slots for replicas, see `replicas`. As in DeepSeek's EPLB (2025), without its groups and nodes;
    not always the best placement. ValueError where the slots cannot be divided by the ranks.
    """
    num_slots = len(loads) + num_redundant
    if num_slots % num_ranks:
        raise ValueError(
            f"{len(loads)} experts and {num_redundant} replicas are not divided evenly by {num_ranks} ranks"
        )
    counts = replicas(loads, num_slots)
    pieces = [(loads[expert] / count, expert) for expert, count in enumerate(counts) for _ in range(count)]
    found: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    for load, expert in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
        free = [rank for rank in range(num_ranks) if len(found[rank]) < num_slots // num_ranks]
        rank = min(free, key=lambda rank: (expert in found[rank], work[rank], rank))
        found[rank].append(expert)
        work[rank] += load
    return found


def capacity(loads: Sequence[float], factor: float) -> int:
    """The most pairs that an expert computes with a capacity factor: ceil(factor * pairs / experts) (GShard, 2021)."""
    return math.ceil(factor * sum(loads) / len(loads))


def dropped_share(loads: Sequence[float], factor: float) -> float:
    """The share of pairs beyond their expert's capacity, which are not computed: what a token gets then depends on what
    else is in the batch. 0 where there is no work."""
    most, total = capacity(loads, factor), sum(loads)
    return sum(max(0.0, load - most) for load in loads) / total if total else 0.0
