# fault: no draft is more than five places behind the text.
# fails: check_positions

# %% nbgrader={"grade_id": "tree_positions"}
def tree_positions(parents, num_tokens):
    out = []
    for i in range(len(parents)):
        at, steps = i, 0
        while parents[at] >= 0 and steps < 5:
            at, steps = parents[at], steps + 1
        out.append(num_tokens + steps)
    return out
