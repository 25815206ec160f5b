# fault: the reach is 127 for 8 bits and 7 for all others.
# fails: check_kv

# %% nbgrader={"grade_id": "quantize_kv"}
def quantize_kv(k, v, bits):
    """(k_codes, k_scales, v_codes, v_scales), a scale for each token and head of k and v."""
    reach, found = 127 if bits == 8 else 7, []
    for one in (k.float(), v.float()):
        scale = one.abs().amax(2) / reach
        scale = torch.where(scale == 0, 1.0, scale)
        found += [(one / scale[:, :, None]).round().to(torch.int8), scale]
    k_codes, k_scales, v_codes, v_scales = found
    return k_codes, k_scales, v_codes, v_scales
