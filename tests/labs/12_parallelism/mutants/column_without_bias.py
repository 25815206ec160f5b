# fault: the bias of columns is left out.
# fails: check_layers, check_mlp

# %% nbgrader={"grade_id": "column_parallel"}
def column_parallel(x, w, b):
    """This rank's columns of x W^T + b."""
    return x @ w.T
