# fault: a separator between the names and a mark before each, both of which a name may contain.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
def root_key(adapter, salt):
    parts = ["-" if x is None else "+" + x for x in (adapter, salt)]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
