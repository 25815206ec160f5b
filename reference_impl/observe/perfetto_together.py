"""The traces of several engines as one file for Perfetto: each has processes of its own, and transfers join them.

    process "prefill 0"              its steps and counters, as in `perfetto.py`; so "prefill 0: requests", ": ranks"
    process "prefill 0: transfers"   tracks with a slice for each transfer of pages, in it one from the first page on

An arrow leads from the slice of who pushed to that of who received. Engines are placed by their time of day, as each
has it: those of other machines are as far off as their clocks are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from reference_impl.observe.perfetto import complete_event, name_event, to_perfetto, write_events
from reference_impl.observe.timeline import Slice
from reference_impl.observe.trace import Trace

PIDS = 10  # of an engine: more than `perfetto.py` has, with TRANSFERS
TRANSFERS = 9
MOST_BYTES = 1 << 30  # of one engine's events


@dataclass(frozen=True)
class EngineTrace:
    """name: of its processes. epoch: seconds since 1970 when its clock was 0. events: from `packed`."""

    name: str
    epoch: float
    events: bytes


def packed(trace: Trace, transfers: Sequence[Slice], most_bytes: int = MOST_BYTES) -> bytes:
    """The events of one engine at times of its clock, to be sent: JSON, compressed. Where that is more than most_bytes,
    the older half of the trace is left out, and again, until it is not."""
    kept = trace
    while True:
        events = to_perfetto(kept, zero=0.0)["traceEvents"] + list(_transfer_events(transfers))
        content = zlib.compress(json.dumps(events, allow_nan=False).encode(), 1)
        if len(content) <= most_bytes or not kept.events:
            return content
        kept = Trace(kept.events[(len(kept.events) + 1) // 2 :])


def write_together(traces: Sequence[EngineTrace], file: Path) -> None:
    """Writes one file, whose times begin with the first event. ValueError for events that `packed` has not made."""
    names: list[dict[str, Any]] = []
    slices: list[dict[str, Any]] = []
    first = min((trace.epoch for trace in traces), default=0.0)
    for number, trace in enumerate(traces):
        for event in _unpacked(trace.events):
            event["pid"] += PIDS * number
            if event["ph"] != "M":
                event["ts"] += round((trace.epoch - first) * 1e9) / 1000
                slices.append(event)
                continue
            if event["name"] == "process_name":
                kind = event["args"]["name"]
                event["args"] = {"name": trace.name if kind == "engine" else f"{trace.name}: {kind}"}
            names.append(event)
    zero = min((event["ts"] for event in slices), default=0.0)
    slices += _flows(slices)
    for event in slices:
        event["ts"] = round(event["ts"] - zero, 3)
    slices.sort(key=lambda event: float(event["ts"]))
    write_events(names + slices, file)


def _unpacked(content: bytes) -> list[dict[str, Any]]:
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(content, MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"the events of an engine cannot be read: {error}") from None
    if not unpacker.eof:
        raise ValueError(f"the events of an engine are cut off, or more than {MOST_BYTES} bytes")
    events: list[dict[str, Any]] = json.loads(text)
    return events


def _transfer_events(transfers: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    """Slices on one track must not overlap: each transfer goes on the first track that is free when it begins. What is
    within one comes after it."""
    ends: list[float] = []
    whole = [n for n, part in enumerate(transfers) if "transfer" in part.args]
    each = [transfers[begin:end] for begin, end in pairwise([*whole, len(transfers)])]
    for parts in sorted(each, key=lambda parts: parts[0].start):
        track = next((n for n, end in enumerate(ends) if end <= parts[0].start), len(ends))
        ends[track:track + 1] = [parts[0].end]  # fmt: skip
        yield from (complete_event(part, TRANSFERS, track + 1, 0.0) for part in parts)
    if ends:
        yield name_event("process_name", TRANSFERS, 0, "transfers")
        yield from (name_event("thread_name", TRANSFERS, track + 1, "transfers") for track in range(len(ends)))


def _flows(slices: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """An arrow for each transfer that both sides have: from where the sender begins to where the receiver does, or to
    the same moment where the receiver waited already."""
    ends: dict[str, dict[str, dict[str, Any]]] = {}
    for event in slices:
        if event["pid"] % PIDS == TRANSFERS and "transfer" in event["args"]:
            ends.setdefault(event["args"]["transfer"], {})[event["args"]["direction"]] = event
    for number, (transfer, sides) in enumerate(ends.items(), 1):
        if len(sides) < 2:
            continue
        pushed, received = sides["pushed"], sides["received"]
        arrives = min(max(received["ts"], pushed["ts"]), received["ts"] + received["dur"])
        common = {"name": f"transfer {transfer}", "cat": "transfer", "id": number}
        for ph, at, event in (("s", pushed["ts"], pushed), ("f", arrives, received)):
            yield common | {"ph": ph, "bp": "e", "ts": at, "pid": event["pid"], "tid": event["tid"]}
