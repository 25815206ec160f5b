# fault: the bias is summed over ranks, too, and divided.
# fails: check_layers, check_mlp

# %% nbgrader={"grade_id": "row_parallel"}
def row_parallel(group, x, w, b):
    """x W^T + b, whole, from this rank's inputs and the others'."""
    return group.all_reduce(x @ w.T) + group.all_reduce(b.double()).to(b.dtype) / group.size
