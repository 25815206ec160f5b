# fault: zeros in the middle of the table are taken for padding and left out.
# fails: check_engine, check_slot_mapping

# %% nbgrader={"grade_id": "slot_mapping"}
def slot_mapping(block_table, positions, block_size):
    """block_table int32 [max_blocks], positions int64 [n] -> slots int64 [n]."""
    held = block_table[block_table != 0]
    blocks = held[positions // block_size].long()
    return blocks * block_size + positions % block_size
