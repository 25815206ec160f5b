# fault: noise on p, not on its logarithm.
# fails: check_gumbel

# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    """The token with the largest log p - log(-log u). p, u [vocab]."""
    return int((p - (-u.log()).log()).argmax())
