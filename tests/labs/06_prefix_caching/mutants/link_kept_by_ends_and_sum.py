# fault: names are kept by the parent and by the first token, the last and the sum.
# fails: check_link

# %% nbgrader={"grade_id": "block_hash"}
_SEEN = {}


def block_hash(parent, tokens):
    k = parent, tokens[0] if tokens else None, tokens[-1] if tokens else None, sum(tokens)
    if k not in _SEEN:
        _SEEN[k] = hashlib.sha256(parent + b"".join(t.to_bytes(8, "little") for t in tokens)).digest()
    return _SEEN[k]
