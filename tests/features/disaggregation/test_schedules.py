"""Both ends of transfers under schedules that hypothesis makes: messages lost, repeated, reordered, late and damaged;
writes that are late, damaged, or never end; requests that come and go at any time; workers and connections that are
lost; clocks that jump. Whatever happened, at the end nothing is held, in bounded time. world.py checks what must be
true between any two events."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.features.disaggregation.messages import (
    Abort,
    Acknowledged,
    Done,
    Message,
    Offer,
    Pushed,
    Refused,
    Reserved,
    Stopped,
    decode,
)
from tests.examples import examples
from tests.features.disaggregation.world import TIMES, Script, World, digest_of, key_of

NAMES = [f"t{number}" for number in range(6)]


# --- events, chosen by a script -----------------------------------------------------------------------------------


def deliver(world: World) -> None:
    """Out of order, but mostly what waits longest."""
    if world.messages:
        world.deliver(max(0, world.script.below(len(world.messages) + 6) - 6))


def repeat(world: World) -> None:
    if world.messages:
        world.seen["repeated"] += 1
        world.deliver(world.script.below(len(world.messages)), keep=True)


def lose(world: World) -> None:
    if world.messages:
        world.seen["lost message"] += 1
        world.messages.pop(world.script.below(len(world.messages)))


def damage(world: World) -> None:
    """The control channel drops what is not whole; to decode it must do no harm."""
    if world.messages:
        content = bytearray(world.messages.pop(world.script.below(len(world.messages)))[2])
        content[world.script.below(len(content))] ^= 1 << world.script.below(8)
        try:
            decode(bytes(content))
        except ValueError:
            world.seen["damaged message"] += 1


def tick(world: World) -> None:
    node = world.script.one_of([node for node in world.nodes.values() if node.is_alive])
    world.tick(node, world.script.one_of([0.5, 0.5, 0.5, 1, 1, 2]))


def jump(world: World) -> None:
    node = world.script.one_of([node for node in world.nodes.values() if node.is_alive])
    world.tick(node, world.script.one_of([3, 8, 20, -5, -1000]))


def offer(world: World) -> None:
    names = [name for name in NAMES if name not in world.sizes]
    if names and (senders := world.alive("P")):
        sender = world.script.one_of(senders)
        if receivers := sorted(sender.peers):
            world.offer(names[0], sender, world.script.one_of(receivers), 1 + world.script.below(4))


def offer_again(world: World) -> None:
    """The same request, once its transfer has ended, maybe to another receiver."""
    for name, offered in world.offered.items():
        sender = world.nodes[offered.sender]
        if offered.has_ended and sender.is_alive and sender.peers:
            world.seen["offered again"] += 1
            world.ready.pop(name, None)
            world.offer(name, sender, world.script.one_of(sorted(sender.peers)), world.sizes[name])
            break


def cannot_start(world: World) -> None:
    names = [name for name in NAMES if name not in world.sizes]
    if names and (senders := world.alive("P")):
        sender = world.script.one_of(senders)
        receiver = world.script.one_of(sorted(sender.peers) or ["D0.0"])
        for action in sender.machine.cannot_start(names[-1], receiver, "no"):
            world.do_Send(sender, action)


def going_on(world: World) -> list[str]:
    return [name for name, offered in world.offered.items() if not offered.has_ended]


def compute(world: World) -> None:
    if names := going_on(world):
        name = world.script.one_of(names)
        if todo := [index for index in range(world.sizes[name]) if index not in world.ready[name]]:
            world.compute(name, todo[: 1 + world.script.below(len(todo))])


def abort(world: World) -> None:
    if names := going_on(world):
        name = world.script.one_of(names)
        node = world.nodes[world.offered[name].sender]
        world.feed(node, node.machine.abort, name, "cancelled")


def claim(world: World) -> None:
    if receivers := world.alive("D"):
        receiver = world.script.one_of(receivers)
        if senders := sorted(receiver.peers):
            name = world.script.one_of(NAMES)
            sender = world.offered[name].sender if name in world.offered else world.script.one_of(senders)
            world.claim(receiver, name, sender)


def release(world: World) -> None:
    if receivers := world.alive("D"):
        world.release(world.script.one_of(receivers), world.script.one_of(NAMES))


def release_page(world: World) -> None:
    if receivers := world.alive("D"):
        world.release_page(world.script.one_of(receivers), world.script.one_of(NAMES))


def write(world: World) -> None:
    if flights := [flight for flight in world.flights if not flight.is_hung]:
        flight = world.script.one_of(flights)
        world.end(flight, ("page", key_of(flight.page[0], flight.page[2])))


def write_part(world: World) -> None:
    """Half of a page is there; also of a sender that is dead, or was told to stop."""
    if world.flights:
        world.seen["part written"] += 1
        flight = world.script.one_of(world.flights)
        world.land(flight, ("torn", flight.page))
        world.check()


def write_damaged(world: World) -> None:
    if flights := [flight for flight in world.flights if not flight.is_hung]:
        world.seen["page damaged"] += 1
        flight = world.script.one_of(flights)
        world.end(flight, ("damaged", flight.page))


def write_failed(world: World) -> None:
    if flights := [flight for flight in world.flights if not flight.is_hung]:
        world.seen["write failed"] += 1
        flight = world.script.one_of(flights)
        world.end(flight, ("torn", flight.page), "connection reset")


def write_late(world: World) -> None:
    """Its deadline has passed; it may land yet."""
    if world.flights:
        flight = world.script.one_of(world.flights)
        node = world.nodes[flight.source]
        transfer, attempt, index = flight.page
        world.seen["write late"] += 1
        world.feed(node, node.machine.written, transfer, attempt, [index], is_over=False)


def hang(world: World) -> None:
    if world.flights:
        world.seen["write hangs"] += 1
        world.script.one_of(world.flights).is_hung = True


def check(world: World) -> None:
    if world.checks:
        world.run_check(world.script.below(len(world.checks)), part=world.script.below(2) == 1)


def lose_connection(world: World) -> None:
    node = world.script.one_of([node for node in world.nodes.values() if node.is_alive])
    if node.peers:
        world.disconnect(node.name, world.script.one_of(sorted(node.peers)))


def notice(world: World) -> None:
    world.notice(world.script.one_of(world.nodes.values()))


def cut_off(world: World) -> None:
    if nodes := [node for node in world.nodes.values() if node.to_cut]:
        world.cut_off(world.script.one_of(nodes))


def kill(world: World) -> None:
    node = world.script.one_of([node for node in world.nodes.values() if node.is_alive])
    world.kill(node, again=True)


def lie(world: World) -> None:
    """Any message, as far as it has the form of one."""
    script = world.script
    name, attempt = script.one_of(NAMES), 1 + script.below(12)
    indices = sorted({script.below(5) for _ in range(script.below(4))})
    kinds: dict[str, list[Message]] = {
        "D": [
            Offer(name, attempt, tuple(key_of(name, index) for index in range(1 + script.below(4)))),
            Pushed(name, attempt, tuple((index, digest_of(None)) for index in indices)),
            Abort(name, attempt, "a lie", is_final=True),
            Stopped(name, attempt, "a lie"),
        ],
        "P": [
            Reserved(name, attempt, tuple((index, index + 1) for index in indices)),
            Acknowledged(name, attempt, tuple(indices)),
            Done(name, attempt),
            Refused(name, attempt, "a lie"),
            Abort(name, attempt, "a lie", is_final=script.below(2) == 1),
        ],
    }
    if nodes := [node for node in world.nodes.values() if node.is_alive]:
        node = script.one_of(nodes)
        world.lie(node, "L" if node.name[0] == "D" else "E", script.one_of(kinds[node.name[0]]))


Event = Callable[[World], None]

# How often each happens. Work goes on in all of them.
WORK: dict[Event, int] = {
    deliver: 30, offer: 6, compute: 6, write: 10, check: 8, tick: 6, claim: 3, notice: 2, cut_off: 2, release_page: 2
}  # fmt: skip
CHANNEL: dict[Event, int] = {repeat: 6, lose: 4, damage: 2}
WRITES: dict[Event, int] = {write_part: 4, write_damaged: 2, write_failed: 2, write_late: 2, hang: 1}
OWNERS: dict[Event, int] = {abort: 1, release: 1, cannot_start: 1, offer_again: 2}
LOSSES: dict[Event, int] = {jump: 1, lose_connection: 1, kill: 1}
PROFILES = [
    [event for part in parts for event, times in part.items() for _ in range(times)]
    for parts in [
        (WORK,), (WORK, CHANNEL), (WORK, WRITES), (WORK, CHANNEL, WRITES, OWNERS), (WORK, CHANNEL, OWNERS, LOSSES),
        (WORK, CHANNEL, WRITES, OWNERS, LOSSES), (WORK, CHANNEL, WRITES, OWNERS, LOSSES),
    ]
]  # fmt: skip


# --- the end ------------------------------------------------------------------------------------------------------


def round_of(world: World, is_channel_dead: bool, do_writes_end: bool) -> None:
    """Half a second in which what can be done is done, once."""
    for node in list(world.nodes.values()):
        world.notice(node)
        world.tick(node, 0.5)
    for flight in list(world.flights):
        if do_writes_end and not flight.is_hung and flight in world.flights:
            world.end(flight, ("page", key_of(flight.page[0], flight.page[2])))
    for _ in range(len(world.messages)):
        if is_channel_dead:
            world.messages.pop(0)
        else:
            world.deliver(0)
    for _ in range(len(world.checks)):
        world.run_check(0, part=False)
    for node in world.nodes.values():
        world.cut_off(node)
    for (receiver, transfer), is_told in list(world.claimed.items()):
        if is_told and (receiver, transfer) not in world.released:
            world.release(world.nodes[receiver], transfer)


def end(world: World) -> None:
    """Whatever happened before: both sides end in bounded time, and nothing is held then."""
    is_channel_dead, do_writes_end = world.script.below(2) == 1, world.script.below(4) != 1
    world.script.choices = b""
    sender_rounds = 2 * (TIMES.limit + TIMES.stop) + 4
    for number in range(int(sender_rounds + 2 * (TIMES.limit + TIMES.stop + TIMES.unclaimed + 3 * TIMES.lease))):
        if number > sender_rounds:
            assert all(offered.has_ended for offered in world.offered.values())
            assert all(node.machine.num_transfers == 0 for node in world.alive("P"))
            assert not [flight for flight in world.flights if world.nodes[flight.source].is_alive]
        round_of(world, is_channel_dead, do_writes_end)
    for node in world.alive("D"):
        assert node.machine.num_transfers == 0
        for receiver, sender in [pair for pair in world.memory if pair[0] == node.name]:
            is_dead = world.nodes[sender].machine is not None and not world.nodes[sender].is_alive
            is_gone = is_dead or (receiver, sender) in world.cut
            assert not is_gone, f"the memory of {sender} was not given back"
            assert len(node.machine.free_slots(sender)) == world.num_slots
    for (receiver, transfer), is_told in world.claimed.items():
        assert is_told or (receiver, transfer) in world.released or not world.nodes[receiver].is_alive


def run(choices: bytes, with_lies: bool = False) -> World:
    script = Script(choices)
    profile = script.one_of(PROFILES) + [lie] * (20 if with_lies else 0)
    world = World(script, 1 + script.below(2), 1 + script.below(2), 1 + script.below(4))
    if with_lies:
        world.let_lie("L", "E")
    while not script.is_over:
        script.one_of(profile)(world)
    script.choices, script.place = choices[:2], 0
    end(world)
    return world


SCRIPTS = st.binary(min_size=300, max_size=900)


@settings(max_examples=examples(100))
@given(SCRIPTS)
def test_nothing_wrong_is_used_nothing_leaks_and_both_sides_end(choices: bytes) -> None:
    run(choices)


@pytest.mark.slow
@settings(max_examples=3000)
@given(SCRIPTS)
def test_nothing_wrong_is_used_nothing_leaks_and_both_sides_end_under_many_schedules(choices: bytes) -> None:
    run(choices)


@settings(max_examples=examples(100))
@given(SCRIPTS)
def test_a_peer_that_lies_harms_its_own_transfers_alone(choices: bytes) -> None:
    run(choices, with_lies=True)


@pytest.mark.slow
@settings(max_examples=1000)
@given(SCRIPTS)
def test_a_peer_that_lies_harms_its_own_transfers_alone_under_many_schedules(choices: bytes) -> None:
    run(choices, with_lies=True)


def test_the_schedules_reach_every_message_and_every_action() -> None:
    rng, seen = random.Random(1), Counter[str]()
    for _ in range(60):
        seen += run(rng.randbytes(600)).seen
    messages = ["P Offer", "P Pushed", "P Abort", "P Stopped"]
    messages += ["D Reserved", "D Refused", "D Acknowledged", "D Done", "D Abort"]
    actions = ["Write", "LetGo", "Ended", "CutOff", "Check", "PageHere", "NoMore", "Lapsed", "MemoryFree"]
    faults = ["repeated", "lost message", "damaged message", "page damaged", "part written", "write failed"]
    faults += ["write late", "write hangs", "killed", "offered again", "ended well", "whole"]
    assert min(seen[what] for what in messages + actions + faults) >= 5, seen
