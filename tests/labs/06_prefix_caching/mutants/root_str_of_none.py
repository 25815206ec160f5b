# fault: None becomes the string None.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
import hashlib


def root_key(adapter, salt):
    """32 bytes that differ whenever adapter or salt differ. Each is a str or None."""
    digest = hashlib.sha256()
    for part in (adapter, salt):
        text = str(part).encode()
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.digest()
