# fault: it computes in the memory of u, which belongs to the caller; the token is right.
# fails: check_gumbel

# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    """The token with the largest log p - log(-log u). p, u [vocab]."""
    return int((p.log() - u.log_().neg_().log_()).argmax())
