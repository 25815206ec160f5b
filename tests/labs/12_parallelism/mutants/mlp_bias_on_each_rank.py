# fault: every rank adds the last bias to its partial sum.
# fails: check_mlp

# %% nbgrader={"grade_id": "mlp"}
def mlp(group, x, up, up_bias, down, down_bias):
    return group.all_reduce(column_parallel(x, up, up_bias).relu() @ down.T + down_bias)
