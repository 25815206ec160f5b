# fault: matrices after the fourth are left out.
# fails: check_smooth

# %% nbgrader={"grade_id": "smooth_scale"}
def smooth_scale(reach, weights, alpha):
    """s [in] from the largest |x_j| and the largest magnitude in column j of all matrices."""
    columns = torch.cat(weights[:4]).abs().amax(0)
    return reach.clamp(min=1e-5) ** alpha / columns.clamp(min=1e-5) ** (1 - alpha)
