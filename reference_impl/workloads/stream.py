"""Sessions meet arrivals: the stream of requests. It keeps the sessions under way, and nothing of those that ended."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import chain

from reference_impl.workloads.arrivals import ClosedLoop, Open
from reference_impl.workloads.distributions import Exponential, bits
from reference_impl.workloads.request import WorkloadRequest
from reference_impl.workloads.sessions import Draws, Session, Sessions, whole
from reference_impl.workloads.spec import Workload

ARRIVALS = 0xA221  # beside the seed: the arrivals have a random stream of their own
WARM_UP = 5  # mean lives of a session before the first request; with 3, prompts of chat begin 7 % too short


def open_stream(spec: Workload, process: Open, seed: int) -> Iterator[WorkloadRequest]:
    """Requests in order of arrival, without end; `after` is None, for nobody waits.

    The process says when a request comes, a session says which: the one that has been ready for longest sends its next
    turn, and if none is ready a new session begins. A session is ready when its planned answer and its pause are over,
    so a pause is the one drawn plus the wait for the next arrival. The stream starts in the middle of the service's
    life, some sessions being under way, so that its lengths do not depend on how much of it is read.
    Memory: the sessions under way, about rate * think seconds of them. The start costs WARM_UP * (turns - 1) * think *
    rate turns that nobody sees: 8,300 for chat at 4 requests/s, 830,000 (some seconds) at 400.
    """
    sessions = Sessions(spec, seed)
    per_token = 1e6 * (spec.answer_seconds_per_token.seconds if spec.answer_seconds_per_token else 0.0)
    ready: list[tuple[int, str, Session]] = []
    times = process.microseconds(bits(seed, ARRIVALS))
    for now in chain(_before(spec, process.rate), times):
        session = heapq.heappop(ready)[2] if ready and ready[0][0] <= now else sessions.draw()
        turn = session.turns[-1]
        if now >= 0:
            yield sessions.request(session, now / 1e6)
        else:
            session.turns.pop()
            session.number += 1
        if session.turns:
            answered = now + round(turn.num_output_tokens * per_token)
            heapq.heappush(ready, (answered + session.turns[-1].think, session.id, session))


def _before(spec: Workload, rate: float) -> Iterator[int]:
    """Evenly spaced arrivals before the start, as long as sessions live: they only fill the stream with sessions."""
    if not spec.has_sessions or spec.think is None or spec.answer_seconds_per_token is None:
        return iter(())
    pause = spec.think.mean() + spec.output.mean() * spec.answer_seconds_per_token.seconds
    num = math.ceil(WARM_UP * (spec.turns.mean() - 1) * pause * rate)
    return (-math.ceil(k * 1e6 / rate) for k in range(num, 0, -1))


def closed_stream(spec: Workload, process: ClosedLoop, seed: int) -> Iterator[WorkloadRequest]:
    """Requests without end of num_users users, who take turns in the stream: one request of each, then the next.

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
