# fault: which part is there is told, and then the parts follow without anything between them.
# trap: concatenation
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
import hashlib


def root_key(adapter, salt):
    """32 bytes that differ whenever adapter or salt differ. Each is a str or None."""
    there = "".join("no" if part is None else "yes" for part in (adapter, salt))
    text = "".join(part or "" for part in (adapter, salt))
    return hashlib.sha256(f"{there}:{text}".encode()).digest()
