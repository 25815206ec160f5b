"""The stream of requests, from sessions and arrivals. It keeps the sessions under way and none that has ended."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import chain

import numpy as np

from reference_impl.simulation.workloads.arrivals import ClosedLoop, Open
from reference_impl.simulation.workloads.distributions import Exponential, bits, choices
from reference_impl.simulation.workloads.request import WorkloadRequest
from reference_impl.simulation.workloads.sessions import Draws, Session, Sessions, whole
from reference_impl.simulation.workloads.spec import Workload

ARRIVALS, UNDER_WAY = 0xA221, 0xA222  # beside the seed: random streams of their own
WARM_UP = 5  # mean lives of a session before the first request; with 3, prompts of chat begin 7 % too short
MOST_TURNS = 20_000  # before the first request; 0.15 s
POOL = 100_000  # draws of which sessions under way are chosen
Waiting = tuple[int, str, Session | tuple[int, int]]  # ready when, its id, and it; or its turns and how many are done


def open_stream(spec: Workload, process: Open, seed: int) -> Iterator[WorkloadRequest]:
    """Requests in order of arrival, without end. `after` is None, as none of them waits for another.

    The process says when a request comes, a session says which: the one that has been ready for longest sends its next
    turn, and if none is ready a new session begins. A session is ready when its planned answer and its pause are over,
    so a pause is the one drawn plus the wait for the next arrival. The stream starts in the middle of the service's
    life, some sessions being under way, so that its lengths do not depend on how much of it is read. They come from
    WARM_UP * (turns - 1) * think * rate unseen turns (8,300 for chat at 4 requests/s); where those would be more than
    MOST_TURNS, see `_under_way`.
    Memory: the sessions under way, about rate * think seconds of them.
    """
    sessions = Sessions(spec, seed)
    per_token = 1e6 * (spec.answer_seconds_per_token.seconds if spec.answer_seconds_per_token else 0.0)
    before = _turns_before(spec, process.rate)
    ready: list[Waiting] = []
    if before > MOST_TURNS:
        ready, before = list(_under_way(spec, process.rate, per_token, seed)), 0
    unseen = (-math.ceil(k * 1e6 / process.rate) for k in range(before, 0, -1))  # evenly spaced
    for now in chain(unseen, process.microseconds(bits(seed, ARRIVALS))):
        session = _next(ready, now, sessions)
        turn = session.turns[-1]
        if now >= 0:
            yield sessions.request(session, now / 1e6)
        else:
            session.turns.pop()
            session.number += 1
        if session.turns:
            answered = now + round(turn.num_output_tokens * per_token)
            heapq.heappush(ready, (answered + session.turns[-1].think, session.id, session))


def _next(ready: list[Waiting], now: int, sessions: Sessions) -> Session:
    """The session that sends now: the first that is ready, or a new one."""
    while ready and ready[0][0] <= now:
        found = heapq.heappop(ready)[2]
        if isinstance(found, Session):
            return found
        turns, done = found
        session = sessions.draw(turns)
        del session.turns[max(0, len(session.turns) - done) :]
        session.number += done
        if session.turns:  # or its prompt became too long before
            return session
    return sessions.draw()


def _turns_before(spec: Workload, rate: float) -> int:
    """The number of turns in WARM_UP mean lives of a session."""
    if not spec.has_sessions or spec.think is None or spec.answer_seconds_per_token is None:
        return 0
    pause = spec.think.mean() + spec.output.mean() * spec.answer_seconds_per_token.seconds
    return math.ceil(WARM_UP * (spec.turns.mean() - 1) * pause * rate)


def _under_way(spec: Workload, rate: float, per_token: float, seed: int) -> Iterator[Waiting]:
    """Sessions in a pause at time 0, the first to be ready first, drawn as they are found there in the long run.

    By Little's law there are rate * (1 - 1 / turns) * pause of them. At a random moment a pause is found with a
    probability in proportion to its length, at any point of it. Each pause of a session is found alike, so sessions are
    found in proportion to their number of pauses. The rest of a session is drawn when it is ready. Two things are left
    out: the wait for the next arrival (1 / rate, less than a thousandth of a pause where this is used), and that a long
    pause is a sign of a long answer before it.
    """
    assert spec.think is not None
    rng = bits(seed, UNDER_WAY)
    turns = np.array(whole(spec.turns, 1)(rng, POOL))
    pauses = spec.think.sample(rng, POOL) * 1e6 + spec.output.sample(rng, POOL) * per_token
    num = round(rate * (1 - 1 / turns.mean()) * pauses.mean() / 1e6)
    rests = np.sort(pauses[choices(rng, pauses, num)] * rng.random(num)).astype(np.int64)
    turns = turns[choices(rng, turns - 1.0, num)]
    done = 1 + np.floor(rng.random(num) * (turns - 1)).astype(np.int64)
    for i, (rest, of, number) in enumerate(zip(rests.tolist(), turns.tolist(), done.tolist(), strict=True)):
        yield rest, f"{i:012}", (of, number)


def closed_stream(spec: Workload, process: ClosedLoop, seed: int) -> Iterator[WorkloadRequest]:
    """An endless stream of the requests of num_users users, in turn: one request of each, then the next.

    Each says after which request of its user it comes; a user whose session is over begins another after a pause. Users
    are not equally fast, so a reader holds back what the faster ones have yet to send: it grows with the square root of
    what was read. Every user starts with a new session, at 0.0.
    """
    sessions = Sessions(spec, seed)
    pauses = None if process.think is None else _pauses(spec, process.think, seed)
    users: list[Session | None] = [None] * process.num_users
    last: list[str | None] = [None] * process.num_users
    while True:
        for user in range(process.num_users):
            session = users[user]
            if session is None or not session.turns:
                session = users[user] = sessions.draw()
            think = (session.turns[-1].think if pauses is None else pauses.one()) / 1e6
            request = sessions.request(session, 0.0, last[user], 0.0 if last[user] is None else think)
            last[user] = request.id
            yield request


def _pauses(spec: Workload, think: float, seed: int) -> Draws:
    if think == 0:
        return Draws(lambda rng, num: [0] * num, spec.name, "user", seed)
    pause = Exponential(distribution="exponential", mean=think, because="given by the caller")
    return Draws(whole(pause, 0, 1e6), spec.name, "user", seed)
