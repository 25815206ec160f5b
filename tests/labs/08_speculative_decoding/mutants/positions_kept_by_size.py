# fault: an answer is kept for trees of the same size.
# fails: check_positions

# %% nbgrader={"grade_id": "tree_positions"}
_c = {}


def tree_positions(parents, num_tokens):
    key = len(parents), num_tokens
    if key not in _c:
        positions = []
        for parent in parents:
            positions.append(num_tokens if parent < 0 else positions[parent] + 1)
        _c[key] = positions
    return _c[key]
