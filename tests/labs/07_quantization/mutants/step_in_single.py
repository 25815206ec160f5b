# fault: the error of a column is rounded to float32.
# fails: check_gptq

# %% nbgrader={"grade_id": "gptq_step"}
def gptq_step(weight, factor, i, rounded):
    """weight [out, in] with column i rounded, and its error made up for by the columns behind it."""
    column = rounded(weight[:, i].clone(), i)
    error = (weight[:, i] - column) / factor[i, i]
    out = weight.clone()
    out[:, i] = column
    out[:, i + 1 :] -= torch.outer(error.float().double(), factor[i, i + 1 :])
    return out
