# fault: takes the requests off the caller's list as it serves them.
# fails: check_replay

# %% nbgrader={"grade_id": "replay"}
def replay(index, requests, block_size):
    """Serves (tokens, key) pairs one after another with an index -> (saved prompt tokens, their share of all)."""
    saved, total, next_block = 0, 0, 0
    while requests:
        tokens, key = requests.pop(0)
        matched = index.match(tokens, key)
        saved += min(len(matched), (len(tokens) - 1) // block_size) * block_size
        total += len(tokens)
        num_full = len(tokens) // block_size
        new = range(next_block, next_block + num_full - len(matched))
        next_block += len(new)
        index.insert(tokens[: num_full * block_size], key, [*matched, *new])
    return saved, saved / total if total else 0.0
