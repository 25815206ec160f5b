"""Lab 12's ranks: they write what one process writes, whoever divides the model and whoever adds."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_impl.assembly.lab_parts import LabEngine, course_llm
from reference_impl.assembly.lab_parts.ranks import RankLabEngine, sizes_to_divide

PROMPT = [5, 17, 40, 9, 33, 2, 61]


class Line:
    """A port of two ranks, over queues."""

    num_ranks = 2

    def __init__(self, rank: int, queues: dict[int, SimpleQueue[Tensor]]):
        self.rank, self.queues = rank, queues

    def exchange(self, messages: dict[int, Tensor], sources: Sequence[int]) -> Mapping[int, Tensor]:
        for to, x in messages.items():
            self.queues[to].put(x.clone())
        return {source: self.queues[self.rank].get(timeout=600) for source in sources}

    def send(self, to: int, message: Tensor) -> None:
        raise AssertionError("one stage sends no messages")

    def recv(self, source: int) -> Tensor:
        raise AssertionError("one stage receives no messages")


def alone() -> list[int]:
    return tokens_of(LabEngine(course_llm("draft"), {"num_blocks": 16}))


def tokens_of(engine: LabEngine) -> list[int]:
    engine.add(PROMPT, 3)
    return engine.run()["0"]


def written(add: Any, columns: int, tokens: int) -> list[list[int]]:
    """What two ranks write, of which the first has so many columns and tokens."""
    num_heads, num_kv_heads, all_columns, vocab = sizes_to_divide()
    assert (num_heads, num_kv_heads) == (2, 1)
    parts = [((0, 1, 0, 1), (0, columns), (0, tokens)), ((1, 2, 0, 1), (columns, all_columns), (tokens, vocab))]
    queues: dict[int, SimpleQueue[Tensor]] = {rank: SimpleQueue() for rank in range(2)}
    with ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(lambda r: tokens_of(RankLabEngine(Line(r, queues), add, parts)), rank) for rank in range(2)
        ]
        return [each.result() for each in found]


@pytest.mark.parametrize(("columns", "tokens"), [(128, 2048), (100, 4000)])
def test_two_ranks_write_what_one_process_writes(columns: int, tokens: int) -> None:
    calls, lock = list[tuple[int, ...]](), threading.Lock()

    def add(x: Tensor, expected: Tensor) -> Tensor:
        with lock:
            calls.append(tuple(x.shape))
        return expected

    assert written(add, columns, tokens) == [alone()] * 2
    # The draft model has two layers: one sum for the embedding, two for each layer, in each of 3 steps on both ranks.
    assert len(calls) == 2 * 3 * 5
    assert {shape[1] for shape in calls} == {128}


def test_a_sum_that_leaves_the_other_rank_out_changes_the_text() -> None:
    assert written(lambda x, expected: torch.zeros_like(x), 128, 2048)[0] != alone()
