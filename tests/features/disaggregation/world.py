"""Senders and receivers in a world that misbehaves: what test_protocol.py drives by scripts of choices.

The world knows what neither side can: what is in each slot, and which writes may still land there. After every event it
checks that nothing wrong can be used and that no slot is free, or another page's, while something may write into it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from reference_impl.features.disaggregation.messages import MAX_DIGEST, Acknowledged, Message, Reserved, decode, encode
from reference_impl.features.disaggregation.protocol import (
    Action,
    Check,
    CutOff,
    Ended,
    Lapsed,
    LetGo,
    MemoryFree,
    NoMore,
    PageHere,
    Send,
    Times,
    Write,
)
from reference_impl.features.disaggregation.receiver import Receiver
from reference_impl.features.disaggregation.sender import Sender

TIMES = Times(interval=1, lease=3, limit=12, credit=5, stop=3, unclaimed=6, attempts=3)


class Script:
    """Choices, each a byte; 0, the most harmless one, when they are used up."""

    def __init__(self, choices: bytes):
        self.choices, self.place = choices, 0

    @property
    def is_over(self) -> bool:
        return self.place >= len(self.choices)

    def below(self, number: int) -> int:
        if self.is_over or number < 2:
            return 0
        self.place += 1
        return self.choices[self.place - 1] % number

    def one_of(self, values: Any) -> Any:
        values = list(values)
        return values[self.below(len(values))]


def key_of(transfer: str, index: int) -> bytes:
    return f"{transfer}/{index}".encode().ljust(32, b".")


def digest_of(content: object) -> int:
    return hash(content) & MAX_DIGEST


@dataclass
class Node:
    """One life of a worker."""

    name: str
    machine: Any  # a Sender or a Receiver; None: a peer that says anything (`lie`)
    is_alive: bool = True
    clock: float = 0.0
    elapsed: float = 0.0  # seconds that the clock went forward
    peers: set[str] = field(default_factory=set)  # to which there is a connection
    lost: list[str] = field(default_factory=list)  # connections of which it does not know yet that they ended
    to_cut: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Flight:
    """A write that may land at any time."""

    source: str
    target: str
    slot: int
    page: tuple[str, int, int]  # transfer, attempt, index
    is_hung: bool = False  # it will not end by itself


@dataclass
class Offered:
    """A transfer as its sender's owner sees it."""

    sender: str
    held: set[int]
    has_ended: bool = False


class World:
    """num_senders prefill workers, num_receivers decode workers; each pair shares `num_slots` slots."""

    def __init__(self, script: Script, num_senders: int = 2, num_receivers: int = 2, num_slots: int = 3):
        self.script, self.num_slots = script, num_slots
        self.nodes: dict[str, Node] = {}
        self.messages: list[tuple[str, str, bytes]] = []  # from, to, content
        self.memory: dict[tuple[str, str], list[object]] = {}  # receiver, sender: the content of each slot
        self.assigned: dict[tuple[str, str, int], tuple[str, int, int]] = {}  # of a slot: to which page
        self.flights: list[Flight] = []
        self.checks: list[tuple[str, Check]] = []
        self.here: dict[tuple[str, str, int], tuple[str, int]] = {}  # receiver, transfer, index: sender, slot
        self.sizes: dict[str, int] = {}  # of transfers
        self.offered: dict[str, Offered] = {}
        self.ready: dict[str, set[int]] = defaultdict(set)
        self.claimed: dict[tuple[str, str], bool] = {}  # receiver, transfer: was NoMore said of its last attempt
        self.attempts: dict[tuple[str, str, str], int] = {}  # receiver, transfer, sender: the last one
        self.released: dict[tuple[str, str], float] = {}  # receiver, transfer: when
        self.cut: set[tuple[str, str]] = set()  # who was cut off by whom
        self.seen: Counter[str] = Counter()
        for number in range(num_senders):
            self.start(f"P{number}.0")
        for number in range(num_receivers):
            self.start(f"D{number}.0")

    # --- workers --------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        self.nodes[name] = new = Node(name, Sender(TIMES) if name[0] == "P" else Receiver(TIMES))
        for other in self.alive("D" if name[0] == "P" else "P"):
            sender, receiver = (new, other) if name[0] == "P" else (other, new)
            receiver.machine.join(sender.name, self.num_slots)
            self.memory[receiver.name, sender.name] = [None] * self.num_slots
            new.peers.add(other.name)
            other.peers.add(new.name)

    def let_lie(self, sender: str, receiver: str) -> None:
        """Two peers of all others, of which anything may come."""
        self.nodes[sender] = Node(sender, None, is_alive=False)
        self.nodes[receiver] = Node(receiver, None, is_alive=False)
        for node in self.alive("D"):
            node.machine.join(sender, self.num_slots)
            self.memory[node.name, sender] = [None] * self.num_slots
        for node in self.alive("P"):
            node.peers.add(receiver)

    def lie(self, node: Node, peer: str, message: Message) -> None:
        self.feed(node, node.machine.received, peer, decode(encode(message)))

    def alive(self, role: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.name[0] == role and node.is_alive]

    def kill(self, node: Node, again: bool) -> None:
        """Its writes that are under way may land until they are cut off."""
        self.seen["killed"] += 1
        node.is_alive = False
        for peer in list(node.peers):
            self.disconnect(node.name, peer)
        if node.name[0] == "D":
            for key in [key for key in self.memory if key[0] == node.name]:
                del self.memory[key]
            for key in [key for key in self.here if key[0] == node.name]:
                del self.here[key]
        else:
            for offered in self.offered.values():
                offered.has_ended |= offered.sender == node.name
        if again:
            worker, life = node.name.split(".")
            self.start(f"{worker}.{int(life) + 1}")

    def disconnect(self, one: str, other: str) -> None:
        for node, peer in ((self.nodes[one], other), (self.nodes[other], one)):
            if peer in node.peers:
                node.peers.remove(peer)
                node.lost.append(peer)

    def feed(self, node: Node, event: Callable[..., list[Action]], *args: Any, **fields: Any) -> None:
        """An event, with the time, and all that follows from it at once."""
        if node.is_alive:
            for action in event(*args, now=node.clock, **fields):
                self.seen[type(action).__name__] += 1
                getattr(self, f"do_{type(action).__name__}")(node, action)
        self.check()

    # --- actions --------------------------------------------------------------------------------------------------

    def do_Send(self, node: Node, action: Send) -> None:
        message = action.message
        self.seen[f"{node.name[0]} {type(message).__name__}"] += 1
        if self.nodes[action.peer].machine is None:
            encode(message)
            return
        if isinstance(message, (Reserved, Acknowledged)):  # an attempt is going on
            where = (node.name, message.transfer)
            if message.attempt > self.attempts.get((*where, action.peer), 0):
                self.attempts[*where, action.peer] = message.attempt
                self.claimed |= {where: False} if where in self.claimed else {}
                if where in self.released:
                    assert node.elapsed - self.released.pop(where) >= TIMES.lease, "begun for a request that is gone"
                    self.claimed.pop(where, None)
        if isinstance(message, Reserved):
            for index, slot in message.pages:
                page = (message.transfer, message.attempt, index)
                place = (node.name, action.peer, slot)
                if self.assigned.get(place) != page:
                    assert (action.peer, slot) not in [
                        at for (receiver, _, _), at in self.here.items() if receiver == node.name
                    ], f"{place} is used by a request"
                self.assigned[place] = page
        self.messages.append((node.name, action.peer, encode(message)))

    def do_Write(self, node: Node, action: Write) -> None:
        for index, slot in action.pages:
            assert index in self.ready[action.transfer], "written before it was computed"
            assert index in self.offered[action.transfer].held, "its source is free"
            self.flights.append(Flight(node.name, action.peer, slot, (action.transfer, action.attempt, index)))

    def do_LetGo(self, node: Node, action: LetGo) -> None:
        offered = self.offered[action.transfer]
        assert offered.held.issuperset(action.indices), "let go twice"
        offered.held.difference_update(action.indices)
        for flight in self.flights:
            if flight.source == node.name and flight.page[0] == action.transfer:
                assert flight.page[2] not in action.indices, "let go while it is being written"

    def do_Ended(self, node: Node, action: Ended) -> None:
        offered = self.offered[action.transfer]
        assert not offered.has_ended
        assert not offered.held
        assert bool(action.error) == (action.num_acknowledged < self.sizes[action.transfer])
        self.seen["ended well"] += not action.error
        offered.has_ended = True

    def do_CutOff(self, node: Node, action: CutOff) -> None:
        assert action.peer not in node.to_cut
        assert (node.name, action.peer) not in self.cut
        node.to_cut.append(action.peer)

    def do_Check(self, node: Node, action: Check) -> None:
        self.checks.append((node.name, action))

    def do_PageHere(self, node: Node, action: PageHere) -> None:
        if self.nodes[action.peer].machine is None:
            return  # who has the key is trusted for contents
        place = (node.name, action.transfer, action.index)
        assert place not in self.here
        assert place[:2] not in self.released
        assert not self.claimed.get(place[:2], False), "after NoMore"
        assert action.key == key_of(action.transfer, action.index)
        self.here[place] = (action.peer, action.slot)

    def do_NoMore(self, node: Node, action: NoMore) -> None:
        assert self.claimed[node.name, action.transfer] is False
        self.claimed[node.name, action.transfer] = True
        if "it comes from" in action.error:  # the claim named another peer: it is none
            del self.claimed[node.name, action.transfer]
        self.seen["whole"] += not action.error

    def do_Lapsed(self, node: Node, action: Lapsed) -> None:
        where = (node.name, action.transfer)
        assert where not in self.claimed or where in self.released  # released: of a message that came much later
        self.forget(node, action.transfer)

    def do_MemoryFree(self, node: Node, action: MemoryFree) -> None:
        assert (node.name, action.peer) in self.cut
        del self.memory[node.name, action.peer]

    def forget(self, node: Node, transfer: str) -> None:
        self.released.setdefault((node.name, transfer), node.elapsed)
        for place in [place for place in self.here if place[:2] == (node.name, transfer)]:
            del self.here[place]

    # --- events ---------------------------------------------------------------------------------------------------

    def deliver(self, at: int, keep: bool = False) -> None:
        source, target, content = self.messages[at] if keep else self.messages.pop(at)
        node = self.nodes[target]
        if node.is_alive:
            self.feed(node, node.machine.received, source, decode(content))

    def land(self, flight: Flight, content: object) -> None:
        if self.may_land(flight):
            self.memory[flight.target, flight.source][flight.slot] = content

    def may_land(self, flight: Flight) -> bool:
        where = (flight.target, flight.source)
        return where in self.memory and where not in self.cut

    def end(self, flight: Flight, content: object, error: str = "") -> None:
        """A write ends, as its sender is told."""
        self.land(flight, content)
        self.flights.remove(flight)
        transfer, attempt, index = flight.page
        node = self.nodes[flight.source]
        self.feed(node, node.machine.written, transfer, attempt, [index], error=error)

    def run_check(self, at: int, part: bool) -> None:
        name, check = self.checks.pop(at)
        if part and len(check.pages) > 1:
            self.checks.append((name, replace(check, pages=check.pages[1:])))
            check = replace(check, pages=check.pages[:1])
        memory, node = self.memory.get((name, check.peer)), self.nodes[name]
        if memory is not None:  # else it was given back: no page of it can be waited for
            right = {index: digest_of(memory[slot]) == digest for index, slot, digest in check.pages}
            self.feed(node, node.machine.checked, check.transfer, check.attempt, right)

    def notice(self, node: Node) -> None:
        if node.lost and node.is_alive:
            peer = node.lost.pop(0)
            self.feed(node, node.machine.lost, peer)

    def cut_off(self, node: Node) -> None:
        if node.to_cut:
            peer = node.to_cut.pop(0)
            self.disconnect(node.name, peer)
            # Where the receiver cut off, the sender is not told: its writes fail or hang, but land nowhere.
            self.flights = [flight for flight in self.flights if (flight.source, flight.target) != (node.name, peer)]
            self.cut.add((node.name, peer))
            self.feed(node, node.machine.cut_off, peer)

    def tick(self, node: Node, seconds: float) -> None:
        node.clock += seconds
        node.elapsed += max(0, seconds)
        if node.is_alive:
            self.feed(node, node.machine.tick)

    def offer(self, transfer: str, sender: Node, receiver: str, num_pages: int) -> None:
        self.sizes[transfer] = num_pages
        self.offered[transfer] = Offered(sender.name, set(range(num_pages)))
        keys = [key_of(transfer, index) for index in range(num_pages)]
        self.feed(sender, sender.machine.offer, transfer, receiver, keys)

    def compute(self, transfer: str, indices: list[int]) -> None:
        node = self.nodes[self.offered[transfer].sender]
        self.ready[transfer].update(indices)
        digests = {index: digest_of(("page", key_of(transfer, index))) for index in indices}
        self.feed(node, node.machine.pages_ready, transfer, digests)

    def claim(self, node: Node, transfer: str, sender: str) -> None:
        if (node.name, transfer) not in self.claimed and (node.name, transfer) not in self.released:
            self.claimed[node.name, transfer] = False
            self.feed(node, node.machine.claim, transfer, sender)

    def release(self, node: Node, transfer: str) -> None:
        self.forget(node, transfer)
        self.feed(node, node.machine.release, transfer)

    def release_page(self, node: Node, transfer: str) -> None:
        for place in [place for place in self.here if place[:2] == (node.name, transfer)][:1]:
            del self.here[place]
            self.feed(node, node.machine.release, transfer, indices=[place[2]])

    # --- what must be true at any time ------------------------------------------------------------------------------

    def check(self) -> None:
        for (receiver, transfer, index), (sender, slot) in self.here.items():
            content = self.memory[receiver, sender][slot]
            assert content == ("page", key_of(transfer, index)), f"{transfer}/{index} at {receiver} has {content}"
        for flight in self.flights:
            if self.may_land(flight):
                node = self.nodes[flight.target]
                assert flight.slot not in node.machine.free_slots(flight.source), f"free while it is written: {flight}"
                found = self.assigned[flight.target, flight.source, flight.slot]
                assert found == flight.page, f"{found}'s slot is written by {flight}"
