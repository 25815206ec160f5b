# fault: of a character two bytes are hashed.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
import hashlib


def root_key(adapter, salt):
    """32 bytes that differ whenever adapter or salt differ. Each is a str or None."""
    digest = hashlib.sha256()
    for part in (adapter, salt):
        text = b"" if part is None else b"".join((ord(sign) % 65536).to_bytes(2, "big") for sign in part)
        digest.update(b"none" if part is None else b"some")
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.digest()
