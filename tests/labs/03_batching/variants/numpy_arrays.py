# Arrays and cumulative sums for everything that is a list; counts are numpy's integers.

# %% nbgrader={"grade_id": "static_batching"}
import numpy as np


def static_batching(lengths, max_num_seqs):
    """Batches in the order given, each as long as its longest. -> (steps, useful share of the row-steps)."""
    padded = np.zeros(-(-len(lengths) // max_num_seqs) * max_num_seqs, dtype=np.int64)
    padded[: len(lengths)] = lengths
    batches = padded.reshape(-1, max_num_seqs)
    steps, rows = batches.max(axis=1), (batches > 0).sum(axis=1)
    return steps.sum(), padded.sum() / (steps * rows).sum()


# %% nbgrader={"grade_id": "continuous_batching"}
def continuous_batching(lengths, max_num_seqs):
    """A free place is filled before the next step. -> for each request the step (from 1) of its last token."""
    used, finished = np.zeros(max_num_seqs, dtype=int), np.zeros(len(lengths), dtype=int)
    for number, length in enumerate(lengths):
        place = used.argmin()
        used[place] += length
        finished[number] = used[place]
    return finished.tolist()


# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Distributes `budget` new tokens. running: [(id, missing)] in order -> plan, every n at least 1."""
    missing = np.array([row[1] for row in running], dtype=int)
    order = np.argsort(missing > 1, kind="stable")
    ends = np.minimum(missing[order].cumsum(), budget)
    plan = {running[i][0]: n for i, n in zip(order, np.diff(ends, prepend=0), strict=True) if n}
    return plan


# %% nbgrader={"grade_id": "more_blocks"}
def more_blocks(num_tokens, num_held, block_size):
    """How many more blocks a request that holds num_held needs for num_tokens tokens in all."""
    return int(np.clip(np.ceil(num_tokens / block_size) - num_held, 0, None))


# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """The victims whose blocks request_id needs. running: [(id, num_held)] -> ids, last come first."""
    names = [name for name, _ in running][::-1]
    free = np.cumsum([free_blocks, *(held for _, held in running[::-1])])
    return names[: min(int((free < needed).sum()), names.index(request_id) + 1)]


# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""
    arrival = np.array([request["arrival"] for request in requests], dtype=np.float64)
    priority = np.array([request["priority"] for request in requests], dtype=np.float64)
    return [requests[i]["id"] for i in np.lexsort((arrival, priority - aging * (now - arrival)))]
