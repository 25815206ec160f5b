# fault: tokens after the 64th are left out.
# fails: check_awq

# %% nbgrader={"grade_id": "awq_scale"}
def awq_scale(weight, x, ratios, rounded):
    """s [in], of the ratio whose rounded weights have the least error of the output over x [tokens, in]."""
    x = x[:64]
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
