# Works in place, on copies: tensors with trailing underscores, lists that are popped and reversed.

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    backwards = tokens[::-1]
    for n in reversed(range(shortest, longest + 1)):
        rest = backwards[1:]
        while len(rest) >= n:
            if rest[:n] == backwards[:n]:
                after = backwards[: len(backwards) - len(rest)]
                after.reverse()
                del after[k:]
                return after
            rest.pop(0)
    return []


# %% nbgrader={"grade_id": "residual"}
def residual(p, q):
    rest = p.clone().sub_(q)
    rest[rest < 0] = 0
    if torch.count_nonzero(rest) == 0:
        rest.copy_(p)
    return rest.div_(rest.sum())


# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    quotients = p[: len(drafts)].clone()
    quotients.div_(q)
    mine, kept = list(drafts), 0
    while mine:
        if uniform() >= quotients[kept, mine.pop(0)]:
            return kept, draw(residual(p[kept], q[kept]), uniform())
        kept += 1
    return kept, draw(p[-1], uniform())


# %% nbgrader={"grade_id": "expected_tokens"}
def expected_tokens(a, k):
    powers = np.full(k + 1, a, dtype=np.float64)
    powers[0] = 1
    np.multiply.accumulate(powers, out=powers)
    return powers.sum()


# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):
    seconds = np.array(step_seconds)
    seconds += guess_seconds * np.arange(len(seconds))
    speeds = np.array([expected_tokens(a, k) for k in range(len(seconds))])
    speeds /= seconds
    return int(np.flatnonzero(speeds == speeds.max())[0])


# %% nbgrader={"grade_id": "train_drafter"}
def train_drafter(texts, vocab_size, smoothing):
    table = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    for text in texts:
        text = list(text)
        while len(text) > 1:
            b = text.pop()
            table[text[-1]][b].add_(1)
    table.add_(smoothing)
    return table.div_(table.sum(dim=1).unsqueeze_(1))


# %% nbgrader={"grade_id": "tree_mask"}
def tree_mask(parents):
    mask = np.identity(len(parents), dtype=bool)
    for j in range(len(parents)):  # column by column: who sees guess j
        for i in range(j + 1, len(parents)):
            if parents[i] >= j:
                mask[i, j] = mask[parents[i], j]
    return mask


# %% nbgrader={"grade_id": "tree_positions"}
def tree_positions(parents, num_tokens):
    positions = torch.full((len(parents),), num_tokens)
    at = list(parents)
    while max(at) >= 0:
        for i in range(len(at)):
            if at[i] >= 0:
                positions[i] += 1
                at[i] = parents[at[i]]
    return positions


# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    right = [says[1 + parent] == token for parent, token in zip(parents, tokens, strict=True)]
    for i, parent in enumerate(parents):  # right, and all before it as well
        if parent >= 0:
            right[i] = right[i] and right[parent]
    path = [i for i in range(len(parents)) if right[i]]
    return path, says[path[-1] + 1 if path else 0]


# %% nbgrader={"grade_id": "roll_back"}
def roll_back(table, num_tokens, block_size, holders):
    stays, free = list(table), []
    while len(stays) * block_size - num_tokens >= block_size:
        left = stays.pop()
        mine = dict(holders)
        mine[left] -= 1
        if not mine[left]:
            free.insert(0, left)
    return stays, free


# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    scores = u.clone().log_().neg_().log_().neg_()
    scores.add_(p.log())
    return scores.sort(descending=True).indices[0]


# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    out = list(prompt)
    left = num_tokens
    while left > 0:
        left -= 1
        drafts = list(propose(out.copy(), min(left, k)))
        kept, token = judge(out.copy(), drafts.copy())
        del drafts[kept:]
        left -= len(drafts)
        drafts.append(token)
        out.extend(drafts)
    del out[: len(prompt)]
    return out
