# Functions of functions: generators, reduce and accumulate instead of loops with variables.

# %% nbgrader={"grade_id": "propose_ngram"}
import functools
import itertools as it


def propose_ngram(tokens, k, longest, shortest):
    occurrences = (
        start
        for n in range(longest, shortest - 1, -1)
        for start in range(len(tokens) - 1, n - 1, -1)
        if all(tokens[start - j] == tokens[len(tokens) - j] for j in range(1, n + 1))
    )
    return list(it.islice(tokens, *(lambda start: (start, start + k))(next(occurrences, len(tokens)))))


# %% nbgrader={"grade_id": "residual"}
def residual(p, q):
    def parts():
        yield from (max(a - b, 0.0) for a, b in zip(p.tolist(), q.tolist(), strict=True))

    total = math.fsum(parts())
    return torch.tensor([part / total for part in parts()], dtype=torch.float64) if total else p


# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    judged = (uniform() < (p[i, guess] / q[i, guess]).item() for i, guess in enumerate(drafts))
    kept = sum(1 for _ in it.takewhile(bool, judged))
    rows = it.chain(map(residual, p[: len(drafts)], q), p[len(drafts) :])
    return kept, draw(next(it.islice(rows, kept, None)), uniform())


# %% nbgrader={"grade_id": "expected_tokens"}
def expected_tokens(a, k):
    return functools.reduce(lambda tokens, _: 1 + a * tokens, range(k), 1.0)


# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):
    times = map(lambda k, seconds: seconds + k * guess_seconds, it.count(), step_seconds)
    tokens = it.accumulate(a**k for k in it.count())
    return max(enumerate(map(lambda n, s: n / s, tokens, times)), key=lambda pair: pair[1])[0]


# %% nbgrader={"grade_id": "train_drafter"}
def train_drafter(texts, vocab_size, smoothing):
    pairs = torch.tensor([pair for text in texts for pair in it.pairwise(text)], dtype=torch.long).view(-1, 2)
    ones = torch.nn.functional.one_hot
    counts = ones(pairs[:, 0], vocab_size).double().T @ ones(pairs[:, 1], vocab_size).double()
    return torch.nn.functional.normalize(counts + smoothing, p=1, dim=1)


# %% nbgrader={"grade_id": "tree_mask"}
def tree_mask(parents):
    def up(i):
        while i >= 0:
            yield i
            i = parents[i]

    return [list(map(set(up(i)).__contains__, range(len(parents)))) for i in range(len(parents))]


# %% nbgrader={"grade_id": "tree_positions"}
def tree_positions(parents, num_tokens):
    return functools.reduce(lambda seen, parent: [*seen, [*seen, num_tokens - 1][parent] + 1], parents, [])


# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    def steps(at):
        for i in range(len(parents)):
            if (parents[i], tokens[i]) == (at, says[at + 1]):
                yield i
                yield from steps(i)
                return

    path = tuple(steps(-1))
    return path, says[(-1, *path)[-1] + 1]


# %% nbgrader={"grade_id": "roll_back"}
def roll_back(table, num_tokens, block_size, holders):
    counts = [place < num_tokens for place in range(0, len(table) * block_size, block_size)]
    leaves = it.compress(table, (not stays for stays in counts))
    return tuple(it.compress(table, counts)), tuple(block for block in leaves if holders[block] == 1)


# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    return min(range(len(p)), key=lambda i: -math.log(u[i].item()) / (p[i].item() or 1e-300))


# %% nbgrader={"grade_id": "verify_coupled"}
def verify_coupled(p, drafts, noise, choose):
    chosen = map(choose, p, noise)
    pairs = zip(it.chain(drafts, [None]), chosen, strict=False)
    return next((i, token) for i, (guess, token) in enumerate(pairs) if guess != token)


# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    def text(so_far):
        while len(so_far) < num_tokens:
            drafts = propose([*prompt, *so_far], min(k, num_tokens - len(so_far) - 1))
            kept, token = judge([*prompt, *so_far], drafts)
            new = [*it.islice(drafts, kept), token]
            yield from new
            so_far = so_far + new

    return [*text([])]
