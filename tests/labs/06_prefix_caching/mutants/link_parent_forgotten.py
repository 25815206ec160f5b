# fault: the hash forgets the block before.
# fails: check_link, check_engine_hash

# %% nbgrader={"grade_id": "block_hash"}
import hashlib


def block_hash(parent, tokens):
    """Name of a block: SHA-256 of the parent's name and its tokens, 8 bytes little-endian each -> 32 bytes."""
    data = b"".join(token.to_bytes(8, "little") for token in tokens)
    return hashlib.sha256(data).digest()
