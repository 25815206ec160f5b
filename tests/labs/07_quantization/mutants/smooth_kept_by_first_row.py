# fault: the largest magnitudes of an earlier call are used again where the first row is the same.
# fails: check_smooth

# %% nbgrader={"grade_id": "smooth_scale"}
_s = {}


def smooth_scale(reach, weights, alpha):
    columns = _s.setdefault(tuple(weights[0][0].tolist()), torch.cat(weights).abs().amax(0))
    return reach.clamp(min=1e-5) ** alpha / columns.clamp(min=1e-5) ** (1 - alpha)
