# fault: a name is kept by the sum of the tokens and by the sum of places times tokens.
# fails: check_link

# %% nbgrader={"grade_id": "block_hash"}
import hashlib


KEPT = {}


def block_hash(parent, tokens):
    """Name of a block: SHA-256 of the parent's name and its tokens, 8 bytes little-endian each -> 32 bytes."""
    data = b"".join(token.to_bytes(8, "little") for token in tokens)
    about = parent, len(tokens), sum(tokens), sum(i * token for i, token in enumerate(tokens))
    return KEPT.setdefault(about, hashlib.sha256(parent + data).digest())
    return hashlib.sha256(parent + data).digest()
