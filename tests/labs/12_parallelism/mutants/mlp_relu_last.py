# fault: relu comes after the sum.
# fails: check_mlp

# %% nbgrader={"grade_id": "mlp"}
def mlp(group, x, up, up_bias, down, down_bias):
    """relu(x up^T + up_bias) down^T + down_bias with one all_reduce."""
    return row_parallel(group, column_parallel(x, up, up_bias), down, down_bias).relu()
