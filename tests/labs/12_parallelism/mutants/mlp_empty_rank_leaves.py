# fault: a rank without columns does not take part in the sum.
# fails: check_mlp

# %% nbgrader={"grade_id": "mlp"}
def mlp(group, x, up, up_bias, down, down_bias):
    """relu(x up^T + up_bias) down^T + down_bias with one all_reduce."""
    if not len(up):
        return down_bias.expand(len(x), -1)
    return row_parallel(group, column_parallel(x, up, up_bias).relu(), down, down_bias)
