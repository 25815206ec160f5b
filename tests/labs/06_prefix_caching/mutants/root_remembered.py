# fault: keys are drawn at random and remembered: another process has others.
# fails: check_root

# %% nbgrader={"grade_id": "root_key"}
import os

drawn = {}


def root_key(adapter, salt):
    return drawn.setdefault((adapter, salt), os.urandom(32))
