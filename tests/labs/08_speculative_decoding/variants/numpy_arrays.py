# NumPy throughout: arrays, NumPy's ints and floats as results.

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    text = np.array(tokens, dtype=np.int64)
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text, n)[:-1]
        (found,) = (windows == text[-n:]).all(1).nonzero()
        if len(found):
            return text[found[-1] + n :][:k]
    return text[:0]


# %% nbgrader={"grade_id": "residual"}
def residual(p, q):
    rest = np.maximum(np.array(p) - np.array(q), 0)
    return rest / rest.sum() if rest.any() else np.array(p)


# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    kept = np.int64(0)
    while kept < len(drafts):
        x = drafts[kept]
        if not uniform() < float(p[kept, x]) / float(q[kept, x]):
            rest = np.cumsum(residual(p[kept], q[kept]))
            return [kept, np.searchsorted(rest, uniform() * rest[-1], side="right")]
        kept += 1
    sums = np.cumsum(np.array(p[kept]))
    return [kept, np.searchsorted(sums, uniform() * sums[-1], side="right")]


# %% nbgrader={"grade_id": "expected_tokens"}
def expected_tokens(a, k):
    return np.power(float(a), np.arange(k + 1)).sum()


# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):
    k = np.arange(len(step_seconds))
    tokens = np.cumsum(np.power(float(a), k))
    return np.argmax(tokens / (np.array(step_seconds) + k * guess_seconds))


# %% nbgrader={"grade_id": "train_drafter"}
def train_drafter(texts, vocab_size, smoothing):
    counts = np.full((vocab_size, vocab_size), float(smoothing))
    for text in texts:
        np.add.at(counts, (np.array(text[:-1], dtype=int), np.array(text[1:], dtype=int)), 1)
    return counts / counts.sum(axis=1)[:, None]


# %% nbgrader={"grade_id": "tree_mask"}
def tree_mask(parents):
    n = len(parents)
    step = np.zeros((n, n), dtype=int)
    for i, parent in enumerate(parents):
        if parent >= 0:
            step[i, parent] = 1
    seen = np.eye(n, dtype=int)
    for _ in range(n):
        seen = np.minimum(1, np.eye(n, dtype=int) + step @ seen)
    return seen.astype(bool)


# %% nbgrader={"grade_id": "tree_positions"}
def tree_positions(parents, num_tokens):
    return tree_mask(parents).sum(axis=1) - 1 + num_tokens


# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    at, path = -1, []
    while True:
        (below,) = ((np.array(parents) == at) & (np.array(tokens) == says[1 + at])).nonzero()
        if not len(below):
            return np.array(path, dtype=np.int64), np.int64(says[1 + at])
        at = int(below[0])
        path.append(at)


# %% nbgrader={"grade_id": "roll_back"}
def roll_back(table, num_tokens, block_size, holders):
    table = np.array(table, dtype=np.int64)
    counts = np.arange(len(table)) * block_size < num_tokens
    alone = np.array([holders[int(block)] == 1 for block in table], dtype=bool)
    return table[counts], table[~counts & alone]


# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    with np.errstate(divide="ignore"):
        return np.argmax(np.log(np.array(p)) - np.log(-np.log(np.array(u))))


# %% nbgrader={"grade_id": "verify_coupled"}
def verify_coupled(p, drafts, noise, choose):
    kept = 0
    while True:
        token = choose(p[kept], noise[kept])
        if kept == len(drafts) or token != drafts[kept]:
            return np.int64(kept), np.int64(token)
        kept += 1


# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    out = np.zeros(0, dtype=np.int64)
    while len(out) < num_tokens:
        text = [*prompt, *out.tolist()]
        n = min(k, num_tokens - len(out) - 1)
        drafts = list(propose(text, n)) if n else []
        kept, token = judge(text, drafts)
        out = np.concatenate([out, drafts[:kept], [token]]).astype(np.int64)
    return out
