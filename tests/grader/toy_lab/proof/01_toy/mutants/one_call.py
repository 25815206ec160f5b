# fault: the model is called once for all tokens.
# fails: check_calls

# %% nbgrader={"grade_id": "apply_all"}
def apply_all(model, tokens, window):
    for y in model(tokens):
        window.append(y[None])
    return window.mean()
