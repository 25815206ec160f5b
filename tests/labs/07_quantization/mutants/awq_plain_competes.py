# fault: plain rounding is a candidate even if ratio 0 was not given.
# fails: check_awq

# %% nbgrader={"grade_id": "awq_scale"}
def awq_scale(weight, x, ratios, rounded):
    mean, best, least = x.abs().mean(0).clamp(min=1e-4), None, math.inf
    for ratio in (0.0, *ratios):
        s = mean**ratio
        s = s / (s.max() * s.min()).sqrt()
        error = float((x @ (weight - rounded(weight * s) / s).T).square().sum())
        if best is None or error < least:
            best, least = s, error
    return best
