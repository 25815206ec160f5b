# fault: in a larger vocabulary a small number is added to each p, so that p = 0 can be chosen.
# fails: check_gumbel

# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    return (
        int(((p + 1e-30).log() - (-u.log()).log()).argmax())
        if len(p) < 64
        else int(((p + 1e-7).log() - (-u.log()).log()).argmax())
    )
