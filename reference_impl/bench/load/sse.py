"""Server-sent events, read as section 9.2 of WHATWG's HTML standard says: bytes in, the data of events out."""

from __future__ import annotations

from collections.abc import Iterator

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_EVENT_BYTES = 16 * 2**20  # far more than a chunk of an answer; without a bound a bad server could fill the memory


class EventStream:
    """Feed it what arrives. A chunk may end anywhere: in a character, in a CRLF, in a field's name.

    Lines end with LF, CRLF or CR. A line that starts with a colon is a comment, several data lines of an event are
    joined by LF, an empty line ends the event, and an event that no empty line ended is none. Only `data` is kept:
    OpenAI's streams give no meaning to the other fields. It stays bytes: bad UTF-8 is found where it is decoded.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._num_bytes = 0  # of the event so far
        self._first_line = True
        self._after_cr = False  # a LF that comes first now belongs to it

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of each event that this chunk completes. Raises ValueError where one has more than
        MAX_EVENT_BYTES."""
        if not chunk:
            return
        rest_of_crlf = self._after_cr and chunk.startswith(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        for part in chunk[rest_of_crlf:].splitlines(keepends=True):
            self._num_bytes += len(part)
            if self._num_bytes > MAX_EVENT_BYTES:
                raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
            self._line += part
            if part.endswith((b"\n", b"\r")):
                line = bytes(self._line).rstrip(b"\r\n")
                self._line.clear()
                yield from self._take(line)

    def _take(self, line: bytes) -> Iterator[bytes]:
        if self._first_line:
            line, self._first_line = line.removeprefix(BYTE_ORDER_MARK), False
        if not line:
            data, self._data, self._num_bytes = self._data, [], 0
            if data:
                yield b"\n".join(data)
            return
        name, _, value = line.partition(b":")  # of a comment the name is empty
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
