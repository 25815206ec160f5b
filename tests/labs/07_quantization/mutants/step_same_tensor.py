# fault: where a column is whole already, the given tensor is returned.
# fails: check_gptq

# %% nbgrader={"grade_id": "gptq_step"}
def gptq_step(weight, factor, i, rounded):
    new, q = weight.clone(), rounded(weight[:, i].clone(), i)
    if torch.equal(q, weight[:, i]):
        return weight
    error = (weight[:, i] - q) / factor[i, i]
    new[:, i] = q
    new[:, i + 1 :] -= torch.outer(error, factor[i, i + 1 :])
    return new
