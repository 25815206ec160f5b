# fault: blocks are counted in half precision.
# fails: check_blocks

# %% nbgrader={"grade_id": "more_blocks"}
import numpy as np


def more_blocks(num_tokens, num_held, block_size):
    return max(0, int(np.ceil(np.float16(num_tokens) / np.float16(block_size))) - num_held)
