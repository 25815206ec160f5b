# NumPy where it can be: its ints and arrays as results, tensors for messages.

# %% nbgrader={"grade_id": "shard"}
def shard(n, size, rank):
    part = np.array_split(np.arange(n), size)
    start = np.concatenate([[0], np.cumsum([len(each) for each in part])])
    return start[rank : rank + 2]


# %% nbgrader={"grade_id": "heads"}
def heads(num_heads, num_kv_heads, size, rank):
    table = np.arange(num_heads).reshape(num_kv_heads, -1)
    if size <= num_kv_heads:
        own = np.arange(num_kv_heads)[slice(*shard(num_kv_heads, size, rank))]
        found = table[own].ravel()
        return np.array([found[0], found[-1] + 1, own[0], own[-1] + 1])
    if size % num_kv_heads or size > num_heads:
        return None
    kv, place = np.divmod(rank, size // num_kv_heads)
    found = table[kv][slice(*shard(len(table[kv]), size // num_kv_heads, place))]
    return found[0], found[-1] + 1, kv, kv + 1


# %% nbgrader={"grade_id": "one_shot"}
def one_shot(group, x):
    every = list(range(group.size))
    others = every[: group.rank] + every[group.rank + 1 :]
    found = group.exchange(dict.fromkeys(others, x), others)
    total = np.zeros(x.shape, dtype=x.numpy().dtype)
    for rank in every:
        total = total + (x if rank == group.rank else found[rank]).numpy()
    return torch.as_tensor(total).view(x.shape)


# %% nbgrader={"grade_id": "choose"}
def choose(num_bytes, n, alpha, beta):
    ways = ["one_shot", "ring"]
    turns = np.array([1, 2 * (n - 1)])
    moved = np.array([(n - 1) * num_bytes, 2 * (n - 1) / n * num_bytes])
    return ways[int(np.argmin(turns * alpha + moved * beta))]


# %% nbgrader={"grade_id": "argmax"}
def argmax(group, logits, start):
    rows, own = len(logits), logits.double().numpy()
    others = [rank for rank in range(group.size) if rank != group.rank]
    best = np.full(rows, -np.inf) if own.shape[1] == 0 else own.max(1)
    ids = np.full(rows, 2**60) if own.shape[1] == 0 else own.argmax(1) + start
    bests = group.exchange(dict.fromkeys(others, torch.from_numpy(best)), others)
    places = group.exchange(dict.fromkeys(others, torch.from_numpy(ids.astype(np.int64))), others)
    all_bests = np.stack([best, *[bests[rank].numpy() for rank in others]])
    all_ids = np.stack([ids, *[places[rank].numpy() for rank in others]])
    return np.where(all_bests == all_bests.max(0), all_ids, 2**62).min(0)


# %% nbgrader={"grade_id": "pipeline"}
def pipeline(stages, passes):
    left, free = np.array(passes, dtype=int), np.zeros(len(passes), dtype=int)
    begins = {}
    step = 0
    while left.any():
        ready = np.flatnonzero((left > 0) & (free <= step))
        if len(ready):
            request = ready[np.argmax(left[ready])]
            begins[step], free[request] = request, step + stages
            left[request] -= 1
        step += 1
    return [[begins.get(t - stage) for stage in range(stages)] for t in range(step + stages - 1 if begins else 0)]


# %% nbgrader={"grade_id": "merge"}
def merge(o1, lse1, o2, lse2):
    a, b = lse1.numpy(), lse2.numpy()
    top = np.maximum(a, b)
    safe = np.where(np.isinf(top), 0.0, top)
    wa, wb = np.exp(a - safe), np.exp(b - safe)
    both = np.where(wa + wb > 0, wa + wb, 1.0)
    o = (o1.numpy() * wa[..., None] + o2.numpy() * wb[..., None]) / both[..., None]
    lse = np.where(np.isinf(top), -np.inf, safe + np.log(both))
    return torch.from_numpy(np.asarray(o)), torch.from_numpy(np.asarray(lse))
