"""Traces as files: what is written is read back, and a wrong line is named."""

from __future__ import annotations

import json
from collections import deque
from itertools import islice
from pathlib import Path

import pytest

from reference_impl.simulation.workloads import (
    ClosedLoop,
    WorkloadError,
    WorkloadRequest,
    jsonl,
    names,
    read_jsonl,
    workload,
    write_jsonl,
)

GOOD = {"id": "a", "arrival": 0.5, "num_prompt_tokens": 130, "num_output_tokens": 3, "pages": [1, 2**64 - 1]}


@pytest.mark.parametrize("name", names())
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.jsonl"
    requests = list(workload(name, num_requests=300))
    assert write_jsonl(path, iter(requests)) == 300
    assert list(read_jsonl(path)) == requests
    assert list(workload(path)) == requests
    assert list(workload(path, num_requests=7)) == requests[:7]


def test_closed_loops_and_strange_texts_survive(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = list(workload("chat", num_requests=50, arrivals=ClosedLoop(num_users=3, think=1.5)))
    requests.append(WorkloadRequest('ü"\n\u2028', 0.0, 1, 1, (), session="会话", tenant="\\"))
    write_jsonl(path, requests)
    assert list(read_jsonl(path)) == requests
    assert path.read_bytes().count(b"\n") == 51


def test_a_line_holds_only_what_is_not_the_default(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_jsonl(path, [WorkloadRequest("a", 0.5, 130, 3, (1, 2))])
    assert json.loads(path.read_text()) == {**GOOD, "pages": [1, 2]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": "blue"}, "colour: no such field; there are id, arrival, num_prompt_tokens"),
        ({"id": ""}, "id: expected a text that is not empty, got ''"),
        ({"id": 7}, "id: expected a text that is not empty, got 7"),
        ({"arrival": -1}, "arrival: expected seconds, 0 or more, got -1"),
        ({"arrival": "0.5"}, "arrival: expected seconds, 0 or more, got '0.5'"),
        ({"arrival": True}, "arrival: expected seconds, 0 or more, got True"),
        ({"arrival": 0.1}, "arrival: expected 0.5 or later"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens: expected an integer, 1 or more, got 0"),
        ({"num_prompt_tokens": 130.0}, "num_prompt_tokens: expected an integer, 1 or more, got 130.0"),
        ({"num_output_tokens": 0}, "num_output_tokens: expected an integer, 1 or more"),
        ({"pages": [1]}, "pages: expected 2, one for each 64 of 130 prompt tokens, got 1"),
        ({"pages": [1, 2, 3]}, "pages: expected 2, one for each 64 of 130 prompt tokens, got 3"),
        ({"pages": [1, 2**64]}, "pages: expected a list of integers from 0 to 2^64 - 1"),
        ({"pages": [1, "2"]}, "pages: expected a list of integers"),
        ({"pages": None}, "pages: expected a list of integers"),
        ({"session": None}, "session: expected a text"),
        ({"after": "b"}, "after: expected another request, got its own id"),
        ({"after": 3}, "after: expected the id of a request, or null"),
        ({"think": -0.1}, "think: expected seconds"),
        ({"images": -1}, "images: expected an integer, 0 or more"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, change: dict, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | {"id": "b"} | change) + "\n")
    lines = read_jsonl(path)
    assert next(lines).id == "a"
    with pytest.raises(WorkloadError) as error:
        next(lines)
    assert str(error.value).startswith(f"{path}:2: {said}")


@pytest.mark.parametrize("field", list(GOOD))
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({name: value for name, value in GOOD.items() if name != field}))
    with pytest.raises(WorkloadError, match=f"trace.jsonl:1: {field}: missing"):
        next(read_jsonl(path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "no JSON"),
        (b"", "expected a JSON object, got an empty line"),
        (b"[1]", "expected a JSON object, got list"),
        (b"\xff\xfe", "no JSON"),
        (b'{"id": "a", "id": "b"}', "no JSON: id: given twice"),
        (b'{"arrival": NaN}', "no JSON: NaN is no number in JSON"),
        (b'{"arrival": Infinity}', "no JSON: Infinity is no number in JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"id": ' + b"9" * 5000 + b"}", "no JSON"),
    ],
)
def test_what_is_no_request_is_refused_with_its_line(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n" + json.dumps(GOOD).encode() + b"\n")
    with pytest.raises(WorkloadError) as error:
        list(read_jsonl(path))
    assert str(error.value).startswith(f"{path}:2: {said}")


def test_huge_arrivals_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD).replace("0.5", "1e400"))
    with pytest.raises(WorkloadError, match="arrival: expected seconds"):
        next(read_jsonl(path))


def test_lines_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(GOOD | {"id": name}) + "\n" for name in "abc") + "broken\n")
    assert len(list(islice(read_jsonl(path), 3))) == 3
    with pytest.raises(WorkloadError, match=":4: no JSON"):
        deque(read_jsonl(path), maxlen=0)


def test_requests_that_wait_for_others_need_no_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first = WorkloadRequest("a", 5.0, 1, 1, ())
    path_requests = [
        first,
        WorkloadRequest("b", 0.0, 1, 1, (), after="a", think=2.0),
        WorkloadRequest("c", 5.0, 1, 1, ()),
    ]
    write_jsonl(path, path_requests)
    assert list(read_jsonl(path)) == path_requests


def test_an_id_that_was_given_before_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_jsonl(path, [WorkloadRequest(name, 0.0, 1, 1, ()) for name in ("a", "b", "a")])
    with pytest.raises(WorkloadError) as error:
        list(read_jsonl(path))
    assert str(error.value) == f"{path}:3: id: expected one of its own, got 'a', which is line 1's"


def test_who_follows_somebody_that_did_not_come_before_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_jsonl(path, [WorkloadRequest("b", 0.0, 1, 1, (), after="a"), WorkloadRequest("a", 0.0, 1, 1, ())])
    with pytest.raises(WorkloadError) as error:
        list(read_jsonl(path))
    assert str(error.value) == f"{path}:1: after: expected the id of one of the 200,000 requests before, got 'a'"


def test_a_reader_remembers_no_more_than_the_last_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "KEPT", 2)
    path = tmp_path / "trace.jsonl"
    near = [WorkloadRequest(name, 0.0, 1, 1, ()) for name in ("a", "b", "c", "a")]
    near.append(WorkloadRequest("d", 0.0, 1, 1, (), after="c"))
    write_jsonl(path, near)
    assert list(read_jsonl(path)) == near
    write_jsonl(path, [*near, WorkloadRequest("e", 0.0, 1, 1, (), after="c")])
    with pytest.raises(WorkloadError, match=":6: after: expected the id of one of the 2 requests before, got 'c'"):
        list(read_jsonl(path))
