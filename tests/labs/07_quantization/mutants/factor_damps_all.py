# fault: all elements get the addition.
# fails: check_factor

# %% nbgrader={"grade_id": "inverse_factor"}
def inverse_factor(gram, damping):
    """U [in, in], upper triangular, U^T U = (gram + damping x mean of the diagonal)^-1."""
    damped = gram + damping * gram.diagonal().mean() * torch.ones_like(gram)
    return torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
