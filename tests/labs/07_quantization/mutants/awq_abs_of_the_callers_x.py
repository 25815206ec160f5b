# fault: takes the magnitudes of x in place, and computes with a copy.
# fails: check_awq

# %% nbgrader={"grade_id": "awq_scale"}
import math


def awq_scale(weight, x, ratios, rounded):
    """s [in], of the ratio whose rounded weights have the least error of the output over x [tokens, in]."""
    given, x = x, x.clone()
    given.abs_()
    size = x.abs().mean(0).clamp(min=1e-4)
    best, least = None, math.inf
    for ratio in ratios:
        s = size**ratio
        s = s / (s.max() * s.min()).sqrt()
        difference = weight - rounded(weight * s) / s
        error = float((x @ difference.T).square().sum())
        if error < least:
            best, least = s, error
    return best
