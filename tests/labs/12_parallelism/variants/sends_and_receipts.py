# Keys and values by send and recv: even ranks send first, odd ones receive first. Loops and heaps elsewhere.

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(group, x):
    n, rank, count = group.size, group.rank, x.numel()
    bounds = [count * place // n for place in range(n + 1)]
    total = x.detach().clone().contiguous().view(-1)
    after, before = (rank + 1) % n, (rank + n - 1) % n
    for turn in range(2 * n - 2):
        out, into = (rank - turn) % n, (before - turn) % n
        got = group.exchange({after: total[bounds[out] : bounds[out + 1]]}, (before,))[before]
        if turn < n - 1:
            got = got + total[bounds[into] : bounds[into + 1]]
        total[bounds[into] : bounds[into + 1]] = got
    return total.view(x.shape)


# %% nbgrader={"grade_id": "row_parallel"}
def row_parallel(group, x, w, b):
    partial = torch.nn.functional.linear(x, w)
    return torch.add(group.all_reduce(partial), b)


# %% nbgrader={"grade_id": "column_parallel"}
def column_parallel(x, w, b):
    return torch.nn.functional.linear(x, w, b)


# %% nbgrader={"grade_id": "mlp"}
def mlp(group, x, up, up_bias, down, down_bias):
    hidden = torch.clamp(torch.nn.functional.linear(x, up, up_bias), min=0)
    partial = hidden @ down.T
    return group.all_reduce(partial if group.rank else partial + down_bias)  # on one rank, before the sum


# %% nbgrader={"grade_id": "embed"}
def embed(group, ids, table, start):
    rows = []
    for token in ids.tolist():
        mine = start <= token < start + len(table)
        rows.append(table[token - start] if mine else torch.zeros(table.shape[1], dtype=table.dtype))
    return group.all_reduce(torch.stack(rows))


# %% nbgrader={"grade_id": "pipeline"}
import collections


def pipeline(stages, passes):
    waiting, free_at = [(-count, i) for i, count in enumerate(passes)], collections.deque()
    steps, step = [], 0
    while waiting or free_at:
        while free_at and free_at[0][0] <= step:
            waiting.append(free_at.popleft()[1])
        if waiting:
            count, request = min(waiting)
            waiting.remove((count, request))
            while len(steps) < step + stages:
                steps.append([None] * stages)
            for stage in range(stages):
                steps[step + stage][stage] = request
            if count < -1:
                free_at.append((step + stages, (count + 1, request)))
        step += 1
    return steps


# %% nbgrader={"grade_id": "ring_attention"}
def ring_attention(group, q, k, v, positions):
    """The ring the other way round, keys and values as two messages."""
    n, rank = group.size, group.rank
    o, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for turn in range(n):
        sees = positions[rank][:, None] >= positions[(rank + turn) % n][None]
        o, lse = merge(*attend(q, k, v, sees), o, lse)
        if turn < n - 1:
            to, source = (rank - 1) % n, (rank + 1) % n
            if rank % 2 == 0:
                group.send(k, to)
                group.send(v, to)
                k, v = group.recv(source), group.recv(source)
            else:
                others = group.recv(source), group.recv(source)
                group.send(k, to)
                group.send(v, to)
                k, v = others
    return o.to(q.dtype)
