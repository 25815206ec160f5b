# fault: groups from the 22nd on have the scale of the 21st.
# fails: check_dequantize

# %% nbgrader={"grade_id": "dequantize"}
def dequantize(codes, scales, group_size):
    """The weights [out, in], float32, that codes [out, in] and scales [out, num_groups] stand for."""
    group = torch.arange(codes.shape[1]) // group_size
    group = group.clamp(max=20)
    return codes.float() * scales[:, group]
