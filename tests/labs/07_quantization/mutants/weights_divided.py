# fault: codes are divided by the scale.
# fails: check_dequantize, check_engine_weights

# %% nbgrader={"grade_id": "dequantize"}
def dequantize(codes, scales, group_size):
    """The weights [out, in], float32, that codes [out, in] and scales [out, num_groups] stand for."""
    group = torch.arange(codes.shape[1]) // group_size
    return codes.float() / scales[:, group]
