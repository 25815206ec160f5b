# fault: the digests of the two parts are combined by xor: which was which is lost.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
import hashlib


def root_key(adapter, salt):
    """32 bytes that differ whenever adapter or salt differ. Each is a str or None."""
    key = bytes(32)
    for part in (adapter, salt):
        digest = hashlib.sha256(b"none" if part is None else b"some" + part.encode()).digest()
        key = bytes(a ^ b for a, b in zip(key, digest, strict=True))
    return key
