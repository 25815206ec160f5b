# fault: an s below 1e-5 counts as 1e-5 on both sides.
# fails: check_fold

# %% nbgrader={"grade_id": "fold"}
def fold(norm, weights, s):
    s = s.clamp(min=1e-5)
    return norm / s, [weight * s for weight in weights]
