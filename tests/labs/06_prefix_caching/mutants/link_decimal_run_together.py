# fault: the tokens are hashed as decimal numbers without anything between them.
# fails: check_link

# %% nbgrader={"grade_id": "block_hash"}
import hashlib


def block_hash(parent, tokens):
    """Name of a block: SHA-256 of the parent's name and its tokens, 8 bytes little-endian each -> 32 bytes."""
    data = "".join(str(token) for token in tokens).encode()
    return hashlib.sha256(parent + data).digest()
