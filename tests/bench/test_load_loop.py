"""When the load generator sends, and what an open loop sees that a closed one hides. The event loop's time is virtual:
a sleep passes at once, and every figure here is exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from reference_impl.bench.load import loop as loop_module
from reference_impl.bench.load.client import Client, Outcome
from reference_impl.bench.load.loop import send_all
from reference_impl.bench.load.report import Objectives, Report, report
from reference_impl.simulation.workloads import WorkloadRequest


class VirtualTime(asyncio.SelectorEventLoop):
    """Where a loop would wait for the next timer, its clock jumps there."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everybody waits, and nobody will wake them")
        self.loop.now += timeout
        return super().select(0)


Service = Callable[[WorkloadRequest], Any]


@dataclass
class FakeServer:
    """serve: what happens to a request until its only token comes."""

    serve: Service
    in_flight: int = 0
    most_in_flight: int = 0
    sent: list[tuple[str, float]] = field(default_factory=list)  # in order, seconds from the start
    bodies: list[str] = field(default_factory=list)

    def body(self, request: WorkloadRequest) -> bytes:
        self.bodies.append(request.id)
        return b""

    async def send(self, request: WorkloadRequest, body: bytes, planned: float) -> Outcome:
        now = asyncio.get_running_loop().time
        sent = now()
        self.sent.append((request.id, round(sent - 100.0, 6)))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        error = await self.serve(request)
        self.in_flight -= 1
        return Outcome(request.id, planned, sent, now(), 1, 1, (now(),), 1, error=error)


def run(
    requests: Iterable[WorkloadRequest], serve: Service, num: int = 1000, max_in_flight: int | None = None
) -> tuple[FakeServer, list[Outcome]]:
    server, outcomes = FakeServer(serve), list[Outcome]()
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(send_all(requests, num, server, outcomes.append, max_in_flight))
    return server, sorted(outcomes, key=lambda o: o.planned)


def one_at_a_time(seconds: float) -> Service:
    """A server that serves one request at a time."""
    lock = asyncio.Lock()

    async def serve(request: WorkloadRequest) -> None:
        async with lock:
            await asyncio.sleep(seconds)

    return serve


def at(*times: float) -> list[WorkloadRequest]:
    return [WorkloadRequest(f"r{i}", time, 8, 1, ()) for i, time in enumerate(times)]


def users(num_users: int, think: float = 0.0) -> Iterator[WorkloadRequest]:
    """A closed workload without end: the users take turns in it."""
    last: dict[int, str] = {}
    i = 0
    while True:
        for user in range(num_users):
            after, last[user] = last.get(user), f"u{user}.{i}"
            yield WorkloadRequest(last[user], 0.0, 8, 1, (), after=after, think=think if after else 0.0)
        i += 1


def summary(outcomes: list[Outcome]) -> Report:
    return report(outcomes, Objectives(ttft=1.5, tpot=1.0))


def values(result: Report, name: str) -> list[float]:
    row = next(row for row in result.rows if row.name == name)
    return [row.percentiles[p].value for p in (50, 90, 99)]


class TimedStream(httpx.AsyncByteStream):
    """Parts of an answer, each after a pause."""

    def __init__(self, *parts: tuple[float, bytes]):
        self.parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for pause, part in self.parts:
            await asyncio.sleep(pause)
            yield part


def test_the_times_of_an_answer_are_those_at_which_its_parts_came():
    """The rest of the body after [DONE] is read, for the connection's sake, and does not belong to the answer."""
    token = b'data: {"choices": [{"text": "a"}]}\n\n'
    stream = TimedStream(
        (0.5, token[:20]), (0.25, token[20:]), (1.0, token + token), (0.5, token),
        (0.25, b"data: [DONE]"), (0.5, b"\n\n"), (0.75, b": bye\n\n"),
    )  # fmt: skip

    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(2.0)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=stream)

    async def main() -> Outcome:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            client, request = Client(http, "http://server", "m"), at(0.0)[0]
            await asyncio.sleep(1.0)
            return await client.send(request, client.body(request), 100.25)

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        outcome = runner.run(main())
        assert runner.get_loop().time() == 106.75
    assert (outcome.error, outcome.planned, outcome.sent, outcome.ended) == (None, 100.25, 101.0, 106.0)
    assert outcome.token_times == (103.75, 104.75, 104.75, 105.25)
    assert outcome.metrics(outcome.planned).ttft == 3.5
    assert outcome.metrics(outcome.sent).tpot == 0.5


def test_an_open_loop_sends_at_the_planned_times_whatever_comes_back():
    server, outcomes = run(at(0.5, 1.0, 1.0, 4.25), one_at_a_time(100.0))
    assert server.sent == [("r0", 0.5), ("r1", 1.0), ("r2", 1.0), ("r3", 4.25)]
    assert [o.planned - 100.0 for o in outcomes] == [0.5, 1.0, 1.0, 4.25]
    assert server.most_in_flight == 4


def test_the_open_loop_reports_the_queue_that_a_closed_loop_hides():
    """Two requests a second for a server that can do one: each waits half a second longer than the one before it.

    One user in a closed loop asks again when the answer is there, and finds the same server always fast.
    """
    _, outcomes = run(at(*(i / 2 for i in range(101))), one_at_a_time(1.0))
    opened = summary(outcomes)
    assert [o.ended - o.planned for o in outcomes] == pytest.approx([1 + i / 2 for i in range(101)])
    assert values(opened, "TTFT from planned") == pytest.approx([26.0, 46.0, 50.5])
    assert opened.attainment.value == pytest.approx(2 / 101)  # after 1 s and 1.5 s
    _, outcomes = run(users(1), one_at_a_time(1.0), num=101)
    closed = summary(outcomes)
    assert values(closed, "TTFT from planned") == pytest.approx([1.0, 1.0, 1.0])
    assert closed.attainment.value == 1.0
    assert opened.request_rate == pytest.approx(closed.request_rate)  # the server did the same work in both


def frozen(begin: float, end: float) -> Service:
    """Takes 10 ms, and does nothing at all between these two moments."""

    async def serve(request: WorkloadRequest) -> None:
        now = asyncio.get_running_loop().time() - 100.0
        await asyncio.sleep(0.01 if not begin <= now < end else end - now + 0.01)

    return serve


def test_a_stall_is_seen_by_everybody_who_would_have_asked_in_it_and_by_one_closed_user():
    """Ten requests a second; the server stands still from 10 s to 20 s of 100 s. (Tene's example.)"""
    _, outcomes = run(at(*(i / 10 for i in range(1000))), frozen(10.0, 20.0))
    slow = [o.ended - o.planned for o in outcomes if o.ended - o.planned > 0.02]
    assert len(slow) == 100
    assert max(slow) == pytest.approx(10.01)
    assert values(summary(outcomes), "TTFT from planned")[2] > 8.9
    _, outcomes = run(users(1, think=0.09), frozen(10.0, 20.0), num=900)
    slow = [o.ended - o.planned for o in outcomes if o.ended - o.planned > 0.02]
    assert len(slow) == 1
    assert values(summary(outcomes), "TTFT from planned") == pytest.approx([0.01, 0.01, 0.01])


def test_a_wait_in_the_client_counts_from_planned_and_not_from_sent():
    """At most one in flight: the client queues in place of the server, and who counts from sending sees nothing."""
    server, outcomes = run(at(*(i / 2 for i in range(101))), one_at_a_time(1.0), max_in_flight=1)
    assert server.most_in_flight == 1
    assert [name for name, _ in server.sent] == [f"r{i}" for i in range(101)]
    result = summary(outcomes)
    assert values(result, "TTFT from planned") == pytest.approx([26.0, 46.0, 50.5])
    assert values(result, "TTFT from sent") == pytest.approx([1.0, 1.0, 1.0])
    assert values(result, "delay of the client") == pytest.approx([25.0, 45.0, 49.5])
    assert (result.attainment.value, result.attainment_from_sent.value) == pytest.approx((2 / 101, 1.0))


def test_a_request_after_another_is_planned_when_that_has_ended_and_the_user_has_thought():
    requests = [
        WorkloadRequest("a", 1.0, 8, 1, ()),
        WorkloadRequest("b", 0.0, 8, 1, (), after="a", think=2.5),
        WorkloadRequest("c", 9.0, 8, 1, (), after="a", think=0.0),  # not before its own arrival
        WorkloadRequest("d", 1.5, 8, 1, ()),
        WorkloadRequest("e", 0.0, 8, 1, (), after="b", think=1.0),
    ]

    async def serve(request: WorkloadRequest) -> str | None:
        await asyncio.sleep(0.25)
        return "HTTP 500" if request.id == "b" else None

    server, outcomes = run(requests, serve)
    assert server.sent == [("a", 1.0), ("d", 1.5), ("b", 3.75), ("e", 5.0), ("c", 9.0)]
    assert all(o.sent == o.planned for o in outcomes)
    assert [o.id for o in outcomes if o.error] == ["b"]


def test_a_user_who_was_refused_asks_again_when_the_server_said():
    server = FakeServer(one_at_a_time(0.0))

    async def refused(request: WorkloadRequest, body: bytes, planned: float) -> Outcome:
        server.sent.append((request.id, planned - 100.0))
        return Outcome(request.id, planned, planned, planned + 0.5, 1, 1, error="HTTP 429", retry_after=2.0)

    server.send = refused  # type: ignore[method-assign]
    requests = [
        WorkloadRequest("a", 1.0, 8, 1, ()),
        WorkloadRequest("b", 0.0, 8, 1, (), after="a", think=1.0),
        WorkloadRequest("c", 0.0, 8, 1, (), after="b", think=3.0),
    ]
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(send_all(requests, 3, server, lambda outcome: None))
    assert server.sent == [("a", 1.0), ("b", 3.5), ("c", 7.0)]


def test_a_closed_loop_keeps_all_users_busy_to_the_end_although_some_are_faster():
    async def serve(request: WorkloadRequest) -> None:
        await asyncio.sleep(10.0 if request.id.startswith("u0") else 1.0)

    server, outcomes = run(users(3), serve, num=90)
    assert len(outcomes) == 90
    assert server.most_in_flight == 3
    of_user = [sum(name.startswith(f"u{u}.") for name, _ in server.sent) for u in range(3)]
    assert of_user[0] == 5
    assert sorted(of_user[1:]) == [42, 43]
    assert max(time for _, time in server.sent) < 43  # and nobody was waited for


def test_a_workload_without_end_is_read_no_further_than_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop_module, "MAX_HELD", 10)
    num_read = 0

    def counted() -> Iterator[WorkloadRequest]:
        nonlocal num_read
        for request in users(4):
            num_read += 1
            yield request

    server, outcomes = run(counted(), one_at_a_time(1.0), num=200)
    assert len(outcomes) == len(server.bodies) == 200
    assert num_read <= 200 + 10 + 2


def test_a_user_far_ahead_of_the_others_waits_and_the_wait_is_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop_module, "MAX_HELD", 4)

    async def serve(request: WorkloadRequest) -> None:
        await asyncio.sleep(100.0 if request.id.startswith("u0") else 1.0)

    _, outcomes = run(users(2), serve, num=30)
    late = [o for o in outcomes if o.sent > o.planned]
    assert late
    assert all(o.id.startswith("u1.") for o in late)
    assert max(o.sent - o.planned for o in late) > 50


def test_who_is_under_way_when_a_load_is_cancelled_is_told_with_its_planned_moment():
    """One was answered, one is with the server, one waits for a seat. Of two the time has not come."""
    thinks = WorkloadRequest("thinks", 0.0, 8, 1, (), after="r0", think=60.0)
    requests = [*at(0.0, 1.0, 2.0), thinks, WorkloadRequest("late", 30.0, 8, 1, ())]
    under_way: dict[str, float] = {}
    server, outcomes = FakeServer(one_at_a_time(10.0)), list[Outcome]()

    async def main() -> None:
        async with asyncio.timeout(15.0):
            await send_all(requests, 5, server, outcomes.append, 1, under_way)

    with asyncio.Runner(loop_factory=VirtualTime) as runner, pytest.raises(TimeoutError):
        runner.run(main())
    assert [o.id for o in outcomes] == ["r0"]
    assert under_way == {"r1": 101.0, "r2": 102.0}


def test_a_body_is_made_before_the_moment_in_which_it_is_sent():
    made: list[float] = []

    class Slow(FakeServer):
        def body(self, request: WorkloadRequest) -> bytes:
            made.append(asyncio.get_running_loop().time() - 100.0)
            return b""

    async def serve(request: WorkloadRequest) -> None:
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(send_all(at(1.0, 2.0, 3.0), 3, Slow(serve), lambda outcome: None))
    assert made == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        (at(0.0, 1.0) + at(2.0), "'r0' comes twice"),
        ([WorkloadRequest("a", 0.0, 8, 1, (), after="b")], "'a' comes after 'b', which is not before it"),
    ],
)
def test_a_workload_that_cannot_be_sent_is_an_error(requests: list[WorkloadRequest], words: str):
    with pytest.raises(ExceptionGroup) as caught:
        run(requests, one_at_a_time(0.1))
    assert words in str(caught.value.exceptions[0])
