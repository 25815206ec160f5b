# fault: a length has one byte: it begins again after 255.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
def root_key(adapter, salt):
    """32 bytes that differ whenever adapter or salt differ. Each is a str or None."""
    digest = hashlib.sha256()
    for part in (adapter, salt):
        text = b"" if part is None else part.encode()
        digest.update(b"none" if part is None else b"some")
        digest.update(bytes([len(text) % 256]) + text)
    return digest.digest()
