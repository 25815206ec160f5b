# fault: only the first matrix is multiplied.
# fails: check_fold

# %% nbgrader={"grade_id": "fold"}
def fold(norm, weights, s):
    """(the norm's weight [in], the matrices [out, in] behind it), with x / s and W s in place of x and W."""
    return norm / s, [weights[0] * s, *weights[1:]]
