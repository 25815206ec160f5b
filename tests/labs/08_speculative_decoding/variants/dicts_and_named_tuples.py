# Dicts, deques and named tuples: an index of n-grams, children by token, depths by draft.

# %% nbgrader={"grade_id": "propose_ngram"}
from collections import Counter, defaultdict, deque, namedtuple


def propose_ngram(tokens, k, longest, shortest):
    after = {}  # where each n-gram ended last, the text's end itself left out
    window = deque(maxlen=longest)
    for end, token in enumerate(tokens):
        for n in range(shortest, len(window) + 1):
            after[tuple(window)[len(window) - n :]] = end
        window.append(token)
    lengths = range(min(longest, len(tokens)), shortest - 1, -1)
    places = [after[pattern] for n in lengths if (pattern := tuple(tokens[len(tokens) - n :])) in after]
    return list(tokens[places[0] : places[0] + k]) if places else []


# %% nbgrader={"grade_id": "residual"}
def residual(p, q):
    rest = {token: float(p[token] - q[token]) for token in range(len(p)) if p[token] > q[token]}
    total = math.fsum(rest.values())
    return tuple(rest.get(token, 0.0) / total for token in range(len(p))) if rest else tuple(p.tolist())


# %% nbgrader={"grade_id": "verify"}
Verdict = namedtuple("Verdict", "kept token")


def verify(p, q, drafts, uniform):
    waiting, kept = deque(drafts), 0
    while waiting:
        guess = waiting.popleft()
        chance = min(p[kept, guess].item() / q[kept, guess].item(), 1.0)
        if not uniform() < chance:
            return Verdict(kept, draw(residual(p[kept], q[kept]), uniform()))
        kept += 1
    return Verdict(token=draw(p[kept], uniform()), kept=kept)


# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):
    speeds = {k: expected_tokens(a, k) / (seconds + guess_seconds * k) for k, seconds in enumerate(step_seconds)}
    return sorted(speeds, key=lambda k: (-speeds[k], k))[0]


# %% nbgrader={"grade_id": "train_drafter"}
def train_drafter(texts, vocab_size, smoothing):
    counts = defaultdict(Counter)
    for text in texts:
        before = iter(text)
        for token in list(text)[1:]:
            counts[next(before)][token] += 1
    table = torch.empty(vocab_size, vocab_size)
    for a in range(vocab_size):
        table[a] = torch.tensor([counts[a][b] + smoothing for b in range(vocab_size)])
        table[a] /= sum(counts[a].values()) + smoothing * vocab_size
    return table


# %% nbgrader={"grade_id": "tree_mask"}
def tree_mask(parents):
    seen = {-1: frozenset()}
    for i, parent in enumerate(parents):
        seen[i] = seen[parent] | {i}
    return tuple(tuple(int(j in seen[i]) for j in range(len(parents))) for i in range(len(parents)))


# %% nbgrader={"grade_id": "tree_positions"}
def tree_positions(parents, num_tokens):
    children = defaultdict(list)
    for i, parent in enumerate(parents):
        children[parent].append(i)
    positions, level = {}, children[-1]
    while level:
        positions |= dict.fromkeys(level, num_tokens)
        num_tokens, level = num_tokens + 1, [child for i in level for child in children[i]]
    return [positions[i] for i in range(len(parents))]


# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    Step = namedtuple("Step", "path token")
    children = defaultdict(dict)
    for i, parent in enumerate(parents):
        children[parent][tokens[i]] = i
    step = Step([], says[0])
    at = -1
    while (at := children[at].get(step.token)) is not None:
        step = Step([*step.path, at], says[1 + at])
    return step


# %% nbgrader={"grade_id": "roll_back"}
def roll_back(table, num_tokens, block_size, holders):
    owner = [block for block in table for _ in range(block_size)]
    stays = dict.fromkeys(owner[:num_tokens])
    freed = {block for block in table if block not in stays and holders[block] <= 1}
    return list(stays), list(freed)


# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    numbers = dict(enumerate(zip(p.tolist(), u.tolist(), strict=True)))
    scores = {token: math.log(x) - math.log(-math.log(v)) for token, (x, v) in numbers.items() if x}
    return max(scores, key=scores.get)


# %% nbgrader={"grade_id": "verify_coupled"}
def verify_coupled(p, drafts, noise, choose):
    waiting = deque(zip(p, noise, [*drafts, None], strict=True))
    kept = 0
    while True:
        row, own_noise, guess = waiting.popleft()
        if (token := choose(row, own_noise)) != guess:
            return Verdict(kept, token)
        kept += 1


# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    text = deque(prompt)
    while (to_come := len(prompt) + num_tokens - len(text)) > 0:
        drafts = deque(propose(list(text), min(k, to_come - 1)))
        kept, token = judge(list(text), list(drafts))
        text.extend(drafts.popleft() for _ in range(kept))
        text.append(token)
    return list(text)[len(prompt) :]
