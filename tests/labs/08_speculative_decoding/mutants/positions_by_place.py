# fault: the place in the list, not the depth.
# trap: place
# fails: check_positions

# %% nbgrader={"grade_id": "tree_positions"}
def tree_positions(parents, num_tokens):
    """The position of each guess after a text of num_tokens tokens."""
    positions = []
    for _ in parents:
        positions.append(num_tokens + len(positions))
    return positions
