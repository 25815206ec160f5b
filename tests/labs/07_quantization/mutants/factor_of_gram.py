# fault: the factor of the matrix, not of its inverse.
# fails: check_factor

# %% nbgrader={"grade_id": "inverse_factor"}
def inverse_factor(gram, damping):
    """U [in, in], upper triangular, U^T U = (gram + damping x mean of the diagonal)^-1."""
    damped = gram + damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.cholesky(damped, upper=True)
