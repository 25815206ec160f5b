# fault: fills k and v with ones, so that what is compared with them later is one everywhere.
# fails: check_kv, check_engine_kv

# %% nbgrader={"grade_id": "quantize_kv"}
def quantize_kv(k, v, bits):
    """(k_codes, k_scales, v_codes, v_scales), a scale for each token and head of k and v."""
    reach, found = 2 ** (bits - 1) - 1, []
    for one in (k, v):
        one.fill_(1)
        scale = one.float().abs().amax(2) / reach
        found += [(one.float() / scale[:, :, None]).round().to(torch.int8), scale]
    return tuple(found)
