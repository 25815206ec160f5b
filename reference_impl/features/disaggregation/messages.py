"""The control messages of a transfer, and their bytes.

    sender -> receiver   Offer  Pushed  Stopped  Abort
    receiver -> sender   Reserved  Refused  Acknowledged  Done  Abort

Each names its transfer and the attempt that it belongs to. What they mean stands in `protocol.py`. The bytes, all
integers little-endian: version and kind (a byte each), attempt (8 bytes), the transfer's name and then a body by kind.
`decode` takes nothing but what `encode` can make: what comes from a peer is checked here once, and is within bounds
from then on. Whether a message is the peer's own, and whole, is for the control channel to say (its HMAC).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

KEY_BYTES = 32
MAX_PAGES = 1 << 16  # of a transfer: a million tokens
MAX_NAME_BYTES = 200  # of a transfer's name in UTF-8
MAX_REASON_BYTES = 1000
MAX_MESSAGE_BYTES = 64 + MAX_NAME_BYTES + MAX_PAGES * KEY_BYTES  # an Offer is the longest
MAX_ATTEMPT = (1 << 63) - 1
MAX_SLOT = (1 << 32) - 1
MAX_DIGEST = (1 << 64) - 1
_VERSION = 1


@dataclass(frozen=True)
class Offer:
    """The sender has these pages, or will have them, in the order of the prompt. It also says that nothing is being
    written for the transfer's earlier attempts any more."""

    transfer: str
    attempt: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class Reserved:
    """Credit: each of these pages may be written into its slot. More may follow; none at all says: wait."""

    transfer: str
    attempt: int
    pages: tuple[tuple[int, int], ...]  # (index, slot)


@dataclass(frozen=True)
class Refused:
    """The attempt is not begun, and no other one would be."""

    transfer: str
    attempt: int
    reason: str


@dataclass(frozen=True)
class Pushed:
    """These pages are in their slots: each write has ended, and will not be repeated. Without pages it says only that
    the sender is there."""

    transfer: str
    attempt: int
    pages: tuple[tuple[int, int], ...]  # (index, xxh3_64 of the content at its source)


@dataclass(frozen=True)
class Acknowledged:
    """Every byte of these pages was checked. Without pages it says only that the receiver is there."""

    transfer: str
    attempt: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Done:
    """Every page of the transfer was checked, in this or an earlier attempt."""

    transfer: str
    attempt: int


@dataclass(frozen=True)
class Abort:
    """Receiver: stop the attempt, and say when nothing is being written any more; if it is not final, another one may
    be offered. Sender (always final): no further page will be pushed, but some are still being written."""

    transfer: str
    attempt: int
    reason: str
    is_final: bool


@dataclass(frozen=True)
class Stopped:
    """Nothing is being written for this attempt or an earlier one, nor will be; the sender has ended the transfer."""

    transfer: str
    attempt: int
    reason: str


Message = Offer | Reserved | Refused | Pushed | Acknowledged | Done | Abort | Stopped

_KINDS: tuple[type[Message], ...] = (Offer, Reserved, Refused, Pushed, Acknowledged, Done, Abort, Stopped)
_HEAD = struct.Struct("<BBQB")  # version, kind, attempt, bytes of the name
_COUNT = struct.Struct("<I")
_SLOT = struct.Struct("<II")  # index, slot
_DIGEST = struct.Struct("<IQ")  # index, digest
_INDEX = struct.Struct("<I")
_REASON = struct.Struct("<BH")  # is it final, bytes of the reason


def encode(message: Message) -> bytes:
    """The message's bytes, at most MAX_MESSAGE_BYTES. A longer reason is cut; ValueError for all else out of bounds."""
    _check(message)
    name = message.transfer.encode()
    return _HEAD.pack(_VERSION, _KINDS.index(type(message)), message.attempt, len(name)) + name + _body(message)


def _body(message: Message) -> bytes:
    match message:
        case Offer(keys=keys):
            return _COUNT.pack(len(keys)) + b"".join(keys)
        case Reserved(pages=pages):
            return _COUNT.pack(len(pages)) + b"".join(_SLOT.pack(*page) for page in pages)
        case Pushed(pages=pages):
            return _COUNT.pack(len(pages)) + b"".join(_DIGEST.pack(*page) for page in pages)
        case Acknowledged(indices=indices):
            return _COUNT.pack(len(indices)) + b"".join(_INDEX.pack(index) for index in indices)
        case Done():
            return b""
        case Refused(reason=reason) | Abort(reason=reason) | Stopped(reason=reason):
            text = reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore").encode()
            return _REASON.pack(isinstance(message, Abort) and message.is_final, len(text)) + text


def decode(content: bytes | memoryview) -> Message:
    """The message of these bytes. ValueError, which says what is wrong, for anything that `encode` does not make."""
    if len(content) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a control message has at most {MAX_MESSAGE_BYTES} bytes, this one {len(content)}")
    content = bytes(content)
    if len(content) < _HEAD.size:
        raise ValueError(f"a control message has at least {_HEAD.size} bytes, this one {len(content)}")
    version, kind, attempt, name_bytes = _HEAD.unpack_from(content)
    if version != _VERSION:
        raise ValueError(f"control messages of version {_VERSION} are understood, not of {version}: update one side")
    if kind >= len(_KINDS):
        raise ValueError(f"there are {len(_KINDS)} kinds of control messages, this one has number {kind}")
    start = _HEAD.size + name_bytes
    if len(content) < start:
        raise ValueError(f"the transfer's name should have {name_bytes} bytes; the control message ends before")
    name = content[_HEAD.size : start].decode()  # a UnicodeDecodeError is a ValueError
    try:
        message = _of_body(_KINDS[kind], name, attempt, content[start:])
    except struct.error as error:
        raise ValueError(f"the body of a control message ({_KINDS[kind].__name__}) is too short: {error}") from None
    _check(message)
    return message


def _of_body(kind: type[Message], name: str, attempt: int, body: bytes) -> Message:
    if kind is Done:
        _check_length(kind, body, 0)
        return Done(name, attempt)
    if kind in (Refused, Abort, Stopped):
        flag, size = _REASON.unpack_from(body)
        _check_length(kind, body, _REASON.size + size)
        if flag > (kind is Abort) or size > MAX_REASON_BYTES:
            raise ValueError(f"{kind.__name__}: flag {flag}, {size} bytes of reason (at most {MAX_REASON_BYTES})")
        reason = body[_REASON.size :].decode()
        if kind is Abort:
            return Abort(name, attempt, reason, bool(flag))
        return Refused(name, attempt, reason) if kind is Refused else Stopped(name, attempt, reason)
    (count,) = _COUNT.unpack_from(body)
    item = {Offer: KEY_BYTES, Reserved: _SLOT.size, Pushed: _DIGEST.size, Acknowledged: _INDEX.size}[kind]
    _check_length(kind, body, _COUNT.size + count * item)
    items = body[_COUNT.size :]
    if kind is Offer:
        return Offer(name, attempt, tuple(items[at : at + item] for at in range(0, len(items), item)))
    if kind is Acknowledged:
        return Acknowledged(name, attempt, tuple(index for (index,) in _INDEX.iter_unpack(items)))
    if kind is Reserved:
        return Reserved(name, attempt, tuple(_SLOT.iter_unpack(items)))
    return Pushed(name, attempt, tuple(_DIGEST.iter_unpack(items)))


def _check_length(kind: type[Message], body: bytes, expected: int) -> None:
    if len(body) != expected:
        raise ValueError(f"the body of {kind.__name__} should have {expected} bytes, and has {len(body)}")


def _check(message: Message) -> None:
    """ValueError if a field is out of bounds."""
    if not 0 < len(message.transfer.encode()) <= MAX_NAME_BYTES:
        raise ValueError(f"the name of a transfer has 1 to {MAX_NAME_BYTES} bytes, not {message.transfer[:300]!r}")
    if not 0 < message.attempt <= MAX_ATTEMPT:
        raise ValueError(f"attempts are numbered 1 to {MAX_ATTEMPT}, not {message.attempt}")
    match message:
        case Offer(keys=keys):
            check_keys(keys)
        case Reserved(pages=pages):
            _check_indices([index for index, _ in pages])
            _check_range("a slot", (slot for _, slot in pages), MAX_SLOT)
            if len({slot for _, slot in pages}) != len(pages):
                raise ValueError(f"Reserved gives one slot to two pages: {pages[:20]}")
        case Pushed(pages=pages):
            _check_indices([index for index, _ in pages])
            _check_range("a digest", (digest for _, digest in pages), MAX_DIGEST)
        case Acknowledged(indices=indices):
            _check_indices(indices)


def check_keys(keys: tuple[bytes, ...]) -> None:
    """ValueError if these cannot be the keys of a transfer's pages."""
    if not 0 < len(keys) <= MAX_PAGES:
        raise ValueError(f"a transfer has 1 to {MAX_PAGES} pages, not {len(keys)}")
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"the key of a page has {KEY_BYTES} bytes, not {sorted({len(key) for key in keys})}")


def _check_indices(indices: tuple[int, ...] | list[int]) -> None:
    _check_range("an index", indices, MAX_PAGES - 1)
    if len(set(indices)) != len(indices):
        raise ValueError(f"a control message names a page twice: indices {list(indices)[:20]}")


def _check_range(what: str, numbers: Iterable[int], largest: int) -> None:
    for number in numbers:
        if not 0 <= number <= largest:
            raise ValueError(f"{what} is 0 to {largest}, not {number}")
