"""The seal behind a page's bytes, or behind some layers of it: xxh3_64 of key, first layer and bytes.

It finds what came damaged, or in place of another. It is no signature: who can write a page can write its seal.
"""

from __future__ import annotations

import xxhash

SEAL_BYTES = 8


def seal(buffer: memoryview, key: bytes, layer: int) -> None:
    """Writes the seal of all that is before it into a buffer's last bytes. layer: the first that is in it."""
    buffer[-SEAL_BYTES:] = _digest(buffer[:-SEAL_BYTES], key, layer)


def unsealed(buffer: memoryview, key: bytes, layer: int, num_bytes: int) -> memoryview:
    """The num_bytes before the seal. ValueError if there are more or fewer, or they are not those that were sealed for
    this key and layer."""
    if buffer.nbytes != num_bytes + SEAL_BYTES:
        raise ValueError(
            f"expected a page of {num_bytes} bytes from layer {layer} on, and a seal of {SEAL_BYTES}, got "
            f"{buffer.nbytes} bytes: it is cut off, or of another model or cache"
        )
    content = buffer[:-SEAL_BYTES]
    if _digest(content, key, layer) != buffer[-SEAL_BYTES:]:
        raise ValueError(
            f"a page of {num_bytes} bytes from layer {layer} on is damaged, or is another one: its seal is wrong"
        )
    return content


def _digest(content: memoryview, key: bytes, layer: int) -> bytes:
    named = xxhash.xxh3_64_intdigest(key + layer.to_bytes(4, "little"))
    return xxhash.xxh3_64_digest(content, seed=named)
