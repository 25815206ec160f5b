# fault: counts on from the first block, as if all lay side by side.
# fails: check_slot_mapping, check_large_ids, check_engine

# %% nbgrader={"grade_id": "slot_mapping"}
def slot_mapping(block_table, positions, block_size):
    """block_table int32 [max_blocks], positions int64 [n] -> slots int64 [n]."""
    return block_table[0].long() * block_size + positions
