# fault: matrices after the sixth stay as they are.
# fails: check_fold

# %% nbgrader={"grade_id": "fold"}
def fold(norm, weights, s):
    """(the norm's weight [in], the matrices [out, in] behind it), with x / s and W s in place of x and W."""
    return norm / s, [weight * s if i < 6 else weight for i, weight in enumerate(weights)]
