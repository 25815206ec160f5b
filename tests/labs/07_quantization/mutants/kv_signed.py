# fault: the largest number, not the largest magnitude.
# fails: check_kv, check_engine_kv

# %% nbgrader={"grade_id": "quantize_kv"}
def quantize_kv(k, v, bits):
    """(k_codes, k_scales, v_codes, v_scales), a scale for each token and head of k and v."""
    reach, found = 2 ** (bits - 1) - 1, []
    for one in (k.float(), v.float()):
        scale = one.amax(2) / reach
        scale = torch.where(scale == 0, 1.0, scale)
        found += [(one / scale[:, :, None]).round().clamp(-reach, reach).to(torch.int8), scale]
    k_codes, k_scales, v_codes, v_scales = found
    return k_codes, k_scales, v_codes, v_scales
