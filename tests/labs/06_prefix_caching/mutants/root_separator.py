# fault: a separator between the parts, which may occur in them.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
import hashlib


def root_key(adapter, salt):
    """32 bytes that differ whenever adapter or salt differ. Each is a str or None."""
    there = "".join("no" if part is None else "yes" for part in (adapter, salt))
    text = "|".join(part or "" for part in (adapter, salt))
    return hashlib.sha256(f"{there}:{text}".encode()).digest()
