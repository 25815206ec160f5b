# fault: scales take turns from column to column.
# fails: check_dequantize, check_engine_weights

# %% nbgrader={"grade_id": "dequantize"}
def dequantize(codes, scales, group_size):
    """The weights [out, in], float32, that codes [out, in] and scales [out, num_groups] stand for."""
    group = torch.arange(codes.shape[1]) % scales.shape[1]
    return codes.float() * scales[:, group]
