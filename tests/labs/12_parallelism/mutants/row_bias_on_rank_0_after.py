# fault: only rank 0 adds the bias, after the sum.
# fails: check_layers, check_mlp

# %% nbgrader={"grade_id": "row_parallel"}
def row_parallel(group, x, w, b):
    """x W^T + b, whole, from this rank's inputs and the others'."""
    return group.all_reduce(x @ w.T) + b * (group.rank == 0)
