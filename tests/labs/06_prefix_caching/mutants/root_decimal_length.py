# fault: the length is in decimal digits, and a name may begin with one.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
def root_key(adapter, salt):
    def enc(s):
        return "-" if s is None else f"{len(s)}{s}"

    return hashlib.sha256((enc(adapter) + "|" + enc(salt)).encode()).digest()
