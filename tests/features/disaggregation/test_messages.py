"""The bytes of control messages: what is sent comes back, and what cannot have been sent is refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl.features.disaggregation.messages import (
    MAX_ATTEMPT,
    MAX_DIGEST,
    MAX_MESSAGE_BYTES,
    MAX_PAGES,
    MAX_REASON_BYTES,
    MAX_SLOT,
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
    encode,
)
from tests.examples import examples

NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
ATTEMPT = st.integers(1, MAX_ATTEMPT)
REASON = st.text(st.characters(exclude_categories=["Cs"]), max_size=100)
INDEX = st.integers(0, MAX_PAGES - 1)


def pairs(last: st.SearchStrategy[int], unique_last: bool = False) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    by = (lambda pair: pair[0], lambda pair: pair[1]) if unique_last else lambda pair: pair[0]
    return st.lists(st.tuples(INDEX, last), unique_by=by, max_size=8).map(tuple)


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Offer, NAME, ATTEMPT, st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=8).map(tuple)),
    st.builds(Reserved, NAME, ATTEMPT, pairs(st.integers(0, MAX_SLOT), unique_last=True)),
    st.builds(Refused, NAME, ATTEMPT, REASON),
    st.builds(Pushed, NAME, ATTEMPT, pairs(st.integers(0, MAX_DIGEST))),
    st.builds(Acknowledged, NAME, ATTEMPT, st.lists(INDEX, unique=True, max_size=8).map(tuple)),
    st.builds(Done, NAME, ATTEMPT),
    st.builds(Abort, NAME, ATTEMPT, REASON, st.booleans()),
    st.builds(Stopped, NAME, ATTEMPT, REASON),
)


@settings(max_examples=examples(100))
@given(MESSAGES)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@settings(max_examples=examples(100))
@given(MESSAGES, st.data())
def test_bytes_that_were_changed_are_refused_or_are_another_message(message: Message, data: st.DataObject) -> None:
    content = bytearray(encode(message))
    match data.draw(st.sampled_from(["flip", "cut", "longer"])):
        case "flip":
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "longer":
            content += data.draw(st.binary(min_size=1, max_size=40))
    try:
        found = decode(bytes(content))
    except ValueError:
        return
    assert encode(found) == bytes(content)  # one message has one form
    assert found != message


@settings(max_examples=examples(100))
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_value_error(content: bytes) -> None:
    try:
        found = decode(content)
    except ValueError:
        return
    assert encode(found) == content


KEYS = (b"k" * 32,)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Done("", 1), "1 to 200 bytes"),
        (Done("x" * 201, 1), "1 to 200 bytes"),
        (Done("x", 0), "numbered 1 to"),
        (Done("x", MAX_ATTEMPT + 1), "numbered 1 to"),
        (Offer("x", 1, ()), "1 to 65536 pages, not 0"),
        (Offer("x", 1, KEYS * (MAX_PAGES + 1)), "pages, not 65537"),
        (Offer("x", 1, (b"k" * 31,)), r"32 bytes, not \[31\]"),
        (Reserved("x", 1, ((MAX_PAGES, 0),)), "an index is 0 to 65535, not 65536"),
        (Reserved("x", 1, ((0, -1),)), "a slot is 0 to"),
        (Reserved("x", 1, ((0, 1), (0, 2))), "names a page twice"),
        (Reserved("x", 1, ((0, 1), (1, 1))), "one slot to two pages"),
        (Pushed("x", 1, ((0, 1 << 64),)), "a digest is 0 to"),
        (Pushed("x", 1, ((0, 1), (0, 2))), "names a page twice"),
        (Acknowledged("x", 1, (3, 3)), "names a page twice"),
        (Acknowledged("x", 1, (-1,)), "an index is 0 to"),
    ],
)
def test_what_is_out_of_bounds_is_not_sent(message: Message, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        encode(message)


def head(kind: int, attempt: int = 1, version: int = 1, name: bytes = b"x") -> bytes:
    return struct.pack("<BBQB", version, kind, attempt, len(name)) + name


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "at least 11 bytes"),
        (head(5)[:10], "at least 11 bytes"),
        (head(5, version=2), "version 1 are understood, not of 2"),
        (head(8), "8 kinds"),
        (head(5, attempt=0), "numbered 1 to"),
        (head(5, name=b""), "1 to 200 bytes"),
        (head(5, name=b"\xff"), "utf-8"),
        (head(5)[:-1], "the control message ends before"),
        (head(5) + b"\0", "should have 0 bytes, and has 1"),
        (head(0), "too short"),
        (head(0) + struct.pack("<I", 1 << 31), "should have"),
        (head(1) + struct.pack("<I", 1) + struct.pack("<II", MAX_PAGES, 0), "an index is 0 to"),
        (head(3) + struct.pack("<I", 2) + struct.pack("<IQIQ", 1, 2, 1, 2), "names a page twice"),
        (head(4) + struct.pack("<I", 2) + b"\0" * 7, "should have 12 bytes, and has 11"),
        (head(6) + struct.pack("<BH", 2, 0), "flag 2"),
        (head(7) + struct.pack("<BH", 1, 0), "flag 1"),
        (head(7) + struct.pack("<BH", 0, 1001) + b"r" * 1001, "1001 bytes of reason"),
        (head(7) + struct.pack("<BH", 0, 2) + b"r", "should have 5 bytes, and has 4"),
        (b"\1" * (MAX_MESSAGE_BYTES + 1), "has at most"),
    ],
)
def test_what_cannot_have_been_sent_is_refused(content: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        decode(content)


def test_the_longest_messages_are_within_the_bound() -> None:
    whole = Offer("n" * 200, MAX_ATTEMPT, KEYS * MAX_PAGES)
    assert len(encode(whole)) <= MAX_MESSAGE_BYTES
    assert decode(encode(whole)) == whole
    assert len(encode(Pushed("n" * 200, 1, tuple((i, MAX_DIGEST) for i in range(MAX_PAGES))))) <= MAX_MESSAGE_BYTES


def test_a_long_reason_is_cut_between_two_letters() -> None:
    message = Stopped("x", 1, "ä" * 700)
    assert decode(encode(message)) == replace(message, reason="ä" * (MAX_REASON_BYTES // 2))
