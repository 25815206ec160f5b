# fault: Python's hash of the bytes: another number in every process, and 8 bytes of it.
# trap: hash
# fails: check_link

# %% nbgrader={"grade_id": "block_hash"}
def block_hash(parent, tokens):
    """Name of a block: SHA-256 of the parent's name and its tokens, 8 bytes little-endian each -> 32 bytes."""
    data = b"".join(token.to_bytes(8, "little") for token in tokens)
    return hash(parent + data).to_bytes(32, "little", signed=True)
