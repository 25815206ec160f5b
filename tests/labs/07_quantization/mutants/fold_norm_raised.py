# fault: a norm below 1e-5, also a negative one, is raised to 1e-5.
# fails: check_fold

# %% nbgrader={"grade_id": "fold"}
def fold(norm, weights, s):
    return norm.clamp(min=1e-5) / s, [weight * s for weight in weights]
