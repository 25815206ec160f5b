"""Collectives over threads and over shared memory: what they give, and what they say when ranks are not alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_impl.features.parallel.gloo import GlooRank
from reference_impl.features.parallel.meeting import Meeting
from reference_impl.features.parallel.shared_memory import PLACE, Board, SharedMemoryRank
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.interfaces.collectives import CollectiveError

Group = Callable[..., list[Meeting]]


@pytest.fixture(params=["threads", "shared memory", "gloo"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    """group(size, seconds): the ranks, each to be used in a thread of its own."""
    boards: list[Board] = []

    def make(size: int, seconds: float = 30) -> list[Meeting]:
        if request.param == "threads":
            threads = ThreadGroup(size, seconds)
            return [threads.rank(rank) for rank in range(size)]
        boards.append(Board(size))
        if request.param == "gloo":

            def join(rank: int) -> Meeting:
                store = tmp_path / f"ranks {len(boards)}"
                return GlooRank(rank, Board(size, boards[-1].path), store, seconds, message_seconds=seconds)

            with ThreadPoolExecutor(size) as pool:
                return list(pool.map(join, range(size)))
        return [SharedMemoryRank(rank, Board(size, boards[-1].path), seconds) for rank in range(size)]

    yield make
    for board in boards:
        board.close_path()


def on_all(ranks: list[Meeting], call: Callable[[Meeting], Any]) -> list[Any]:
    """What `call` returns on each rank, or the CollectiveError that it raises."""

    def one(rank: Meeting) -> Any:
        try:
            return call(rank)
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_have_the_same_bits_on_all_ranks_and_do_not_depend_on_the_place(group, size: int, dtype: Any) -> None:
    shown = [numbers(rank, 4, 7, dtype=dtype) for rank in range(size)]
    found = on_all(group(size), lambda rank: rank.all_reduce(shown[rank.rank]))
    wide = sum(x.to(torch.promote_types(dtype, torch.float32)) for x in shown)
    assert all(torch.equal(each, wide.to(dtype)) for each in found)
    rows = [x[:1].expand(6, -1) for x in shown]  # equal rows give equal sums, wherever they stand
    found = on_all(group(size), lambda rank: rank.all_reduce(rows[rank.rank]))
    assert all(torch.equal(row, each[0]) for each in found for row in each)


def test_the_parts_of_each_rank(group) -> None:
    def call(c: Meeting) -> Any:
        gathered = c.all_gather(torch.arange(c.rank + 1))
        mine = c.all_to_all([torch.full((2 * to, 3), 10 * c.rank + to) for to in range(c.size)])
        summed = c.reduce_scatter([torch.full((to + 1,), float(c.rank)) for to in range(c.size)])
        told = c.broadcast(torch.tensor(7.5) if c.rank == 1 else None, 1)
        c.barrier()
        return gathered, mine, summed, told

    for rank, (gathered, mine, summed, told) in enumerate(on_all(group(3), call)):
        assert [each.tolist() for each in gathered] == [[0], [0, 1], [0, 1, 2]]
        assert [each.shape for each in mine] == [(2 * rank, 3)] * 3
        assert [each.unique().tolist() for each in mine] == [[10 * r + rank] if rank else [] for r in range(3)]
        assert summed.tolist() == [3.0] * (rank + 1)
        assert told.item() == 7.5


def test_tensors_of_several_pieces_views_and_other_dtypes(group) -> None:
    long = [numbers(rank, PLACE // 4 + 5 + 100_000 * rank) for rank in range(2)]
    gathered = on_all(group(2), lambda c: c.all_gather(long[c.rank]))
    assert all(torch.equal(x, y) for found in gathered for x, y in zip(found, long, strict=True))
    columns = [numbers(rank, 6, 8)[:, ::3] for rank in range(2)]
    assert torch.equal(on_all(group(2), lambda c: c.all_reduce(columns[c.rank]))[1], columns[0] + columns[1])
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = on_all(group(2), lambda c: c.all_gather(codes))[0][1]
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    assert on_all(group(2), lambda c: c.all_gather(torch.tensor(c.rank == 1)))[0][1].item() is True


def test_what_a_rank_does_with_its_tensors_afterwards_reaches_no_other(group) -> None:
    def call(c: Meeting) -> Any:
        x, kept = torch.full((3,), float(c.rank)), []
        for _ in range(50):
            kept += [c.all_gather(x), [c.all_reduce(x)]]
            x += 2
        return kept

    first, second = on_all(group(2), call)
    for turn in range(0, 100, 2):
        assert [each[0].item() for each in first[turn]] == [turn, turn + 1]
        assert torch.equal(first[turn + 1][0], second[turn + 1][0])


def test_calls_and_bytes_are_counted(group) -> None:
    def call(c: Meeting) -> Any:
        c.all_reduce(torch.zeros(10, 4))
        c.all_gather(torch.zeros(3, dtype=torch.float64))
        return c.num_calls, c.num_bytes

    assert on_all(group(2), call) == [(2, 10 * 4 * 4 + 24)] * 2


def test_other_calls_on_other_ranks_are_an_error_that_names_both(group) -> None:
    def call(c: Meeting) -> Any:
        c.step = 12
        return c.barrier() if c.rank == 1 else c.all_reduce(torch.zeros(2))

    for error in on_all(group(3), call):
        assert "step 12: the ranks made different calls" in str(error)
        assert "rank 0 all_reduce, rank 1 barrier, rank 2 all_reduce" in str(error)


def test_other_shapes_are_an_error_that_names_both(group) -> None:
    for error in on_all(group(2), lambda c: c.all_reduce(torch.zeros(2 + c.rank))):
        assert "all_reduce of step 0: expected one shape and dtype everywhere" in str(error)
        assert "rank 0 [2] torch.float32, rank 1 [3] torch.float32" in str(error)


def test_who_does_not_come_is_not_waited_for_without_end(group) -> None:
    found = on_all(group(3, seconds=0.2), lambda c: None if c.rank == 1 else c.all_reduce(torch.zeros(2)))
    assert found[1] is None
    for error in (found[0], found[2]):
        assert isinstance(error, CollectiveError)
        assert "all_reduce of step 0" in str(error)
        assert error.waits_for == (1,)
        assert "rank 1" in str(error)


def test_the_board_names_what_all_others_wait_for() -> None:
    board = Board(3)
    ranks = [SharedMemoryRank(rank, Board(3, board.path), 0.2) for rank in range(3)]
    assert board.waited_for()[0] == []

    def call(c: SharedMemoryRank) -> Any:
        c.barrier()
        c.step = 4
        return None if c.rank == 2 else c.all_gather(torch.zeros(2))

    for error in on_all(ranks, call)[:2]:
        assert error.waits_for == (2,)
        assert "waited 0.2 s in all_gather of step 4 for rank 2" in str(error)
    assert board.waited_for() == ([2], "all_gather of step 4")
    assert board.progress() == 3 + 2
    assert board.path.stat().st_nlink == 0, "no file, which a process that is killed would leave behind"
    board.close_path()
    assert not board.path.exists()


def test_arguments_that_are_wrong_are_named(group) -> None:
    [alone] = group(1)
    with pytest.raises(ValueError, match="broadcast: source: expected a rank from 0 to 0, got 1"):
        alone.broadcast(None, 1)
    with pytest.raises(ValueError, match="broadcast: expected a tensor from rank 0, the source, got None"):
        alone.broadcast(None, 0)
    with pytest.raises(ValueError, match="all_to_all: expected a tensor for each of 1 ranks, got 2"):
        alone.all_to_all([torch.zeros(1), torch.zeros(1)])


def test_messages_come_whole_and_in_order_however_far_the_sender_is_ahead(group) -> None:
    """Of several pieces, of all dtypes, empty, views; a copy, so the sender may go on with its own."""
    sent = [
        numbers(1, PLACE // 4 + 7), numbers(2, 3, 4)[:, ::2], torch.zeros(0, 5), torch.tensor(3, dtype=torch.int64),
        numbers(3, 9, dtype=torch.bfloat16), torch.tensor([True, False]),
        numbers(4, 2 * (PLACE // 8), dtype=torch.float64),
    ]  # fmt: skip

    def call(c: Any) -> list[Tensor]:
        if c.rank == 0:
            for x in sent:
                own = x.clone()
                c.send(own, 1)
                own.zero_()
            return [c.recv(2)]
        if c.rank == 1:
            return [c.recv(0) for _ in sent]
        c.send(torch.ones(2), 0)
        return []

    [answer], received, _ = on_all(group(3), call)
    assert torch.equal(answer, torch.ones(2))
    for mine, its in zip(sent, received, strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its)


def test_a_message_that_does_not_come_is_an_error_that_names_the_sender(group) -> None:
    def call(c: Any) -> Any:
        c.step = 7
        return c.recv(1) if c.rank == 0 else None

    error = on_all(group(2, seconds=0.2), call)[0]
    assert isinstance(error, CollectiveError)
    assert error.waits_for == (1,)
    assert "step 7" in str(error)
    assert "rank 1" in str(error)


@pytest.mark.parametrize("works", [True, False])
def test_a_message_is_waited_for_while_any_rank_goes_on(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender computes for 10 s on a clock of the test, where 3 s without a sign of life are the limit."""
    board = Board(2)
    first, second = (SharedMemoryRank(rank, Board(2, board.path), 3) for rank in range(2))
    board.close_path()
    now = 0

    def pause(seconds: float = 0) -> None:
        nonlocal now
        now += 10**9
        if now == 10 * 10**9:
            first.send(torch.ones(1), 1)
        elif works:
            first.go_on()

    monkeypatch.setattr("time.perf_counter_ns", lambda: now)
    monkeypatch.setattr("time.sleep", pause)
    monkeypatch.setattr("os.sched_yield", pause)
    if works:
        assert torch.equal(second.recv(0), torch.ones(1))
    else:
        with pytest.raises(CollectiveError, match="rank 1 waited 3 s in recv from rank 0 of step 0"):
            second.recv(0)
