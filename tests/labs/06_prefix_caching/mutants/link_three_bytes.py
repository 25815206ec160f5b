# fault: token ids of 2^24 and more lose their highest byte.
# fails: check_link

# %% nbgrader={"grade_id": "block_hash"}
def block_hash(parent, tokens):
    """Name of a block: SHA-256 of the parent's name and its tokens, 8 bytes little-endian each -> 32 bytes."""
    data = b"".join((token % 2**24).to_bytes(8, "little") for token in tokens)
    return hashlib.sha256(parent + data).digest()
