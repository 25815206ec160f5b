"""Server-sent events come out the same however their bytes were split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.bench.load import sse
from reference_impl.bench.load.sse import EventStream


def events(*chunks: bytes) -> list[bytes]:
    stream = EventStream()
    return [data for chunk in chunks for data in stream.feed(chunk)]


TEXT = "data: ä€🦙\n\ndata: two\n\n".encode()


@pytest.mark.parametrize(
    ("stream", "wanted"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),  # one space belongs to the field
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data: a\r\ndata: b\r\n\r\n", [b"a\nb"]),  # where a CRLF is split, its LF is no empty line
        (b"data: a\ndata\ndata:\n\n", [b"a\n\n"]),
        (b": ping\n\n:\n\ndata: a\n: inside\n\n", [b"a"]),
        (b"event: x\nid: 7\nretry: 10\ndata: a\nother: y\n\n", [b"a"]),
        (b"event: x\n\n\n\n", []),
        (b"data: a\n\ndata: not ended\n", [b"a"]),
        (b"data: a: b\n\n", [b"a: b"]),
        (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),  # the mark only counts at the start
        (b"datax: a\n\n data: b\n\n", []),
        (b"data: a\x0bb\x85c\xe2\x80\xa8d\n\n", [b"a\x0bb\x85c\xe2\x80\xa8d"]),  # no other line ends
        (b"data\n\n", [b""]),
    ],
)
def test_a_stream_is_read_as_the_standard_says(stream: bytes, wanted: list[bytes]):
    assert events(stream) == wanted
    assert events(*(stream[i : i + 1] for i in range(len(stream)))) == wanted
    for cut in range(len(stream)):
        assert events(stream[:cut], stream[cut:]) == wanted


def test_a_character_may_be_split():
    for cut in range(len(TEXT)):
        assert [data.decode() for data in events(TEXT[:cut], TEXT[cut:])] == ["ä€🦙", "two"]


def test_an_event_comes_out_with_its_last_byte_and_not_later():
    stream = EventStream()
    assert list(stream.feed(b"data: a\r\n")) == []
    assert list(stream.feed(b"\r")) == [b"a"]
    assert list(stream.feed(b"\ndata: b\n\n")) == [b"b"]


PIECES = st.sampled_from(
    [b"data: x", b"data:", b"data: \xf0\x9f\xa6\x99", b":c", b"\n", b"\r", b"\r\n", b"\n\n", b"e: 1"]
)


@given(st.lists(PIECES, max_size=20), st.data())
def test_no_split_changes_what_comes_out(pieces: list[bytes], data: st.DataObject):
    stream = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert events(*chunks) == events(stream)


def test_an_event_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    stream = EventStream()
    for _ in range(20):
        assert list(stream.feed(b"data: " + 50 * b"a" + b"\n\n")) == [50 * b"a"]
    for _ in range(100):
        assert list(stream.feed(b"a")) == []
    with pytest.raises(ValueError, match="more than 100 bytes"):
        list(stream.feed(b"a"))
