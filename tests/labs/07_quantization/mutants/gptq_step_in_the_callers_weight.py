# fault: changes the caller's weight in place.
# fails: check_gptq

# %% nbgrader={"grade_id": "gptq_step"}
import torch


def gptq_step(weight, factor, i, rounded):
    """weight [out, in] with column i rounded, and its error made up for by the columns behind it."""
    column = rounded(weight[:, i].clone(), i)
    error = (weight[:, i] - column) / factor[i, i]
    out = weight
    out[:, i] = column
    out[:, i + 1 :] -= torch.outer(error, factor[i, i + 1 :])
    return out
