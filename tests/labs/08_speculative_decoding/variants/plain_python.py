# Lists and recursion, no tensors of its own; tuples as results.

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    if longest < shortest:
        return ()
    best = None
    for end in range(longest, len(tokens)):
        if tuple(tokens[end - longest : end]) == tuple(tokens[-longest:]):
            best = end
    if best is None:
        return propose_ngram(tokens, k, longest - 1, shortest)
    return tuple(tokens[best:][:k])


# %% nbgrader={"grade_id": "residual"}
def residual(p, q):
    p, q = p.tolist(), q.tolist()
    rest = [a - b if a > b else 0.0 for a, b in zip(p, q, strict=True)]
    total = sum(rest)
    return [value / total for value in rest] if total else p


# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    def judge(i):
        if i == len(drafts):
            return i, draw(p[i], uniform())
        chance = min(1.0, float(p[i][drafts[i]]) / float(q[i][drafts[i]]))
        if uniform() < chance:
            return judge(i + 1)
        return i, draw(residual(p[i], q[i]), uniform())

    return judge(0)


# %% nbgrader={"grade_id": "expected_tokens"}
def expected_tokens(a, k):
    return k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a)


# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):
    best, most, tokens = 0, 0.0, 0.0
    for k, seconds in enumerate(step_seconds):
        tokens += a**k
        if tokens / (seconds + k * guess_seconds) > most:
            best, most = k, tokens / (seconds + k * guess_seconds)
    return best


# %% nbgrader={"grade_id": "train_drafter"}
def train_drafter(texts, vocab_size, smoothing):
    rows = [[smoothing] * vocab_size for _ in range(vocab_size)]
    for text in texts:
        for i in range(1, len(text)):
            rows[text[i - 1]][text[i]] += 1
    return [tuple(weight / sum(row) for weight in row) for row in rows]


# %% nbgrader={"grade_id": "tree_mask"}
def tree_mask(parents):
    def path(i):
        return [] if i < 0 else [*path(parents[i]), i]

    return [[j in path(i) for j in range(len(parents))] for i in range(len(parents))]


# %% nbgrader={"grade_id": "tree_positions"}
def tree_positions(parents, num_tokens):
    return tuple(num_tokens - 1 + sum(row) for row in tree_mask(parents))


# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    def below(at):
        for i, parent in enumerate(parents):
            if parent == at and tokens[i] == says[1 + at]:
                rest, token = below(i)
                return (i, *rest), token
        return (), says[1 + at]

    return below(-1)


# %% nbgrader={"grade_id": "roll_back"}
def roll_back(table, num_tokens, block_size, holders):
    kept, freed = list(table), []
    while kept and (len(kept) - 1) * block_size >= num_tokens:
        block = kept.pop()
        if holders[block] < 2:
            freed.append(block)
    return tuple(kept), tuple(freed)


# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    weights = [-math.log(v) / x if x > 0 else math.inf for x, v in zip(p.tolist(), u.tolist(), strict=True)]
    return weights.index(min(weights))


# %% nbgrader={"grade_id": "verify_coupled"}
def verify_coupled(p, drafts, noise, choose):
    token = choose(p[0], noise[0])
    if not drafts or token != drafts[0]:
        return 0, token
    kept, token = verify_coupled(p[1:], drafts[1:], noise[1:], choose)
    return kept + 1, token


# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    if num_tokens == 0:
        return ()
    drafts = tuple(propose(list(prompt), min(k, num_tokens - 1)))
    kept, token = judge(list(prompt), list(drafts))
    new = (*drafts[:kept], token)
    return (*new, *speculate([*prompt, *new], num_tokens - len(new), k, propose, judge))
