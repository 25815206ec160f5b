# fault: in half precision.
# fails: check_gumbel

# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    """The token with the largest log p - log(-log u). p, u [vocab]."""
    return int((p.half().log() - (-u.half().log()).log()).argmax())
