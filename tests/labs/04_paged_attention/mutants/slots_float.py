# fault: computes the slots in float32, which has 24 bits for a whole number.
# fails: check_large_ids

# %% nbgrader={"grade_id": "slot_mapping"}
def slot_mapping(block_table, positions, block_size):
    """block_table int32 [max_blocks], positions int64 [n] -> slots int64 [n]."""
    blocks = block_table[positions // block_size].long()
    return (blocks.float() * block_size + positions % block_size).long()
