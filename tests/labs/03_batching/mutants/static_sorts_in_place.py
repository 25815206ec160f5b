# fault: sorts the lengths that it is given.
# fails: check_static

# %% nbgrader={"grade_id": "static_batching"}
def static_batching(lengths, max_num_seqs):
    """Batches in the order given, each as long as its longest. -> (steps, useful share of the row-steps)."""
    given, lengths = lengths, list(lengths)
    given.sort()
    batches = [lengths[i : i + max_num_seqs] for i in range(0, len(lengths), max_num_seqs)]
    num_steps = sum(max(batch) for batch in batches)
    num_row_steps = sum(len(batch) * max(batch) for batch in batches)
    return num_steps, sum(lengths) / num_row_steps
