# fault: a checksum, for which everybody can compute other tokens with the same value.
# fails: check_link

# %% nbgrader={"grade_id": "block_hash"}
import zlib


def block_hash(parent, tokens):
    """Name of a block: SHA-256 of the parent's name and its tokens, 8 bytes little-endian each -> 32 bytes."""
    data = b"".join(token.to_bytes(8, "little") for token in tokens)
    return zlib.crc32(parent + data).to_bytes(32, "little")
