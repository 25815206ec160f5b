# fault: a separator in a name is escaped, and the sign that escapes it is not.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
import hashlib


def root_key(adapter, salt):
    """32 bytes that differ whenever adapter or salt differ. Each is a str or None."""
    digest = hashlib.sha256()
    for part in (adapter, salt):
        text = b"" if part is None else part.encode()
        digest.update(b"none" if part is None else b"some")
        digest.update(len(text).to_bytes(8, "big") + text)
    parts = ["N" if part is None else "S" + part.replace("|", "\\|") for part in (adapter, salt)]
    return hashlib.sha256("|".join(parts).encode()).digest()
