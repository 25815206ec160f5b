"""A learner's process that speaks the protocol itself: whatever it sends costs a check, and nothing else."""

from __future__ import annotations

import json
import math
import resource
import socket
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grader.learner_side import codec, wire
from grader.learner_side import peer as peer_module
from grader.learner_side.codec import CannotCross, Malformed
from grader.learner_side.peer import LAB_MODULE, Peer
from grader.learner_side.stand_ins import Handle
from grader.learner_side.wire import Connection


def frame(header: Any, *chunks: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    body = b"".join(len(c).to_bytes(8, "big") + c for c in chunks)
    return len(text).to_bytes(4, "big") + len(chunks).to_bytes(4, "big") + bytes(4) + text + body


def ok(value: Any, *chunks: bytes) -> bytes:
    return frame({"m": "ok", "v": value}, *chunks)


class Model:
    """An object of the examiner."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return None


Model.__module__ = LAB_MODULE


class Hostile:
    """A trusted end, and behind it a thread that answers every message with what `reply(header)` returns."""

    def __init__(self, reply: Callable[[dict[str, Any]], bytes], seconds: float = 60.0):
        ours, self.theirs = socket.socketpair()
        self.peer = Peer(Connection(ours), strict=True, call_seconds=seconds)
        self.reply, self.sock, self.heard = reply, ours, []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        connection = Connection(self.theirs)
        try:
            while True:
                header, self.chunks, _ = connection.receive()
                self.heard.append(header)
                self.theirs.sendall(self.reply(header))
        except (OSError, Malformed):
            pass
        finally:
            self.theirs.close()

    def call(self, *args: Any) -> Any:
        return self.peer.call(1, None, args, {})

    def close(self) -> None:
        self.sock.close()
        self.thread.join(timeout=30)


@pytest.fixture
def hostile() -> Iterator[Callable[..., Hostile]]:
    made: list[Hostile] = []

    def make(reply: Any, seconds: float = 60.0) -> Hostile:
        made.append(Hostile(reply if callable(reply) else lambda header: reply, seconds))
        return made[-1]

    yield make
    for one in made:
        one.close()


HANDLE = {"t": "h", "id": 7, "cls": "x", "methods": [], "dunders": []}
TENSOR = {"t": "T", "dtype": "float32", "shape": [4], "stride": [1], "c": 0, "first": 0}

MALFORMED = {
    "more nested than allowed": ok(json.loads("[" * 70 + "]" * 70)),
    "a million small values": ok([[]] * 1_100_000),
    "a million digits": frame('{"m": "ok", "v": ' + "9" * 1_000_000 + "}"),
    "an int of 14,000 bits": frame('{"m": "ok", "v": ' + "9" * 4200 + "}"),
    "NaN as JSON has it not": frame('{"m": "ok", "v": NaN}'),
    "infinity as JSON has it not": frame('{"m": "ok", "v": -Infinity}'),
    "another encoding": (lambda t: len(t).to_bytes(4, "big") + bytes(8) + t)('{"m": "ok", "v": 1}'.encode("utf-16")),
    "a list as a key": ok({"t": "d", "v": [[[1], 1]]}),
    "a dict as a key": ok({"t": "d", "v": [[{"t": "d", "v": []}, 1]]}),
    "a handle as a key": ok({"t": "d", "v": [[HANDLE, 1]]}),
    "a tensor as a key": ok({"t": "d", "v": [[TENSOR, 1]]}, bytes(16)),
    "a tuple as a key": ok({"t": "d", "v": [[{"t": "u", "v": []}, 1]]}),
    "a tensor in a set": ok({"t": "s", "v": [TENSOR]}, bytes(16)),
    "a handle in a tuple in a set": ok({"t": "s", "v": [{"t": "u", "v": [HANDLE]}]}),
    "100,000 keys with one hash": ok({"t": "s", "v": [i * (2**61 - 1) for i in range(100_000)]}),
    "100,000 dict keys with one hash": ok({"t": "d", "v": [[i * (2**61 - 1), 0] for i in range(100_000)]}),
    "one chunk described a thousand times": ok([{"t": "b", "c": 0}] * 1000, bytes(1 << 20)),
    "an element expanded a thousand times": ok([TENSOR | {"shape": [1 << 20], "stride": [0]}] * 1000, bytes(4)),
    "a tensor of 17 dimensions": ok(TENSOR | {"shape": [1] * 17, "stride": [1] * 17}, bytes(16)),
    "sizes beyond 64 bits": ok(TENSOR | {"shape": [0, 1 << 70], "stride": [1, 1]}, bytes(16)),
    "a handle whose number is text": ok(HANDLE | {"id": "7"}),
    "a handle whose number is a bool": ok(HANDLE | {"id": True}),
    "a handle without a number": ok({"t": "h"}),
    "a handle of a million methods": ok(HANDLE | {"methods": ["m"] * 100_000}),
    "a handle whose class is no text": ok(HANDLE | {"cls": [1]}),
    "an own object nobody gave": ok({"t": "h", "back": 12345}),
    "an own object by a list": ok({"t": "h", "back": [1]}),
    "a dataclass nobody knows": ok({"t": "dc", "n": "Peer", "v": {}}),
    "a kind that cannot be a key": ok({"t": ["T"]}),
    "a header without a kind": frame({}),
    "a request nobody serves": frame({"m": "cells", "v": None}),
    "an answer of another kind": frame({"m": ["ok"], "v": None}),
    "a changed tensor nobody sent": frame({"m": "ok", "v": 1, "w": [[0, 0]]}, bytes(16)),
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_what_is_not_a_message_ends_the_conversation_in_little_time_and_memory(raw: bytes, hostile: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    other = hostile(raw)
    with pytest.raises(Malformed):
        other.call()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10  # KiB
    with pytest.raises(Malformed):  # what comes now could be the answer to anything
        other.call()


def test_a_string_of_16_million_characters_is_one_value(hostile: Any) -> None:
    assert hostile(ok("x" * 15_000_000)).call() == "x" * 15_000_000
    with pytest.raises(Malformed):
        hostile(ok("x" * 17_000_000)).call()


def test_a_number_as_large_as_it_may_be_crosses_and_a_larger_one_is_refused_by_name() -> None:
    packer = codec.Packer(lambda obj: None, {})
    assert packer.pack(-(2 ** (codec.MAX_INT_BITS - 1))) < 0
    for value in (2**codec.MAX_INT_BITS, -(10**1_000_000)):
        with pytest.raises(CannotCross, match="bits"):
            packer.pack([value])


def test_too_many_values_are_refused_on_the_side_that_has_them() -> None:
    ours, theirs = socket.socketpair()
    with pytest.raises(CannotCross, match="return tensors"):
        Connection(ours).send({"v": [0] * (wire.MAX_VALUES + 1)}, [])
    theirs.close()
    ours.close()


def test_one_byte_at_a_time_is_not_more_time(hostile: Any) -> None:
    release = threading.Event()
    other = hostile(lambda header: release.wait(600) and b"", seconds=0.3)

    def drip() -> None:
        other.theirs.sendall((1 << 20).to_bytes(4, "big") + bytes(8))  # a header so long that it would take a day
        while not release.wait(0.05):
            other.theirs.sendall(b" ")

    dripping = threading.Thread(target=drip, daemon=True)
    dripping.start()
    with pytest.raises(TimeoutError):
        other.call()
    release.set()
    dripping.join()


def test_one_who_does_not_read_cannot_hold_up_the_examiner() -> None:
    ours, theirs = socket.socketpair()
    peer = Peer(Connection(ours), strict=True, call_seconds=0.3)
    with pytest.raises(TimeoutError):
        peer.call(1, None, tuple(torch.zeros(1 << 20) for _ in range(8)), {})
    theirs.close()
    ours.close()


def call_back(**changes: Any) -> bytes:
    return frame({"m": "call", "h": 1, "n": None, "v": {"t": "u", "v": [[], {"t": "d", "v": []}]}} | changes)


def test_endless_call_backs_end_with_the_time_of_the_call(hostile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = types.SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    for module in (peer_module, wire):
        monkeypatch.setattr(module, "time", clock)

    def ask_after_a_second(header: dict[str, Any]) -> bytes:
        clock.now += 1.0
        return call_back()

    model, other = Model(), hostile(ask_after_a_second, seconds=10.5)
    with pytest.raises(TimeoutError):
        other.call(model)
    assert model.calls == 10


REFUSED_CALLS = {
    "an object nobody gave": {"h": 99},
    "an object by a list": {"h": [1]},
    "no arguments": {"v": None},
    "arguments of another form": {"v": [1, 2, 3]},
    "keywords that are no text": {"v": {"t": "u", "v": [[], {"t": "d", "v": [[1, 2]]}]}},
    "a private method": {"n": "_secret"},
    "its class": {"n": "__class__"},
    "its globals": {"n": "__init__"},
    "a name that is no text": {"n": ["calls"]},
    "drops that are no list": {"drop": 5},
    "drops of what is not there": {"drop": [[1]]},
    "a value that is not one": {"v": {"t": "nonsense"}},
}


@pytest.mark.parametrize("changes", REFUSED_CALLS.values(), ids=REFUSED_CALLS)
def test_a_call_back_that_is_wrong_gets_an_error_without_a_line_of_the_examiner(changes: Any, hostile: Any) -> None:
    replies = iter([call_back(**changes), ok("done")])
    other, model = hostile(lambda header: next(replies)), Model()
    assert other.call(model) == "done"
    assert model.calls == 0
    answer = other.heard[1]
    assert answer["m"] == "err"
    described = dict(answer["v"]["v"])
    assert described["trace"] == ""
    assert "test_hostile_peer" not in json.dumps(answer)
    assert "peer.py" not in json.dumps(answer)
    assert "stand_ins.py" not in json.dumps(answer)


def test_messages_inside_each_other_share_one_allowance_of_memory(hostile: Any) -> None:
    def big(n: int) -> bytes:
        args = {"t": "u", "v": [[{"t": "b", "c": 0}, HANDLE], {"t": "d", "v": []}]}
        return frame({"m": "call", "h": 1, "n": None, "v": args}, bytes(n))

    other = hostile(lambda header: big(60 << 20))

    def model(data: bytes, again: Any) -> Any:
        return again()

    with pytest.raises(Malformed, match="256 MiB"):
        other.call(model)


@pytest.mark.parametrize("args", [[HANDLE], [["x"] * 3], [{"t": "f", "v": "nan"}], ["a", "b", "c", "d", "e", "f"]])
@pytest.mark.parametrize(
    "kind", ["UnicodeDecodeError", "SyntaxError", "OSError", "KeyError", "ExceptionGroup", "Warning"]
)
def test_an_exception_made_of_anything_is_an_exception_that_can_be_told(kind: str, args: Any, hostile: Any) -> None:
    from grader.examination.verdict import explain
    from grader.labs.lab import Cell

    fields = [["type", kind], ["args", args], ["name", "x" * 1000], ["trace", "t" * 100_000]]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        hostile(frame({"m": "err", "v": {"t": "d", "v": fields}})).call()
    assert not isinstance(caught.value, Malformed)
    status, message = explain(caught.value, Cell("c", "check", ""))
    assert status == "failed"
    assert len(message) < 20_000


def handle_that_answers(hostile: Any, value: bytes, **names: Any) -> Any:
    replies = iter([ok(HANDLE | names)])
    return hostile(lambda header: next(replies, value)).call()


DUNDERS = {"dunders": ["__len__", "__getitem__", "__iter__", "__next__", "__contains__", "__enter__", "__exit__"]}
USES: dict[str, Callable[[Any], Any]] = {
    "==": lambda h: h == 3,
    "== the other way": lambda h: torch.tensor(3) == h,
    "in a list": lambda h: h in [1, 2],
    "is one of": lambda h: [1].count(h) or {h},
    "bool": lambda h: not h,
    "<": lambda h: sorted([h, h]),
    "+": lambda h: h + 1,
    "-": lambda h: torch.zeros(3) - h,
    "abs": lambda h: abs(h),
    "float": lambda h: float(h),
    "format": lambda h: f"{h:.2f}",
    "torch.equal": lambda h: torch.equal(h, torch.zeros(3)),
    "torch.allclose": lambda h: torch.allclose(h, torch.zeros(3)),
    "h.equal": lambda h: h.equal(torch.zeros(3)),
    "h.allclose": lambda h: h.allclose(torch.zeros(3)),
    "h.all": lambda h: h.eq(1).all(),
    "torch.isfinite": lambda h: torch.isfinite(h),
    "torch.stack": lambda h: torch.stack([h]),
    "math": lambda h: math.isclose(h, 1.0),
    "range": lambda h: range(h),
    "copy": lambda h: __import__("copy").deepcopy(h),
    "pickle": lambda h: __import__("pickle").dumps(h),
    "len": lambda h: len(h),
    "iter": lambda h: list(h),
    "json": lambda h: json.dumps(h),
    "round": lambda h: round(h),
    "zip": lambda h: list(zip(h, [1], strict=True)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_handle_in_the_place_of_a_value_is_an_error_and_no_answer(use: Any, hostile: Any) -> None:
    handle = handle_that_answers(hostile, ok(True), methods=["equal", "allclose", "eq", "all"])
    with pytest.raises((TypeError, AttributeError)):
        use(handle)


@pytest.mark.parametrize("value", [ok("2"), ok(HANDLE), ok(-1), ok(2**70), ok(None), ok([1])])
def test_a_length_that_is_none_is_an_error(value: bytes, hostile: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        len(handle_that_answers(hostile, value, **DUNDERS))


def test_a_handle_is_no_instance_and_shows_as_what_it_is(hostile: Any) -> None:
    handle = handle_that_answers(hostile, ok(True), cls="y" * 10_000)
    assert not isinstance(handle, (torch.Tensor, int, bool, str, list, dict))
    assert type(handle) is handle.__class__ is Handle
    assert len(repr(handle)) < 200
    assert f"{handle}" == repr(handle)
    assert not hasattr(handle, "__torch_function__")
    assert not hasattr(handle, "__array__")


def test_containing_something_takes_a_true_and_no_less(hostile: Any) -> None:
    assert 3 in handle_that_answers(hostile, ok(True), **DUNDERS)
    for value in (ok(1), ok("yes"), ok(HANDLE), ok([0])):
        assert 3 not in handle_that_answers(hostile, value, **DUNDERS)


def test_a_with_block_of_the_learner_swallows_no_failed_assertion_and_no_end(hostile: Any) -> None:
    for error in (AssertionError("wrong"), KeyboardInterrupt(), SystemExit(), GeneratorExit()):
        with pytest.raises(type(error)), handle_that_answers(hostile, ok(True), **DUNDERS):
            raise error
    for value in (ok(1), ok("yes")):
        with pytest.raises(ValueError, match="seen"), handle_that_answers(hostile, value, **DUNDERS):
            raise ValueError("seen")


def test_only_the_elements_of_a_view_are_sent_and_only_they_can_be_changed(hostile: Any) -> None:
    labels = torch.arange(1.0, 25.0).reshape(4, 6)
    other = hostile(lambda header: frame({"m": "ok", "v": None, "w": [[0, 0]]}, b"A" * other.chunks[0].numel()))
    other.call(labels[1:3, 1:3])
    sent = other.chunks
    floats = sent[0][: sent[0].numel() // 4 * 4].view(torch.float32)
    assert set(floats.tolist()) == {0.0, 8.0, 9.0, 14.0, 15.0}
    unchanged = torch.ones(4, 6, dtype=torch.bool)
    unchanged[1:3, 1:3] = False
    assert torch.equal(labels[unchanged], torch.arange(1.0, 25.0).reshape(4, 6)[unchanged])
    assert not (labels[~unchanged] == torch.tensor([8.0, 9.0, 14.0, 15.0])).any()


words = st.sampled_from(["T", "h", "u", "ok"])
keys = st.sampled_from([*"mvtwhcn", "drop", "id", "back"])
headers = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@given(headers, st.lists(st.binary(max_size=40), max_size=3))
def test_any_header_is_a_value_an_exception_or_the_end(header: Any, chunks: list[bytes]) -> None:
    class Ended(BaseException):
        pass

    ours, theirs = socket.socketpair()
    peer = Peer(Connection(ours), strict=True, call_seconds=30, gone=lambda error: Ended(str(error)))
    theirs.sendall(frame({"m": "ok"} | header if isinstance(header, dict) else {"m": "ok", "v": header}, *chunks))
    theirs.shutdown(socket.SHUT_WR)
    try:
        peer.call(1, None, (torch.zeros(3), Model()), {})
    except (Ended, ValueError, TypeError, AttributeError, RuntimeError):
        pass
    finally:
        theirs.close()
        ours.close()


@given(st.binary(max_size=200))
def test_any_bytes_are_the_end(raw: bytes) -> None:
    ours, theirs = socket.socketpair()
    peer = Peer(Connection(ours), strict=True, call_seconds=30)
    theirs.sendall(raw)
    theirs.shutdown(socket.SHUT_WR)
    try:
        with pytest.raises((Malformed, OSError)):
            peer.call(1, None, (), {})
    finally:
        theirs.close()
        ours.close()
