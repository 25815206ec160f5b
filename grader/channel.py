"""Networks of the examiner between the roles of a learner's work: they count, and misbehave on request.

`Network`: ports with `send` and `recv` that wait, for roles that run at the same time (`checks.together`). `Link`: one
direction in simulated time, for code without its own clock and sockets. Both hold copies of messages, in
a notebook too: what a role keeps and changes later does not change what it sent. All counts stay here, those of time
too: the learner's code sees of a port what `LEARNER_SEES` lists.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grader.examination.roles import changed, wait_for
from grader.learner_side.codec import CannotCross, Packer, Unpacker


@dataclass(frozen=True)
class Faults:
    """What can happen to a message: chances from 0 to 1, and for a `Link` the range of the time that it takes.

    drop: it is lost. repeat: it comes twice. corrupt: one bit of its bytes or tensors is flipped (of an int, where it
    has neither). reorder: it overtakes one that is on its way.
    """

    drop: float = 0.0
    repeat: float = 0.0
    corrupt: float = 0.0
    reorder: float = 0.0
    delay: tuple[float, float] = (1.0, 1.0)


class _Fate:
    """What becomes of each message; the same for the same seed."""

    def __init__(self, faults: Faults, seed: int):
        self.faults, self.random = faults, random.Random(seed)

    def copies(self, message: Any) -> list[Any]:
        """The copies that arrive in place of `message`."""
        if self.random.random() < self.faults.drop:
            return []
        count = 2 if self.random.random() < self.faults.repeat else 1
        made = [copied(message)[0] for _ in range(count)]
        return [corrupted(one, self.random) if self.random.random() < self.faults.corrupt else one for one in made]

    def overtakes(self) -> bool:
        return self.random.random() < self.faults.reorder


class Link:
    """One direction of a connection, in simulated time; the check hands over and takes out the messages.

    num_messages, num_bytes: what was sent, whatever became of it.
    """

    def __init__(self, faults: Faults | None = None, seed: int = 0):
        self._fate = _Fate(faults or Faults(), seed)
        self._numbers = itertools.count()
        self._flying: list[tuple[float, int, Any]] = []  # (arrival, number, message)
        self.num_messages = self.num_bytes = 0

    def send(self, message: Any, now: float) -> None:
        """Sends a message at time `now`. Raises TypeError for what is not data."""
        message, size = copied(message)
        self.num_messages += 1
        self.num_bytes += size
        for one in self._fate.copies(message):
            arrival = now + self._fate.random.uniform(*self._fate.faults.delay)
            if self._flying and self._fate.overtakes():
                other = self._fate.random.randrange(len(self._flying))
                later, number, held = self._flying[other]
                self._flying[other] = (max(arrival, later), number, held)
                arrival = max(now, min(arrival, later))
                heapq.heapify(self._flying)
                heapq.heappush(self._flying, (arrival, -next(self._numbers), one))
            else:
                heapq.heappush(self._flying, (arrival, next(self._numbers), one))

    @property
    def next_arrival(self) -> float | None:
        """When the next message arrives; None when none is on its way."""
        return self._flying[0][0] if self._flying else None

    def arrived(self, now: float) -> list[Any]:
        """The messages that have arrived until `now`, in order; each is handed out once."""
        found = []
        while self._flying and self._flying[0][0] <= now:
            found.append(heapq.heappop(self._flying)[2])
        return found


class Port:
    """What one role has of a network. Messages of one role to another arrive in the order in which they were sent."""

    LEARNER_SEES = ("rank", "num_ranks", "send", "recv", "exchange")

    def __init__(self, network: Network, rank: int, num_ranks: int):
        self._network, self.rank, self.num_ranks = network, rank, num_ranks

    def send(self, to: int, message: Any) -> None:
        """Send data to rank `to`; waits for it where the network says so. Raises ValueError, TypeError, Deadlock."""
        self._network._send(self.rank, to, message)

    def recv(self, source: int) -> Any:
        """Receives the next message of rank `source`; waits for it. Raises Deadlock when no role can send it any
        more."""
        return self._network._recv(source, self.rank)

    def exchange(self, messages: dict[int, Any], sources: Sequence[int]) -> dict[int, Any]:
        """Sends messages[to] to each rank `to` and receives the next message of each of `sources`, all at once: no send
        holds up a receipt. Returns {source: message}. Raises as `send` and `recv` do."""
        return self._network._exchange(self.rank, messages, sources)


class Network:
    """Every role can send to every other; `ports[rank]` is handed to the role.

    sends_wait: a `send` returns when its message was received, as gloo's does: two roles that both send first wait for
    each other. sent: (source, to, bytes) of every message, in the order in which they were sent. ValueError for
    sends_wait with faults: a lost message is never received.

    alpha, beta: seconds that a message is under way, and that each of its bytes takes to leave. A rank's messages leave
    one after another, and each arrives alpha after its last byte has left. times: for each rank, when it has received
    all that it asked for and its own messages have left. No clock is read, and computing takes no time.
    """

    def __init__(
        self,
        num_ranks: int,
        faults: Faults | None = None,
        seed: int = 0,
        sends_wait: bool = False,
        alpha: float = 0.0,
        beta: float = 0.0,
    ):
        if sends_wait and faults is not None:
            raise ValueError("sends_wait: expected a network without faults: a send of a lost message never ends")
        self._sends_wait, self._alpha, self._beta = sends_wait, alpha, beta
        ranks = range(num_ranks)
        self.times = [0.0] * num_ranks
        self.ports = [Port(self, rank, num_ranks) for rank in ranks]
        self.sent: list[tuple[int, int, int]] = []
        # (message, when it arrives, a list that is empty until the message is received)
        self._inboxes: dict[tuple[int, int], deque[tuple[Any, float, list[bool]]]] = {
            (a, b): deque() for a in ranks for b in ranks if a != b
        }
        # A fate per pair: which message meets which fault must not depend on which role happens to be faster.
        self._fates = {
            (a, b): _Fate(faults or Faults(), seed * num_ranks**2 + a * num_ranks + b) for a, b in self._inboxes
        }

    @property
    def num_messages(self) -> int:
        return len(self.sent)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size in self.sent)

    def bytes_sent_by(self, rank: int) -> int:
        """Bytes that rank `rank` has sent."""
        return sum(size for source, _, size in self.sent if source == rank)

    @property
    def num_unread(self) -> int:
        """Messages that arrived and were never received."""
        with changed:
            return sum(map(len, self._inboxes.values()))

    def _pair(self, source: Any, to: Any) -> tuple[int, int]:
        if type(source) is not int or type(to) is not int or (source, to) not in self._inboxes:
            raise ValueError(f"no way from rank {source} to rank {to} among {len(self.ports)} ranks")
        return source, to

    def _post(self, source: int, to: int, message: Any) -> list[bool]:
        """Sends, and returns what is empty until the message is received; the caller holds `changed`."""
        pair = self._pair(source, to)
        message, size = copied(message)
        received: list[bool] = []
        self.sent.append((source, to, size))
        self.times[source] += size * self._beta
        arrival = self.times[source] + self._alpha
        for one in self._fates[pair].copies(message):
            inbox = self._inboxes[pair]
            place = len(inbox) - 1 if inbox and self._fates[pair].overtakes() else len(inbox)
            inbox.insert(place, (one, arrival, received))
        changed.notify_all()
        return received

    def _await(self, source: int, to: int, received: list[bool]) -> None:
        if self._sends_wait:
            wait_for(received, f"rank {source} waits for rank {to} to receive its message")

    def _send(self, source: int, to: int, message: Any) -> None:
        with changed:
            self._await(source, to, self._post(source, to, message))

    def _recv(self, source: int, to: int) -> Any:
        inbox = self._inboxes[self._pair(source, to)]
        with changed:
            wait_for(inbox, f"rank {to} waits for a message from rank {source}")
            message, arrival, received = inbox.popleft()
            self.times[to] = max(self.times[to], arrival)
            received.append(True)
            changed.notify_all()
            return message

    def _exchange(self, rank: int, messages: dict[int, Any], sources: Sequence[int]) -> dict[int, Any]:
        for source in sources:
            self._pair(source, rank)
        with changed:
            posted = {to: self._post(rank, to, message) for to, message in messages.items()}
        found = {source: self._recv(source, rank) for source in sources}
        with changed:
            for to, received in posted.items():
                self._await(rank, to, received)
        return found


def copied(message: Any) -> tuple[Any, int]:
    """A copy of data as the other process would get it, and its bytes, as a frame would carry them: see `_size`.

    Raises TypeError for what is not data.
    """
    packer = Packer(_refuse, {})
    node = packer.pack(message)
    chunks = [torch.frombuffer(bytearray(c), dtype=torch.uint8) if len(c) else torch.empty(0, dtype=torch.uint8)
              for c in packer.finish()[0]]  # fmt: skip
    value = Unpacker(chunks, _refuse, {}).unpack(node)
    return value, _size(value)


def _refuse(value: Any) -> Any:
    raise CannotCross(f"a message is data; a {type(value).__name__} cannot be sent")


def _size(value: Any) -> int:
    """Bytes of `value`: the content of tensors, bytes and texts; 8 for a float; what an int needs, at least 8; 1 for
    None and a bool. A list, tuple, set or dict adds 1 for each of its values, so that no count of empty ones is free.
    A tensor without elements has 8 for each dimension, which may be any number.
    """
    if isinstance(value, torch.Tensor):
        return value.numel() * value.itemsize or 8 * value.dim()
    if isinstance(value, str):
        value = value.encode("utf-8", "replace")
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(1 + _size(part) for item in value.items() for part in item)
    if isinstance(value, (list, tuple, set)):
        return sum(1 + _size(item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return max(8, (value.bit_length() + 8) // 8)
    return 8 if isinstance(value, float) else 1


def corrupted(message: Any, chance: random.Random) -> Any:
    """`message`, which may be changed, with one bit of its bytes or tensors flipped; else of one of its ints."""
    places = _places(message)
    for kinds in ((bytes, torch.Tensor), (int,)):
        found = [(path, leaf) for path, leaf in places if isinstance(leaf, kinds) and _size(leaf)]
        if found:
            path, leaf = chance.choice(found)
            return _replaced(message, path, _flipped(leaf, chance))
    return message


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, value) of everything in lists, tuples and dicts that could be replaced."""
    if isinstance(value, (list, tuple)):
        return [place for i, item in enumerate(value) for place in _places(item, (*path, i))]
    if isinstance(value, dict):
        return [place for key, item in value.items() for place in _places(item, (*path, key))]
    return [(path, value)]


def _flipped(leaf: Any, chance: random.Random) -> Any:
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, int):
        return leaf ^ (1 << chance.randrange(8))
    raw = bytearray(leaf if isinstance(leaf, bytes) else leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    position = chance.randrange(len(raw))
    raw[position] ^= 1 if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool else 1 << chance.randrange(8)
    if isinstance(leaf, bytes):
        return bytes(raw)
    return torch.frombuffer(raw, dtype=torch.uint8).view(leaf.dtype).view(leaf.shape)


def _replaced(value: Any, path: tuple[Any, ...], leaf: Any) -> Any:
    if not path:
        return leaf
    step, rest = path[0], path[1:]
    if isinstance(value, tuple):
        return (*value[:step], _replaced(value[step], rest, leaf), *value[step + 1 :])
    value[step] = _replaced(value[step], rest, leaf)
    return value
