# fault: a long separator that looks as if no name could hold it.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
BETWEEN = "--- here ends the adapter and begins the salt ---"


def root_key(adapter, salt):
    parts = ["nothing" if x is None else "a name: " + x for x in (adapter, salt)]
    return hashlib.sha256(BETWEEN.join(parts).encode()).digest()
