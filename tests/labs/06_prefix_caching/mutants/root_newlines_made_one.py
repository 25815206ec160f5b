# fault: line ends of two kinds are one.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
import hashlib


def root_key(adapter, salt):
    """32 bytes that differ whenever adapter or salt differ. Each is a str or None."""
    digest = hashlib.sha256()
    for part in (adapter, salt):
        text = b"" if part is None else part.replace("\r\n", "\n").encode()
        digest.update(b"none" if part is None else b"some")
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.digest()
