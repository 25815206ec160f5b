# fault: changes the positions that it is given.
# fails: check_engine, check_large_ids, check_slot_mapping

# %% nbgrader={"grade_id": "slot_mapping"}
def slot_mapping(block_table, positions, block_size):
    """block_table int32 [max_blocks], positions int64 [n] -> slots int64 [n]."""
    blocks = block_table[positions // block_size].long()
    return blocks * block_size + positions.remainder_(block_size)
