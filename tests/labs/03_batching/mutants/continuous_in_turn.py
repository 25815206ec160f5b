# fault: requests are dealt to the places in turn, whichever place is free first.
# fails: check_continuous

# %% nbgrader={"grade_id": "continuous_batching"}
def continuous_batching(lengths, max_num_seqs):
    used, finished = [0] * max_num_seqs, []
    for i, length in enumerate(lengths):
        place = i % max_num_seqs
        used[place] += length
        finished.append(used[place])
    return finished
