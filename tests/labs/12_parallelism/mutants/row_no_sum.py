# fault: a partial sum is given out.
# fails: check_layers, check_mlp

# %% nbgrader={"grade_id": "row_parallel"}
def row_parallel(group, x, w, b):
    """x W^T + b, whole, from this rank's inputs and the others'."""
    return (x @ w.T) + b
