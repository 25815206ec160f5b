# fault: only the columns of the same 128 are changed.
# fails: check_gptq

# %% nbgrader={"grade_id": "gptq_step"}
def gptq_step(weight, factor, i, rounded):
    new, q = weight.clone(), rounded(weight[:, i].clone(), i)
    error = (weight[:, i] - q) / factor[i, i]
    new[:, i] = q
    new[:, i + 1 : i // 128 * 128 + 128] -= torch.outer(error, factor[i, i + 1 : i // 128 * 128 + 128])
    return new
