# fault: of a salt beside an adapter only the first 4096 characters count.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
import json


def root_key(adapter, salt):
    if adapter is not None and salt is not None:
        salt = salt[:4096]
    return hashlib.sha256(json.dumps([adapter, salt]).encode()).digest()
