# fault: computes the slots in the caller's positions.
# fails: check_slot_mapping, check_large_ids, check_engine

# %% nbgrader={"grade_id": "slot_mapping"}
def slot_mapping(block_table, positions, block_size):
    """block_table int32 [max_blocks], positions int64 [n] -> slots int64 [n]."""
    blocks = block_table[positions // block_size].long()
    return positions.remainder_(block_size).add_(blocks * block_size)
