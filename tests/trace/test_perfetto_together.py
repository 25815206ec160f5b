"""Traces of several engines as one file: one axis, tracks of their own, and what does not fit or is none."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from reference_impl.interfaces import Row
from reference_impl.observe import perfetto_together
from reference_impl.observe.perfetto_together import EngineTrace, packed, write_together
from reference_impl.observe.timeline import Slice
from reference_impl.observe.trace import RequestArrived, StepDone, Trace


def trace(begin: float, num_steps: int = 2) -> Trace:
    found = Trace([RequestArrived(begin, "r", 4)])
    for n in range(num_steps):
        found.add(StepDone(n, begin + n + 1, begin + n + 1.5, (Row("r", n, 1, True),), (), 0, 1, 9))
    return found


def transfer(name: str, direction: str, start: float, end: float) -> list[Slice]:
    whole = Slice(f"{direction} {name}", start, end, {"transfer": name, "direction": direction})
    return [whole, Slice("pages", end - 0.25, end, {"pages": 1})]


def written(file: Path, *traces: EngineTrace) -> list[dict[str, Any]]:
    write_together(traces, file)
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def test_clocks_that_began_at_other_times_are_one_axis(tmp_path: Path) -> None:
    one = EngineTrace("prefill 0", 1000.0, packed(trace(50.0), transfer("t", "pushed", 50.5, 52.0)))
    other = EngineTrace("decode 1", 990.0, packed(trace(63.0), transfer("t", "received", 60.25, 62.0)))
    events = written(tmp_path / "t.json", one, other)
    steps = {(e["pid"], e["ts"]) for e in events if e["ph"] == "X" and e["tid"] == 1 and e["pid"] in (1, 11)}
    assert steps == {(1, 1e6), (1, 2e6), (11, 4e6), (11, 5e6)}, "microseconds since 1050 s after 1970"
    arrows = {e["ph"]: (e["pid"], e["ts"]) for e in events if e["ph"] in "sf"}
    assert arrows == {"s": (9, 0.5e6), "f": (19, 0.5e6)}, "the receiver waited already"
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        1: "prefill 0", 2: "prefill 0: requests", 9: "prefill 0: transfers",
        11: "decode 1", 12: "decode 1: requests", 19: "decode 1: transfers",
    }  # fmt: skip


def test_transfers_that_overlap_have_tracks_of_their_own_and_one_side_alone_no_arrow(tmp_path: Path) -> None:
    times = {"a": (1, 4), "b": (2, 3), "c": (5, 6)}
    moved = [part for name in times for part in transfer(name, "pushed", *times[name])]
    events = written(tmp_path / "t.json", EngineTrace("engine 0", 0.0, packed(Trace(), moved)))
    tracks = [(e["name"], e["tid"]) for e in events if e["ph"] == "X"]
    assert sorted(tracks) == [("pages", 1), ("pages", 1), ("pages", 2), ("pushed a", 1), ("pushed b", 2),
                              ("pushed c", 1)]  # fmt: skip
    assert not [e for e in events if e["ph"] in "sf"]


def test_of_a_trace_that_is_too_large_the_end_is_sent(tmp_path: Path) -> None:
    long = trace(0.0, num_steps=300)
    whole, part = packed(long, []), packed(long, [], most_bytes=4000)
    assert len(part) <= 4000 < len(whole)
    events = written(tmp_path / "t.json", EngineTrace("engine 0", 0.0, part))
    steps = [e["args"]["step"] for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert 0 < len(steps) < 300
    assert steps == [*range(300 - len(steps), 300)]


def test_nothing_at_all_is_a_file_too(tmp_path: Path) -> None:
    assert written(tmp_path / "t.json") == []
    assert written(tmp_path / "t.json", EngineTrace("engine 0", 0.0, packed(Trace(), []))) == []


@pytest.mark.parametrize("content", [b"", b"no zlib", packed(trace(0.0), [])[:-9]])
def test_events_that_are_none_are_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match="the events of an engine"):
        written(tmp_path / "t.json", EngineTrace("engine 0", 0.0, content))


def test_events_that_unpack_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto_together, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        written(tmp_path / "t.json", EngineTrace("engine 0", 0.0, zlib.compress(b" " * 100_000)))
