"""The Perfetto file of a trace: the format, slices that nest and never overlap, and the same times as Trace.metrics."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.interfaces import BlockPair, Row, SamplingParams, Transfers
from reference_impl.observe.perfetto import to_perfetto, write_perfetto
from reference_impl.observe.trace import RequestArrived, RequestFinished, StepDone, Trace

Events = list[dict[str, Any]]


class TickingClock:
    """Every look at it takes time, never the same."""

    def __init__(self) -> None:
        self.time, self.looks = 1000.0, 0

    def now(self) -> float:
        self.looks += 1
        self.time += 0.001 + 0.0007 * (self.looks % 5) + 1e-7 / 3
        return self.time


def run(model: Any, trace: Trace | None = None, **options: Any) -> Trace:
    """Nine requests with shared prompts in so few blocks that some are thrown out; one is aborted, one comes late."""
    config = EngineConfig(**{"block_size": 4, "num_blocks": 14, "max_num_batched_tokens": 16} | options)
    engine = Engine(model, config, Parts(clock=TickingClock(), trace=trace))
    shared = list(range(3, 15))
    for i in range(7):
        prompt = shared[: 4 * (i % 4)] + [20 + i] * (i + 1)
        engine.add(prompt, SamplingParams(max_tokens=5 + 2 * i, temperature=0, ignore_eos=True), f"r{i}")
    for _ in range(6):
        engine.step()
    engine.abort("r6")
    engine.add(shared, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, n=2), "pair")
    while engine.has_work():
        engine.step()
    return engine.trace


OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"preemption": "swap", "swap_bytes": 2**20}, {"prefix_cache": "off"}, {"max_num_seqs": 2}, {"num_blocks": 60},
)  # fmt: skip


@pytest.fixture(scope="module", params=OPTIONS, ids=lambda options: ", ".join(options) or "recompute")
def trace(request: pytest.FixtureRequest, random_model: Callable[..., Any]) -> Trace:
    return run(random_model(), **request.param)


def tracks(content: dict[str, Any]) -> dict[tuple[int, int], Events]:
    """The slices of each track, in the order of the file."""
    found: dict[tuple[int, int], Events] = defaultdict(list)
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    """Start and end, in the unit Perfetto keeps."""
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def depths(slices: Events) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reads a track as Perfetto does; fails where a slice ends after the one around it."""
    stack: list[tuple[int, int]] = []
    last = 0
    for event in slices:
        start, end = nanoseconds(event)
        assert last <= start <= end
        last = start
        while stack and stack[-1][1] <= start and (start, end) != stack[-1]:
            stack.pop()
        assert not stack or end <= stack[-1][1], f"{event} ends after the slice around it"
        yield len(stack), event
        stack.append((start, end))


def request_tracks(content: dict[str, Any]) -> dict[str, Events]:
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"
    }  # fmt: skip
    return {names[track]: slices for track, slices in tracks(content).items() if track[0] == 2}


PHASES = ("queued", "prefill", "decode", "recompute", "preempted", "swapped out")
UNITS = {"running": "requests", "waiting": "requests", "free": "blocks", "batch": "tokens"}


def phases(slices: Events) -> Events:
    return [e for e in slices if e["name"] in PHASES]


def check_format(content: dict[str, Any]) -> None:
    """The trace-event format: which fields an event of each kind has, and of which type."""
    assert set(content) == {"traceEvents", "displayTimeUnit"}
    assert content["displayTimeUnit"] == "ms"
    needs = {"X": {"dur"}, "C": set(), "M": set()}
    named: set[tuple[int, int]] = set()
    for event in content["traceEvents"]:
        assert set(event) == {"name", "ph", "ts", "pid", "tid", "args"} | needs[event["ph"]]
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        assert all(type(event[key]) is int for key in ("pid", "tid"))
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            named.add((event["pid"], event["tid"]))
        elif event["ph"] == "C":
            assert list(event["args"]) == [UNITS[event["name"]]]
            assert all(type(value) is int for value in event["args"].values())
        else:
            assert event["dur"] >= 0
    assert set(tracks(content)) <= named


def test_the_file_has_the_form_of_the_trace_event_format(trace: Trace, tmp_path: Path):
    content = to_perfetto(trace)
    check_format(content)
    write_perfetto(trace, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == content
    assert min(e["ts"] for e in content["traceEvents"] if e["ph"] == "X") == 0


def test_slices_nest_and_siblings_never_overlap(trace: Trace):
    for (pid, _), slices in tracks(to_perfetto(trace)).items():
        for depth, event in depths(slices):
            if pid == 1:
                assert depth == 0
            else:
                wanted = 0 if event["name"].startswith("request ") else 1 if event["name"] in PHASES else 2
                assert depth == wanted, event


def test_phases_follow_one_another_from_the_arrival_to_the_last_token(trace: Trace):
    for name, slices in request_tracks(to_perfetto(trace)).items():
        parts = phases(slices)
        for earlier, later in pairwise(parts):
            assert nanoseconds(earlier)[1] == nanoseconds(later)[0]
            assert earlier["name"] != later["name"]
        assert parts[0]["name"] == "queued"
        assert nanoseconds(parts[0])[0] == nanoseconds(slices[0])[0]
        if trace.metrics(name).latency is not None and parts[-1]["name"] not in ("preempted", "swapped out"):
            whole = sum(e["dur"] for e in parts)
            assert whole == pytest.approx(trace.metrics(name).latency * 1e6, abs=0.01)


def test_times_are_those_of_the_metrics(trace: Trace):
    found = request_tracks(to_perfetto(trace))
    assert set(found) == {e.request_id for e in trace.events if isinstance(e, RequestArrived)}
    for name, slices in found.items():
        metrics, args, parts = trace.metrics(name), slices[0]["args"], phases(slices)
        assert args["output_tokens"] == metrics.num_output_tokens
        for field in ("queue", "ttft", "tpot", "latency"):
            seconds = getattr(metrics, field)
            assert args.get(f"{field}_ms") == (None if seconds is None else pytest.approx(seconds * 1e3, abs=1e-5))
        if metrics.queue is not None:
            assert parts[0]["dur"] == pytest.approx(metrics.queue * 1e6, abs=0.01)
        steps = [e for e in slices if e["name"] in ("chunk", "token")]
        mine = [(s.step_id, row) for s in trace.steps() for row in s.rows if row.request_id == name]
        assert [(e["args"]["step"], e["args"]["from"], e["args"]["tokens"]) for e in steps] == [
            (step, row.start, row.num_tokens) for step, row in mine
        ]
        if [e["name"] for e in parts] == ["queued", "prefill", "decode"]:
            assert parts[1]["dur"] == pytest.approx(metrics.prefill * 1e6, abs=0.01)
            assert parts[2]["dur"] == pytest.approx(sum(metrics.itl) * 1e6, abs=0.01)


def test_the_steps_and_counters_are_the_engines(trace: Trace):
    content = to_perfetto(trace)
    slices = tracks(content)[1, 1]
    steps = trace.steps()
    assert [e["args"]["step"] for e in slices] == [s.step_id for s in steps]
    assert [e["args"]["tokens"] for e in slices] == [sum(r.num_tokens for r in s.rows) for s in steps]
    counters = [e for e in content["traceEvents"] if e["ph"] == "C"]
    for name, of in (("running", "num_running"), ("waiting", "num_waiting"), ("free", "num_free_blocks")):
        assert [e["args"][UNITS[name]] for e in counters if e["name"] == name] == [getattr(s, of) for s in steps]
    assert counters[-1]["args"] == {"blocks": steps[-1].num_free_blocks}
    assert [e["args"]["tokens"] for e in counters if e["name"] == "batch"][-1] == 0


def test_requests_lie_in_the_order_of_their_arrival_and_none_is_taken_for_the_main_track(trace: Trace):
    """Perfetto's interface puts the track whose tid is its pid first, whatever thread_sort_index says."""
    content = to_perfetto(trace)
    named = [e for e in content["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 2]
    names = {e["tid"]: e["args"]["name"] for e in named}
    assert 2 not in names
    arrived = [e.request_id for e in trace.events if isinstance(e, RequestArrived)]
    assert [names[tid] for tid in sorted(names)] == arrived


def test_who_was_thrown_out_lies_where_the_scheduler_put_it(random_model: Callable[..., Any]):
    seen = {}
    for preemption in ("recompute", "swap"):
        trace = run(random_model(), preemption=preemption, swap_bytes=2**20)
        thrown = [name for s in trace.steps() for name in s.preempted]
        names = [e["name"] for slices in request_tracks(to_perfetto(trace)).values() for e in phases(slices)]
        assert sum(name in ("preempted", "swapped out") for name in names) == len(thrown) > 0
        seen[preemption] = names
    assert "swapped out" not in seen["recompute"]
    assert "recompute" in seen["recompute"]
    assert "swapped out" in seen["swap"]
    assert "recompute" not in seen["swap"]


def test_what_a_step_did_for_a_request_by_hand():
    swap = Transfers(swap_out=(BlockPair(1, 2),))
    trace = Trace(
        [
            RequestArrived(10.0, "a", 6),
            StepDone(1, 11.0, 12.0, (Row("a", 4, 1, False),), (), 0, 1, 5, admitted=(("a", 4),)),
            StepDone(2, 12.5, 13.0, (Row("a", 5, 1, True),), (), 0, 1, 5),
            StepDone(3, 13.5, 14.0, (Row("b", 0, 9, True),), ("a",), 1, 1, 2, swap),
            StepDone(4, 14.0, 15.0, (Row("a", 6, 1, True),), (), 0, 1, 5, admitted=(("a", 0),)),
            RequestFinished(15.25, "a", "stop", 2),
        ]
    )
    content = to_perfetto(trace)
    check_format(content)
    slices = request_tracks(content)["a"]
    whole, *inner = slices
    shown = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in inner]
    assert sorted(shown, key=lambda s: (s[1], -s[2])) == [
        ("queued", 0.0, 1.0),
        ("prefill", 1.0, 2.0), ("chunk", 1.0, 1.0), ("chunk", 2.5, 0.5),
        # It has its first token at 13; step 3, which might have given it the second, throws it out.
        ("decode", 3.0, 0.5), ("swapped out", 3.5, 0.5),
        ("decode", 4.0, 1.0), ("token", 4.0, 1.0),
    ]  # fmt: skip
    assert (whole["ts"], whole["dur"]) == (0, 5.25e6)
    assert whole["args"]["cached_tokens"] == 4
    assert whole["args"]["finish_reason"] == "stop"
    assert next(e for e in inner if e["name"] == "prefill")["args"] == {"tokens": 2, "steps": 2, "cached_tokens": 4}
    step = tracks(content)[1, 1][2]
    assert (step["args"]["preempted"], step["args"]["blocks_out"]) == (["a"], 1)


def test_a_trace_that_has_forgotten_its_beginning_says_so(random_model: Callable[..., Any]):
    trace = run(random_model(), trace=Trace(keep=12))
    content = to_perfetto(trace)
    check_format(content)
    for slices in tracks(content).values():
        list(depths(slices))
    arrived = {e.request_id for e in trace.events if isinstance(e, RequestArrived)}
    found = request_tracks(content)
    assert any(name not in arrived for name in found)
    for name, slices in found.items():
        assert ("arrival" in slices[0]["args"]) == (name not in arrived)


def test_an_unfinished_request_reaches_to_the_end_and_a_second_life_has_a_track_of_its_own():
    trace = Trace(
        [
            RequestArrived(0.0, "a", 1),
            StepDone(1, 0.0, 1.0, (Row("a", 0, 1, True),), (), 0, 0, 5),
            RequestFinished(1.0, "a", "length", 1),
            RequestArrived(2.0, "a", 1),
            RequestArrived(2.5, "b", 1),
            StepDone(2, 3.0, 4.0, (Row("b", 0, 1, True),), (), 1, 1, 5),
        ]
    )
    lives = [s for (pid, _), s in sorted(tracks(to_perfetto(trace)).items()) if pid == 2]
    assert [(s[0]["name"], s[0]["ts"], s[0]["dur"]) for s in lives] == [
        ("request a", 0.0, 1e6), ("request a", 2e6, 2e6), ("request b", 2.5e6, 1.5e6),
    ]  # fmt: skip
    assert [s[0]["args"]["finish_reason"] for s in lives] == ["length", "unfinished", "unfinished"]
    assert [(e["name"], e["dur"]) for e in phases(lives[1])] == [("queued", 2e6)]


def test_an_empty_trace_is_an_empty_file(tmp_path: Path):
    write_perfetto(Trace(), tmp_path / "empty.json")
    assert json.loads((tmp_path / "empty.json").read_text()) == {"traceEvents": [], "displayTimeUnit": "ms"}


@given(st.lists(st.floats(0, 1e-3), min_size=2, max_size=30), st.floats(0, 1e6))
def test_rounding_never_pushes_a_slice_out_of_the_one_around_it(gaps: list[float], zero: float):
    trace, time = Trace([RequestArrived(zero, "a", 1)]), zero
    for number, gap in enumerate(gaps):
        trace.add(StepDone(number, time, time + gap, (Row("a", number, 1, True),), (), 0, 1, 0))
        time += gap * 1.5
    for slices in tracks(to_perfetto(trace)).values():
        for _ in depths(slices):
            pass
