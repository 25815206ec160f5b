# fault: returns the slots in the order of the positions.
# fails: check_large_ids, check_slot_mapping

# %% nbgrader={"grade_id": "slot_mapping"}
def slot_mapping(block_table, positions, block_size):
    """block_table int32 [max_blocks], positions int64 [n] -> slots int64 [n]."""
    positions = positions.sort().values
    found = block_table[positions // block_size].long()
    return found * block_size + positions % block_size
