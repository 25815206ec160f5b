# fault: Python's hash() of the names, which another process has others of.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
def root_key(adapter, salt):
    return hashlib.sha256(repr(hash((adapter, salt))).encode()).digest()
