# fault: magnitudes of 0 count as 1e-5, smaller ones than that as themselves.
# fails: check_smooth

# %% nbgrader={"grade_id": "smooth_scale"}
def smooth_scale(reach, weights, alpha):
    """s [in] from the largest |x_j| and the largest magnitude in column j of all matrices."""
    columns = torch.cat(weights).abs().amax(0)
    reach, columns = (torch.where(one == 0, 1e-5, one) for one in (reach, columns))
    return reach**alpha / columns ** (1 - alpha)
