"""Authentication of a connection: both ends prove that they have the join key, and neither shows it.

    first  -> hello: magic, nonce, name          who connected
    second -> hello: magic, nonce, name          who listens
    first  -> proof: HMAC(key, purpose, "first", both hellos)
    second -> proof: HMAC(key, purpose, "second", both hellos)

The listener proves itself last, so a stranger gets nothing of it that was made with the key. Every frame after that
has an HMAC-SHA256 under a key that was made of the join key, both nonces and the direction, over a counter and the
content: a frame that was changed, repeated, dropped, reordered or taken from another connection is noticed. Nothing is
encrypted: who can read the network reads everything, so it must be a private one. No sockets here: see `control.py` and
`transports/tcp.py`.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import struct
from collections.abc import Generator
from typing import NamedTuple, TypeAlias

_MAGIC = b"inferlab-pd-1\0\0\0"  # another version of the protocol has another number
_NONCE = 32  # bytes
_TAG = 32  # bytes of an HMAC-SHA256
MAX_NAME = 200  # bytes
MAX_STEP = len(_MAGIC) + _NONCE + MAX_NAME  # bytes of a hello or a proof
LEAST_KEY = 16  # bytes: who meets a listener that lies can try out keys at home
LENGTH = struct.Struct("<I")  # before a hello or a proof
_HEADER = struct.Struct("<IQ")  # length of the content, counter
HEADER_BYTES = _HEADER.size + _TAG
MAX_CONTENT = 1 << 20  # bytes of a control message


class PeerError(ConnectionError):
    """The connection to a peer cannot be used any longer, and why. A connection that raised it is closed."""


class Sealer:
    """Makes the frames of one direction: header, HMAC, content."""

    def __init__(self, key: bytes):
        self._key, self._count = key, 0

    def seal(self, content: bytes) -> bytes:
        """ValueError if the content is longer than MAX_CONTENT."""
        if len(content) > MAX_CONTENT:
            raise ValueError(f"a control message has at most {MAX_CONTENT} bytes, this one has {len(content)}")
        header = _HEADER.pack(len(content), self._count)
        self._count += 1
        return b"".join((header, hmac.digest(self._key, header + content, "sha256"), content))


class Opener:
    """Checks the frames of one direction. Every error is a PeerError that names the peer."""

    def __init__(self, key: bytes, peer: str):
        self._key, self._peer, self._count = key, peer, 0

    def length(self, header: bytes) -> int:
        """How many bytes of content follow a header of HEADER_BYTES."""
        length: int = _HEADER.unpack_from(header)[0]
        if length > MAX_CONTENT:
            raise PeerError(f"{self._peer}: expected at most {MAX_CONTENT} bytes in a control message, got {length}")
        return length

    def open(self, header: bytes, content: bytes) -> bytes:
        """The content, if it is the next one that the peer sealed."""
        _, count = _HEADER.unpack_from(header)
        tag = hmac.digest(self._key, header[: _HEADER.size] + content, "sha256")
        if not hmac.compare_digest(tag, header[_HEADER.size :]):
            raise PeerError(
                f"{self._peer}: the HMAC of control message {self._count} is wrong: changed on its way, or "
                "of another connection"
            )
        if count != self._count:
            raise PeerError(
                f"{self._peer}: expected control message {self._count}, got {count}: one was lost, repeated or moved"
            )
        self._count += 1
        return content


class Session(NamedTuple):
    """What both ends know of a connection whose peer has the key. peer: the name that it gave."""

    peer: str
    address: str
    sealer: Sealer
    opener: Opener
    last: bytes  # to be sent before all else


# Yields what is to be sent, and is sent what comes next: each with its LENGTH in front, which the shell reads.
Handshake: TypeAlias = Generator[bytes, bytes, Session]


def as_first(key: bytes, purpose: str, name: str, address: str) -> Handshake:
    """The handshake of the end that connected. address: of the peer, for errors. purpose: what the connection is for;
    a proof for one purpose is worth nothing for another. PeerError where the peer has another key."""
    mine = _hello(key, name)
    theirs = yield _framed(mine)
    peer = _name_in(theirs, address)
    told = _transcript(purpose, mine, theirs)
    proof = yield _framed(_proof(key, "first", told))
    _check(proof, _proof(key, "second", told), f"{peer} at {address}")
    sealer = Sealer(_proof(key, "first sends", told))
    opener = Opener(_proof(key, "second sends", told), f"{peer} at {address}")
    return Session(peer, address, sealer, opener, b"")


def as_second(key: bytes, purpose: str, name: str, address: str) -> Handshake:
    """The handshake of the end that listens; see `as_first`."""
    mine = _hello(key, name)
    theirs = yield b""
    peer = _name_in(theirs, address)
    told = _transcript(purpose, theirs, mine)
    proof = yield _framed(mine)
    _check(proof, _proof(key, "first", told), f"{peer} at {address}")
    sealer = Sealer(_proof(key, "second sends", told))
    opener = Opener(_proof(key, "first sends", told), f"{peer} at {address}")
    return Session(peer, address, sealer, opener, _framed(_proof(key, "second", told)))


def step_length(prefix: bytes, address: str) -> int:
    """The bytes of a hello or a proof, from the LENGTH before it."""
    length: int = LENGTH.unpack(prefix)[0]
    if not 0 < length <= MAX_STEP:
        raise PeerError(f"{address}: expected a handshake of 1 to {MAX_STEP} bytes, got {length}: not a peer of ours?")
    return length


def check_address(host: str) -> str:
    """The host, if it is an IP address. ValueError for a name: none is looked up, which needs a network and may give
    an address that others do not reach."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"expected an IP address such as 127.0.0.1, got {host!r}: names are not looked up") from None
    return host


def _hello(key: bytes, name: str) -> bytes:
    if len(key) < LEAST_KEY:
        raise ValueError(f"a join key has at least {LEAST_KEY} bytes, this one has {len(key)}")
    if not name or not name.isprintable() or len(name.encode()) > MAX_NAME:
        raise ValueError(f"a peer's name has 1 to {MAX_NAME} bytes, all printable; got {name!r}")
    return _MAGIC + os.urandom(_NONCE) + name.encode()


def _name_in(hello: bytes, address: str) -> str:
    if not hello.startswith(_MAGIC) or not len(_MAGIC) + _NONCE < len(hello) <= MAX_STEP:
        raise PeerError(f"{address}: expected the hello of {_MAGIC.rstrip(bytes(1)).decode()}, got {hello[:16]!r}")
    try:
        name = hello[len(_MAGIC) + _NONCE :].decode()
    except UnicodeDecodeError:
        name = ""
    if not name.isprintable() or not name:
        raise PeerError(f"{address}: expected a printable name in the hello, got {hello[len(_MAGIC) + _NONCE :]!r}")
    return name


def _framed(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


def _transcript(purpose: str, *hellos: bytes) -> bytes:
    return b"".join(_framed(part) for part in (purpose.encode(), *hellos))


def _proof(key: bytes, role: str, told: bytes) -> bytes:
    return hmac.digest(key, _framed(role.encode()) + told, "sha256")


def _check(proof: bytes, expected: bytes, peer: str) -> None:
    if not hmac.compare_digest(proof, expected):
        raise PeerError(f"{peer}: expected a proof of this join key, got another: start both ends with the same key")
