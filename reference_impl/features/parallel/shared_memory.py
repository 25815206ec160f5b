"""Ranks as processes of one machine, which meet in memory that all of them map.

Each rank has two places of PLACE bytes, which take turns. It writes a piece of its tensor into one, then a header, and
then the number of the meeting: when that number stands there, others may read. There is no second
signal for "read": a rank that shows its next piece has read, and a place is written again only at the meeting after.

The last number is written after all else. On x86-64 other cores see writes in this order; on other processors nothing
here makes sure of it, so `supported` says no.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.features.parallel.meeting import Meeting, check_calls
from reference_impl.interfaces.collectives import CollectiveError

Bytes: TypeAlias = NDArray[np.uint8]
PLACE = 1 << 22  # bytes; a larger tensor takes several meetings
WORDS = 16  # of a header: number, call, dtype, bytes, dimensions, then up to 8 sizes
# Words of what a rank does: number of its last meeting, call, step; bytes it showed, nanoseconds it waited, rows of its
# experts.
_STATE = 6
_PAUSE = 50e-6  # seconds between two looks for what a stage before this one still computes
CALLS = (
    "nothing", "all_reduce", "all_gather", "reduce_scatter", "reduce_scatter (shapes)", "all_to_all",
    "all_to_all (shapes)", "barrier", *(f"broadcast from {rank}" for rank in range(64)),
)  # fmt: skip
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def supported() -> bool:
    return hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")


class Board:
    """The memory, and what it says of each rank. size: ranks. path: where another process finds it; None makes a new
    one, which has a path until `close_path`, or until this process ends."""

    def __init__(self, size: int, path: Path | None = None):
        self.size = size
        self._number: int | None = None
        if path is None and hasattr(os, "memfd_create"):
            # No file: one would be left behind by a process that is killed, and a container's are small.
            self._number = number = os.memfd_create("inferlab-ranks")
            self.path = Path(f"/proc/{os.getpid()}/fd/{number}")
        elif path is None:
            self._number, name = tempfile.mkstemp(prefix="inferlab-ranks-")
            number, self.path = self._number, Path(name)
        else:
            number, self.path = os.open(path, os.O_RDWR), path
        if path is None:
            os.ftruncate(number, self._length)
        self._memory = mmap.mmap(number, self._length)
        if path is not None:
            os.close(number)
        words = np.frombuffer(self._memory, np.int64, self._num_words)
        self.state = words[: size * _STATE].reshape(size, _STATE)
        self.headers = words[size * _STATE : size * (_STATE + 2 * WORDS)].reshape(size, 2, WORDS)
        # Messages from each rank (first) to each other one: two places that take turns, and how many pieces were read.
        of_mail = words[size * (_STATE + 2 * WORDS) :][: size**2 * (1 + 2 * WORDS)]
        self.read = of_mail[: size**2].reshape(size, size)
        self.mail = of_mail[size**2 :].reshape(size, size, 2, WORDS)
        places = np.frombuffer(self._memory, np.uint8, offset=8 * self._num_words).reshape(-1, 2, PLACE)
        self.places, self.letters = places[:size], places[size:].reshape(size, size, 2, PLACE)

    @property
    def _num_words(self) -> int:
        return -(-(self.size * (_STATE + 2 * WORDS) + self.size**2 * (1 + 2 * WORDS)) // 8) * 8

    @property
    def _length(self) -> int:
        """Bytes; of what no rank writes to, the system gives none."""
        return 8 * self._num_words + (self.size + self.size**2) * 2 * PLACE

    def close_path(self) -> None:
        """Removes the path; a process that has mapped the memory keeps it. Idempotent."""
        if self._number is not None:
            os.close(self._number)
            if not hasattr(os, "memfd_create"):
                self.path.unlink(missing_ok=True)
        self._number = None

    def waited_for(self, ranks: Sequence[int] | None = None) -> tuple[list[int], str]:
        """Of ranks that meet, all if None, those that the others wait for, and the call in which they do: those that
        came to the fewest meetings. Empty where all came to as many."""
        came = {rank: int(self.state[rank, 0]) for rank in (range(self.size) if ranks is None else ranks)}
        ahead = max(came, key=lambda rank: came[rank])
        late = [rank for rank, number in came.items() if number < came[ahead]]
        return late, f"{CALLS[int(self.state[ahead, 1])]} of step {int(self.state[ahead, 2])}"

    def figures(self, rank: int) -> tuple[int, float, int]:
        """Bytes that a rank showed to the others, seconds that it waited for them, and rows that its experts computed,
        since it began."""
        return int(self.state[rank, 3]), int(self.state[rank, 4]) / 1e9, int(self.state[rank, 5])

    def progress(self) -> int:
        """A number that grows while any rank goes on."""
        return int(self.state[:, 0].sum())


def words_of(call: str, x: Tensor) -> list[int]:
    """What a header says of a tensor, but for the number: see WORDS."""
    return [CALLS.index(call), DTYPES.index(x.dtype), x.nbytes, x.dim(), *x.shape]


class Header(NamedTuple):
    call: int
    dtype: int
    num_bytes: int
    shape: list[int]

    @classmethod
    def of(cls, words: Sequence[int]) -> Header:
        """words: see `words_of`."""
        return cls(words[0], words[1], words[2], list(words[4 : 4 + words[3]]))

    def tensor(self, data: Bytes) -> Tensor:
        if not self.num_bytes:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        return torch.from_numpy(data).view(DTYPES[self.dtype]).view(self.shape)


class BoardRank(Meeting):
    """A rank that writes on a board what it does. seconds: how long it waits for the others. width: how many ranks in
    a row meet; all, if None."""

    def __init__(self, place: int, board: Board, seconds: float = 30, width: int | None = None):
        super().__init__(place, board.size, width)
        self.board, self.seconds = board, seconds

    def go_on(self) -> None:
        self.board.state[self.place, 0] += 1
        self.board.state[self.place, 2:4] = self.step, self.num_bytes

    def came(self, call: str) -> int:
        """Counts a meeting to which this rank comes now; returns the time, see `has_waited`."""
        mine = self.board.state[self.place]
        mine[1:4], mine[5] = (CALLS.index(call), self.step, self.num_bytes), self.num_expert_rows
        mine[0] += 1
        return time.perf_counter_ns()

    def has_waited(self, began: int) -> None:
        """began: nanoseconds of `time.perf_counter_ns`."""
        took = time.perf_counter_ns() - began
        self.waited += took / 1e9
        self.board.state[self.place, 4] += took


class SharedMemoryRank(BoardRank):
    """A rank whose tensors stand on the board, too."""

    def __init__(self, place: int, board: Board, seconds: float = 30, width: int | None = None):
        super().__init__(place, board, seconds, width)
        self._number = 0  # of its last meeting
        self._sent, self._received = [0] * board.size, [0] * board.size  # pieces, by the other rank

    def send(self, x: Tensor, to: int) -> None:
        """Waits only while two pieces before it are not read."""
        data = x.contiguous().reshape(-1).view(torch.uint8).numpy()
        words = words_of("nothing", x)
        for at in range(0, max(1, len(data)), PLACE):
            self._sent[to] += 1
            number, turn = self._sent[to], self._sent[to] % 2
            self._until(self.board.read, (self.place, to), number - 2, "send to", to)
            piece = data[at : at + PLACE]
            self.board.letters[self.place, to, turn, : len(piece)] = piece
            self.board.mail[self.place, to, turn, 1 : 1 + len(words)] = words
            self.board.mail[self.place, to, turn, 0] = number
        self.num_bytes += x.nbytes
        self.go_on()

    def recv(self, source: int) -> Tensor:
        """CollectiveError where no rank goes on for `seconds`, and none came."""
        header, pieces, missing = None, list[Bytes](), 1
        while missing > 0:
            self._received[source] += 1
            number, turn = self._received[source], self._received[source] % 2
            self._until(self.board.mail, (source, self.place, turn, 0), number, "recv from", source)
            header = Header.of(self.board.mail[source, self.place, turn, 1:].tolist())
            missing = header.num_bytes - PLACE * (len(pieces) + 1)
            length = min(PLACE, missing + PLACE)
            pieces.append(self.board.letters[source, self.place, turn, :length].copy())
            self.board.read[source, self.place] = number
        self.go_on()
        assert header is not None
        return header.tensor(np.concatenate(pieces))

    def _until(self, counts: NDArray[np.int64], at: tuple[int, ...], least: int, call: str, other: int) -> None:
        """Waits until counts[at] is so high: not a fixed time, but as long as any rank goes on."""
        began = seen = time.perf_counter_ns()
        progress = self.board.progress()
        while counts[at] < least:
            now = time.perf_counter_ns()
            if progress != (progress := self.board.progress()):
                seen = now
            if now - seen > 1e9 * self.seconds:
                text = f"rank {self.place} waited {self.seconds:g} s in {call} rank {other} of step {self.step}"
                raise CollectiveError(text, [other])
            if now - began < 1e6:
                os.sched_yield()
            else:  # the other one computes, and may need this core
                time.sleep(_PAUSE)
        self.has_waited(began)

    def meet(self, call: str, x: Tensor) -> list[Tensor]:
        headers, pieces = self._show_piece(call, x, 0)
        check_calls({p: CALLS[header.call] for p, header in zip(self.met, headers, strict=True)}, self.step)
        longest = max(header.num_bytes for header in headers)
        if longest <= PLACE:
            return [header.tensor(piece) for header, piece in zip(headers, pieces, strict=True)]
        whole = [np.empty(header.num_bytes, np.uint8) for header in headers]
        for at in range(0, longest, PLACE):
            if at:
                _, pieces = self._show_piece(call, x, at)
            for data, piece in zip(whole, pieces, strict=True):
                data[at : at + len(piece)] = piece
        return [header.tensor(data) for header, data in zip(headers, whole, strict=True)]

    def _show_piece(self, call: str, x: Tensor, at: int) -> tuple[list[Header], list[Bytes]]:
        """A meeting in which each rank shows the bytes of its tensor from `at` on; returns all headers and pieces."""
        board, rank, self._number = self.board, self.place, self._number + 1
        turn, met = self._number % 2, slice(self.met.start, self.met.stop)
        piece = x.reshape(-1).view(torch.uint8).numpy()[at : at + PLACE]
        board.places[rank, turn, : len(piece)] = piece
        words = words_of(call, x)
        board.headers[rank, turn, 1 : 1 + len(words)] = words
        began = self.came(call)
        board.headers[rank, turn, 0] = self._number
        self._wait(turn, call)
        self.has_waited(began)
        headers = [Header.of(row) for row in board.headers[met, turn, 1:].tolist()]
        lengths = [min(PLACE, max(0, header.num_bytes - at)) for header in headers]
        return headers, [board.places[other, turn, :length] for other, length in zip(self.met, lengths, strict=True)]

    def _wait(self, turn: int, call: str) -> None:
        numbers, until = self.board.headers[:, turn, 0], None
        for other in self.met:
            while numbers[other] < self._number:
                os.sched_yield()  # another rank may need this core
                until = until or time.monotonic() + self.seconds
                if time.monotonic() > until:
                    late = [r for r in self.met if numbers[r] < self._number]
                    raise CollectiveError(
                        f"rank {self.place} waited {self.seconds:g} s in {call} of step {self.step} for "
                        f"{', '.join(f'rank {r}' for r in late)}",
                        late,
                    )
