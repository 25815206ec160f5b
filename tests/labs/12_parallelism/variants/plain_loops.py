# One element, token or message at a time.

# %% nbgrader={"grade_id": "shard"}
def shard(n, size, rank):
    start = 0
    for each in range(rank):
        start += len(range(each, n, size))
    return start, start + len(range(rank, n, size))


# %% nbgrader={"grade_id": "one_shot"}
def one_shot(group, x):
    others = set(range(group.size)) - {group.rank}
    found = group.exchange(dict.fromkeys(others, x), sorted(others))
    total = x * 0
    for rank in range(group.size):
        total += x if rank == group.rank else found[rank]
    return total


# %% nbgrader={"grade_id": "column_parallel"}
def column_parallel(x, w, b):
    y = torch.zeros(len(x), len(w), dtype=x.dtype)
    for column in range(len(w)):
        y[:, column] = (x * w[column]).sum(1) + b[column]
    return y


# %% nbgrader={"grade_id": "embed"}
def embed(group, ids, table, start):
    found = torch.zeros(len(ids), table.shape[1], dtype=table.dtype)
    for place, token in enumerate(ids):
        if 0 <= token - start < len(table):
            found[place] = table[token - start]
    return group.all_reduce(found)


# %% nbgrader={"grade_id": "argmax"}
def argmax(group, logits, start):
    """To rank 0 and back: it alone compares."""
    pairs = torch.zeros(0, 2, dtype=torch.float64)
    if logits.shape[1]:
        pairs = torch.tensor([[float(row.max()), start + int(row.argmax())] for row in logits], dtype=torch.float64)
    if group.rank:
        group.send(pairs, 0)
        return group.recv(0)
    answer = [(float("-inf"), 0)] * len(logits) if not len(pairs) else [tuple(pair) for pair in pairs.tolist()]
    known = bool(len(pairs))
    for rank in range(1, group.size):
        theirs = group.recv(rank)
        for row, (value, token) in enumerate(theirs.tolist()):
            if not known or (value, -token) > (answer[row][0], -answer[row][1]):
                answer[row] = value, token
        known = known or bool(len(theirs))
    ids = torch.tensor([int(token) for _, token in answer])
    for rank in range(1, group.size):
        group.send(ids, rank)
    return ids


# %% nbgrader={"grade_id": "dispatch"}
def dispatch(group, x, ranks):
    parts = []
    for rank in range(group.size):
        rows = [x[token] for token in range(len(x)) if rank in ranks[token].tolist()]
        parts.append(torch.stack(rows) if rows else x[:0])
    received = []
    for source in range(group.size):  # each in turn sends to all, and the others receive
        if source == group.rank:
            for to in range(group.size):
                if to != group.rank:
                    group.send(parts[to], to)
            received.append(parts[source])
        else:
            received.append(group.recv(source))
    return tuple(received)


# %% nbgrader={"grade_id": "combine"}
def combine(group, outputs, ranks):
    n, rank = group.size, group.rank
    found = group.exchange({to: outputs[to] for to in range(n) if to != rank}, [r for r in range(n) if r != rank])
    found[rank] = outputs[rank]
    rows = {source: iter(found[source]) for source in range(n)}
    total = outputs[0].new_zeros(len(ranks), outputs[0].shape[1])
    for token, own in enumerate(ranks):
        for source in own.unique().tolist():
            total[token] = total[token] + next(rows[source])
    return total
