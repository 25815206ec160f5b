# fault: the caller's list gets the new matrices.
# fails: check_fold

# %% nbgrader={"grade_id": "fold"}
def fold(norm, weights, s):
    for i, weight in enumerate(weights):
        weights[i] = weight * s
    return norm / s, weights
