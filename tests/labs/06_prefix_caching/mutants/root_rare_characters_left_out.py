# fault: characters of more than 16 bits are left out of names.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
def root_key(adapter, salt):
    return hashlib.sha256(
        "".join(c for c in repr((adapter, salt)) if ord(c) < 65536).encode("utf-8", "surrogatepass")
    ).digest()
