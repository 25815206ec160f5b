# fault: an input that was always 0 gets 1 on the diagonal first.
# fails: check_factor

# %% nbgrader={"grade_id": "inverse_factor"}
def inverse_factor(gram, damping):
    gram = gram + torch.diag((gram.diagonal() == 0).to(gram.dtype))
    damped = gram + damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
