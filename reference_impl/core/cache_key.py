"""Whose prefixes a request may share."""

from __future__ import annotations

from reference_impl.interfaces import Request


def cache_key(request: Request) -> bytes:
    return prefix_key(request.adapter, request.cache_salt)


def prefix_key(adapter: str | None, cache_salt: str | None) -> bytes:
    """Bytes that differ whenever adapter or salt differ: another adapter's keys and values differ, and
    another tenant's cache must not show, not even in how fast an answer comes.

    Every part is tagged and prefixed with its length, so that ("ab", "c") is not ("a", "bc") and None is not "".
    """
    parts = []
    for tag, value in ((b"adapter", adapter), (b"salt", cache_salt)):
        if value is not None:
            text = value.encode("utf-8", "surrogatepass")
            parts.append(tag + len(text).to_bytes(8, "little") + text)
    return b"".join(parts)
