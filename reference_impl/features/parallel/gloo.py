"""Ranks as processes that meet through gloo, torch.distributed's library for CPUs, over TCP on this machine.

For processors on which memory that processes share would need more care (see shared_memory.py), and to compare. A
meeting is two all-gathers, of a header and of bytes, since gloo compares neither calls nor shapes; sums are taken here,
in the order of ranks, since gloo's own depends on where in a tensor a number stands, from three ranks on. What each
rank does stands on the same board as always.
"""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from reference_impl.features.parallel.meeting import check_calls
from reference_impl.features.parallel.shared_memory import CALLS, WORDS, Board, BoardRank, Header, words_of
from reference_impl.interfaces.collectives import CollectiveError

dist: Any = torch.distributed  # whose stubs know nothing of gloo


class GlooRank(BoardRank):
    """store: a file that all ranks name, in which they leave their addresses. seconds: how long this rank waits for the
    others of its stage; message_seconds: how long for a message."""

    def __init__(
        self, place: int, board: Board, store: Path, seconds: float = 30, width: int | None = None,
        message_seconds: float = 300,
    ):  # fmt: skip
        super().__init__(place, board, seconds, width)
        shared = dist.FileStore(str(store), board.size)
        self._stage = _group(shared, f"stage {self.met.start}", self.rank, self.size, seconds)
        self._all = _group(shared, "all", place, board.size, message_seconds)

    def meet(self, call: str, x: Tensor) -> list[Tensor]:
        began = self.came(call)
        headers = [Header.of(words.tolist()) for words in self._gathered(call, _header(call, x))]
        check_calls({p: CALLS[header.call] for p, header in zip(self.met, headers, strict=True)}, self.step)
        longest = max(header.num_bytes for header in headers)
        mine = x.reshape(-1).view(torch.uint8)
        found = self._gathered(call, torch.nn.functional.pad(mine, (0, longest - len(mine)))) if longest else [mine]
        self.has_waited(began)
        return [each.tensor(data[: each.num_bytes].numpy()) for each, data in zip(headers, cycle(found), strict=False)]

    def send(self, x: Tensor, to: int) -> None:
        data = x.contiguous().reshape(-1).view(torch.uint8)
        for part in (_header("nothing", x), data):
            if len(part):
                self._or_error(self._all.send([part], to, 0), "send to", to)
        self.num_bytes += x.nbytes
        self.go_on()

    def recv(self, source: int) -> Tensor:
        began, words = time.perf_counter_ns(), torch.empty(WORDS, dtype=torch.int64)
        self._or_error(self._all.recv([words], source, 0), "recv from", source)
        header = Header.of(words.tolist())
        data = torch.empty(header.num_bytes, dtype=torch.uint8)
        if header.num_bytes:
            self._or_error(self._all.recv([data], source, 0), "recv from", source)
        self.has_waited(began)
        self.go_on()
        return header.tensor(data.numpy())

    def _gathered(self, call: str, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(self.size)]
        try:
            self._stage.allgather([found], [x]).wait()
        except RuntimeError as error:  # which says an address, and the board which rank
            late, _ = self.board.waited_for(self.met)
            who = " and ".join(f"rank {rank}" for rank in late)
            what = f"{who} did not come ({_short(error)})" if late else _short(error)
            raise CollectiveError(f"rank {self.place}, {call} of step {self.step}: {what}", late) from None
        return found

    def _or_error(self, work: Any, call: str, other: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            what = f"rank {self.place}, {call} rank {other} of step {self.step}: {_short(error)}"
            raise CollectiveError(what, [other]) from None


def _group(store: Any, name: str, rank: int, size: int, seconds: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout, options._threads = timedelta(seconds=seconds), 2
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)


def _header(call: str, x: Tensor) -> Tensor:
    words = words_of(call, x)
    return torch.tensor([*words, *[0] * (WORDS - len(words))])


def _short(error: RuntimeError) -> str:
    """gloo's text without its path and its advice: "Connection closed by peer [127.0.0.1]:37281"."""
    return str(error).rpartition("] ")[2].partition(". ")[0] if "gloo" in str(error) else str(error)
