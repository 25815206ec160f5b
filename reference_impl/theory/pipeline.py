"""A model cut into stages (pipeline parallelism): when each stage works, and what share of the time stages are idle.

A batch is a step's tokens: a micro-batch. A stage takes one batch at a time, in order, and a batch enters a stage when
it has left the one before it, `hop` seconds later. Inference has a forward pass only (erratum E12.9).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Slot(NamedTuple):
    """What a stage does from `start` to `end`, in seconds: batch `batch`, its token number `turn`, both from 0."""

    batch: int
    turn: int
    stage: int
    start: float
    end: float


def schedule(stage_seconds: Sequence[float], batches: int, turns: int = 1, hop: float = 0.0) -> list[Slot]:
    """All that the stages do, by turn, batch and stage. stage_seconds: of one batch in each stage.

    turns: how often each batch goes through. Its next turn begins when the last stage has ended the one before, since
    that samples the token. ValueError for no stage, batch or turn.
    """
    _check(stage_seconds, batches, turns)
    free = [0.0] * len(stage_seconds)  # when each stage is free
    ready = [0.0] * batches  # when each batch may enter the first stage
    found: list[Slot] = []
    for turn in range(turns):
        for batch in range(batches):
            at = ready[batch]
            for stage, seconds in enumerate(stage_seconds):
                start = max(at, free[stage])
                free[stage] = start + seconds
                found.append(Slot(batch, turn, stage, start, free[stage]))
                at = free[stage] + hop
            ready[batch] = free[-1]
    return found


def idle_share(slots: Sequence[Slot], begin: float = 0.0, end: float | None = None) -> float:
    """The share of all stages' time from `begin` to `end` in which they do nothing. end: None for the last slot's."""
    last = max(slot.end for slot in slots) if end is None else end
    if last <= begin:
        raise ValueError(f"end: expected a time after {begin}, got {last}")
    busy = sum(max(0.0, min(slot.end, last) - max(slot.start, begin)) for slot in slots)
    return 1 - busy / ((last - begin) * (1 + max(slot.stage for slot in slots)))


def bubble(stages: int, batches: int) -> float:
    """The idle share of equal stages that are filled once, do so many batches and run empty: (p - 1) / (m + p - 1)
    (Huang et al. 2019, GPipe)."""
    _check([1.0] * stages, batches, 1)
    return (stages - 1) / (batches + stages - 1)


def token_seconds(stage_seconds: Sequence[float], batches: int, hop: float = 0.0) -> float:
    """Seconds from one token of a request to its next one, where so many batches decode all the time.

    A batch's own way takes the sum of the stages and a hop between two; and no stage does more than one batch at a
    time, so the slowest takes `batches` times its own. The longer of the two binds."""
    _check(stage_seconds, batches, 1)
    return max(sum(stage_seconds) + (len(stage_seconds) - 1) * hop, batches * max(stage_seconds))


def serving_idle_share(stage_seconds: Sequence[float], batches: int, hop: float = 0.0) -> float:
    """The idle share while so many batches decode all the time: of p equal stages without hops, max(0, 1 - m / p)."""
    period = token_seconds(stage_seconds, batches, hop)
    return 1 - batches * sum(stage_seconds) / (len(stage_seconds) * period)


def _check(stage_seconds: Sequence[float], batches: int, turns: int) -> None:
    if not stage_seconds or batches < 1 or turns < 1:
        raise ValueError(
            f"expected at least one stage, batch and turn, got {len(stage_seconds)}, {batches} and {turns}"
        )
