# attack: call-backs without end, each answered at once, and handles that are never given up
# expect: check_calls = timed out

# %% last
def apply_all(model, tokens, window):
    kept = []
    while True:
        model(tokens)
        kept.append(model.calls)
