"""Requests as JSON lines, one per line, so that a trace can be kept, sent and inspected."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from reference_impl.simulation.workloads.recent import Recent
from reference_impl.simulation.workloads.request import PAGE_TOKENS, WorkloadRequest
from reference_impl.simulation.workloads.spec import WorkloadError

NAMES = [f.name for f in fields(WorkloadRequest)]
KEPT = 200_000  # ids that a reader remembers, about 30 MB
REQUIRED = ("id", "arrival", "num_prompt_tokens", "num_output_tokens", "pages")


def write_jsonl(path: str | Path, requests: Iterable[WorkloadRequest]) -> int:
    """Writes one request a line, leaving out fields at their defaults. Returns how many."""
    defaults = {f.name: f.default for f in fields(WorkloadRequest)}
    num = 0
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for request in requests:
            values = ((name, getattr(request, name)) for name in NAMES)
            line = {name: value for name, value in values if name in REQUIRED or value != defaults[name]}
            file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n")
            num += 1
    return num


def read_jsonl(path: str | Path) -> Iterator[WorkloadRequest]:
    """The requests of a file, read as they are needed. Raises WorkloadError: file:line: field: what was expected.

    Checked: names, types, ranges, as many pages as the prompt has, and arrivals that never decrease (among requests
    that follow no other). Also that a request's id is not one of the last KEPT ids, and that `after` is: equal ids
    further apart are not found, and a request that follows one further back is rejected.
    """
    last = 0.0
    lines: Recent[int] = Recent(KEPT)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if not line.strip():
                raise WorkloadError(f"{where}: expected a JSON object, got an empty line")
            request = _request(line, where)
            if request.id in lines.values:
                raise WorkloadError(
                    f"{where}: id: expected one of its own, got {_shown(request.id)}, which is line "
                    f"{lines.values[request.id]}'s"
                )
            if request.after is not None and request.after not in lines.values:
                raise WorkloadError(
                    f"{where}: after: expected the id of one of the {KEPT:,} requests before, got "
                    f"{_shown(request.after)}"
                )
            lines.put(request.id, number)
            if request.after is None:
                if request.arrival < last:
                    raise WorkloadError(
                        f"{where}: arrival: expected {last!r} or later (sort the file), got {request.arrival!r}"
                    )
                last = request.arrival
            yield request


def _request(line: bytes, where: str) -> WorkloadRequest:
    try:
        raw = json.loads(line.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{where}: no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise WorkloadError(f"{where}: expected a JSON object, got {type(raw).__name__}")
    if unknown := [name for name in raw if name not in NAMES]:
        raise WorkloadError(f"{where}: {unknown[0]}: no such field; there are {', '.join(NAMES)}")
    if missing := [name for name in REQUIRED if name not in raw]:
        raise WorkloadError(f"{where}: {missing[0]}: missing")
    for name, value in raw.items():
        allowed, expected = CHECKS[name]
        if not allowed(value):
            raise WorkloadError(f"{where}: {name}: expected {expected}, got {_shown(value)}")
    full = raw["num_prompt_tokens"] // PAGE_TOKENS
    if len(raw["pages"]) != full:
        raise WorkloadError(
            f"{where}: pages: expected {full}, one for each {PAGE_TOKENS} of {raw['num_prompt_tokens']} prompt tokens, "
            f"got {len(raw['pages'])}"
        )
    if raw.get("after") == raw["id"]:
        raise WorkloadError(f"{where}: after: expected another request, got its own id")
    raw["pages"] = tuple(raw["pages"])
    raw["arrival"], raw["think"] = float(raw["arrival"]), float(raw.get("think", 0.0))
    return WorkloadRequest(**raw)


def _integer(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e12


def _hashes(value: Any) -> bool:
    return isinstance(value, list) and all(type(h) is int and 0 <= h < 1 << 64 for h in value)


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (lambda value: isinstance(value, str) and value != "", "a text that is not empty"),
    "arrival": (_seconds, "seconds, 0 or more"),
    "num_prompt_tokens": (_integer(1), "an integer, 1 or more"),
    "num_output_tokens": (_integer(1), "an integer, 1 or more"),
    "pages": (_hashes, "a list of integers from 0 to 2^64 - 1"),
    "session": (_text, "a text"),
    "tenant": (_text, "a text"),
    "after": (lambda value: value is None or (isinstance(value, str) and value != ""), "the id of a request, or null"),
    "think": (_seconds, "seconds, 0 or more"),
    "images": (_integer(0), "an integer, 0 or more"),
}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name}: given twice")
        found[name] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
