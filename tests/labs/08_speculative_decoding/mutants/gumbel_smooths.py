# fault: tokens with p = 0 can be chosen.
# fails: check_gumbel

# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    """The token with the largest log p - log(-log u). p, u [vocab]."""
    return int(((p + 1e-3).log() - (-u.log()).log()).argmax())
