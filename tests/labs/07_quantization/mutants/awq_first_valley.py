# fault: the search ends where the error first rises.
# fails: check_awq

# %% nbgrader={"grade_id": "awq_scale"}
def awq_scale(weight, x, ratios, rounded):
    mean, best, least = x.abs().mean(0).clamp(min=1e-4), None, math.inf
    for ratio in ratios:
        s = mean**ratio
        s = s / (s.max() * s.min()).sqrt()
        error = float((x @ (weight - rounded(weight * s) / s).T).square().sum())
        if error > least:
            break
        best, least = s, error
    return best
