# fault: all that continue a draft are one deep.
# fails: check_positions

# %% nbgrader={"grade_id": "tree_positions"}
def tree_positions(parents, num_tokens):
    """The position of each guess after a text of num_tokens tokens."""
    positions = []
    for parent in parents:
        positions.append(num_tokens if parent < 0 else num_tokens + 1)
    return positions
