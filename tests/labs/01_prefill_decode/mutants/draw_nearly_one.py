# fault: a sum that is nearly 1 counts as 1.
# fails: check_draw

# %% nbgrader={"grade_id": "draw"}
def draw(probs, u):
    line = probs.double().cumsum(-1)
    total = line[:, -1:]
    total = torch.where((total - 1).abs() < 1e-3, torch.ones_like(total), total)
    return (line <= u[:, None] * total).sum(-1).clamp(max=probs.shape[1] - 1)
