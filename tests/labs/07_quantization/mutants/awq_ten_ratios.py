# fault: ratios after the tenth are left out.
# fails: check_awq

# %% nbgrader={"grade_id": "awq_scale"}
def awq_scale(weight, x, ratios, rounded):
    """s [in], of the ratio whose rounded weights have the least error of the output over x [tokens, in]."""
    size = x.abs().mean(0).clamp(min=1e-4)
    best, least = None, math.inf
    for ratio in list(ratios)[:10]:
        s = size**ratio
        s = s / (s.max() * s.min()).sqrt()
        difference = weight - rounded(weight * s) / s
        error = float((x @ difference.T).square().sum())
        if error < least:
            best, least = s, error
    return best
