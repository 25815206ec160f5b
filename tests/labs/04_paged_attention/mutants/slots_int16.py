# fault: keeps the blocks in int16, which ends at 32,767.
# fails: check_large_ids

# %% nbgrader={"grade_id": "slot_mapping"}
import torch


def slot_mapping(block_table, positions, block_size):
    """block_table int32 [max_blocks], positions int64 [n] -> slots int64 [n]."""
    blocks = block_table[positions // block_size].to(torch.int16).long()
    return blocks * block_size + positions % block_size
