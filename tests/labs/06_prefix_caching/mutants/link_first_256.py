# fault: of a block 256 tokens are hashed.
# fails: check_link

# %% nbgrader={"grade_id": "block_hash"}
import hashlib


def block_hash(parent, tokens):
    """Name of a block: SHA-256 of the parent's name and its tokens, 8 bytes little-endian each -> 32 bytes."""
    data = b"".join(token.to_bytes(8, "little") for token in tokens[:256])
    return hashlib.sha256(parent + data).digest()
