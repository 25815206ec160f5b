# fault: multiplies in int32 and converts the product.
# trap: int32
# fails: check_large_ids

# %% nbgrader={"grade_id": "slot_mapping"}
def slot_mapping(block_table, positions, block_size):
    """block_table int32 [max_blocks], positions int64 [n] -> slots int64 [n]."""
    first = block_table[positions // block_size] * block_size
    return first.long() + positions % block_size
