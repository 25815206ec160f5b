# fault: the hidden columns are summed over ranks as well.
# fails: check_mlp

# %% nbgrader={"grade_id": "mlp"}
def mlp(group, x, up, up_bias, down, down_bias):
    hidden = column_parallel(x, up, up_bias).relu()
    group.all_reduce(torch.zeros(1))
    return row_parallel(group, hidden, down, down_bias)
