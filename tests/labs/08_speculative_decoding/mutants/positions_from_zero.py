# fault: positions begin at 0.
# fails: check_positions

# %% nbgrader={"grade_id": "tree_positions"}
def tree_positions(parents, num_tokens):
    """The position of each guess after a text of num_tokens tokens."""
    positions = []
    for parent in parents:
        positions.append(0 if parent < 0 else positions[parent] + 1)
    return positions
