# fault: 1e-8 more is added to the diagonal, too much for small inputs.
# fails: check_factor

# %% nbgrader={"grade_id": "inverse_factor"}
def inverse_factor(gram, damping):
    damped = gram + (damping * gram.diagonal().mean() + 1e-8) * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
