# fault: u is kept away from 0 and 1.
# fails: check_gumbel

# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    return int((p.log() - (-u.clamp(1e-9, 1 - 1e-9).log()).log()).argmax())
