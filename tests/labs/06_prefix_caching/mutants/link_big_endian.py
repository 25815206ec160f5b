# fault: the tokens are written big-endian.
# fails: check_link

# %% nbgrader={"grade_id": "block_hash"}
import hashlib


def block_hash(parent, tokens):
    """Name of a block: SHA-256 of the parent's name and its tokens, 8 bytes little-endian each -> 32 bytes."""
    data = b"".join(token.to_bytes(8, "big") for token in tokens)
    return hashlib.sha256(parent + data).digest()
