# fault: scales the caller's keys in place.
# fails: check_kv

# %% nbgrader={"grade_id": "quantize_kv"}
import torch


def quantize_kv(k, v, bits):
    """(k_codes, k_scales, v_codes, v_scales), a scale for each token and head of k and v."""
    reach, found = 2 ** (bits - 1) - 1, []
    for one in (k.float(), v.float()):
        scale = one.abs().amax(2) / reach
        scale = torch.where(scale == 0, 1.0, scale)
        found += [(one / scale[:, :, None]).round().to(torch.int8), scale]
    k_codes, k_scales, v_codes, v_scales = found
    k.div_(k_scales[:, :, None].to(k.dtype))
    return k_codes, k_scales, v_codes, v_scales
