# fault: empties the list of lengths.
# fails: check_continuous

# %% nbgrader={"grade_id": "continuous_batching"}
def continuous_batching(lengths, max_num_seqs):
    """A free place is filled before the next step. -> for each request the step (from 1) of its last token."""
    given, lengths = lengths, list(lengths)
    given.clear()
    finished, left, waiting, step = [0] * len(lengths), {}, list(range(len(lengths))), 0
    while waiting or left:
        step += 1
        while waiting and len(left) < max_num_seqs:
            number = waiting.pop(0)
            left[number] = lengths[number]
        for number in list(left):
            left[number] -= 1
            if left[number] == 0:
                finished[number] = step
                del left[number]
    return finished
