# A text as a string, searched by str.rfind; probabilities as logarithms.

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    text = "".join(chr(token) for token in tokens)
    n = longest
    while n >= shortest:
        found = text.rfind(text[-n:], 0, len(text) - 1) if n < len(text) else -1
        if found >= 0:
            return [ord(letter) for letter in text[found + n : found + n + k]]
        n -= 1
    return []


# %% nbgrader={"grade_id": "residual"}
def residual(p, q):
    rest = torch.relu(p.sub(q))
    if bool((rest == 0).all()):
        return p.clone()
    return torch.softmax(rest.log(), 0)


# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    log_p, log_q = torch.log(p), torch.log(q)
    kept = 0
    while kept < len(drafts) and math.log(uniform()) < float(log_p[kept, drafts[kept]] - log_q[kept, drafts[kept]]):
        kept += 1
    weights = residual(p[kept], q[kept]) if kept < len(drafts) else torch.exp(log_p[kept])
    sums = weights.cumsum(0)
    return kept, int(torch.searchsorted(sums, uniform() * sums[-1], right=True))


# %% nbgrader={"grade_id": "expected_tokens"}
def expected_tokens(a, k):
    if a in (0, 1):
        return 1 + k * a
    return math.expm1((k + 1) * math.log(a)) / math.expm1(math.log(a))


# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):
    tokens = list(sums_of_powers(a, len(step_seconds)))
    seconds = [step + i * guess_seconds for i, step in enumerate(step_seconds)]
    return min(range(len(seconds)), key=lambda i: (seconds[i] / tokens[i], i))


def sums_of_powers(a, count):
    total, power = 0.0, 1.0
    for _ in range(count):
        total, power = total + power, power * a
        yield total


# %% nbgrader={"grade_id": "tree_mask"}
def tree_mask(parents):
    n = len(parents)
    step = torch.zeros(n + 1, n + 1)  # row and column 0: the text's end
    step[torch.arange(1, n + 1), torch.tensor(parents) + 1] = 1
    return torch.linalg.inv(torch.eye(n + 1) - step).round()[1:, 1:] > 0  # I + S + S² + ...


# %% nbgrader={"grade_id": "walk"}
def walk(parents, tokens, says):
    names = [""] * len(parents)  # of each guess the tokens on its way, as text
    for i, parent in enumerate(parents):
        names[i] = (names[parent] if parent >= 0 else "") + f"{tokens[i]},"
    way, path, token = "", [], says[0]
    while f"{way}{token}," in names:
        way += f"{token},"
        path.append(names.index(way))
        token = says[1 + path[-1]]
    return path, token


# %% nbgrader={"grade_id": "gumbel_token"}
def gumbel_token(p, u):
    return torch.pow(u, 1 / p).argmax()


# %% nbgrader={"grade_id": "verify_coupled"}
def verify_coupled(p, drafts, noise, choose):
    chosen = []
    while True:
        chosen.append(choose(p[len(chosen)], noise[len(chosen)]))
        if chosen != list(drafts[: len(chosen)]):
            return len(chosen) - 1, chosen[-1]
