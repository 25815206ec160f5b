# fault: a token with little p is never chosen.
# fails: check_gumbel

# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    return int((torch.where(p < 1e-4, 0, p).log() - (-u.log()).log()).argmax())
