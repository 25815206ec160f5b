# Exact arithmetic: fractions, whole numbers and cross products; a float only where a number is given out.

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    # For each earlier end: how many tokens before it are the text's last ones. The best is the longest, then the last.
    size = len(tokens)
    best = (shortest - 1, 0)
    for end in range(1, size):
        same = 0
        while same < min(longest, end) and tokens[end - 1 - same] == tokens[size - 1 - same]:
            same += 1
        best = max(best, (same, end))
    return tokens[best[1] : best[1] + k] if best[0] >= shortest else []


# %% nbgrader={"grade_id": "residual"}
from fractions import Fraction


def residual(p, q):
    rest = [max(Fraction(a) - Fraction(b), Fraction(0)) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    total = sum(Fraction(float(value)) for value in rest)
    if total == 0:
        return p.tolist()
    return [float(value / total) if value else 0.0 for value in rest]


# %% nbgrader={"grade_id": "verify"}
def verify(p, q, drafts, uniform):
    kept = 0
    for i in range(len(drafts)):
        u = Fraction(float(uniform()))
        if u * Fraction(q[i, drafts[i]].item()) - Fraction(p[i, drafts[i]].item()) >= 0:
            break
        kept += 1
    last = kept == len(drafts)
    weights = p[kept] if last else torch.tensor(residual(p[kept], q[kept]), dtype=torch.float64)
    return [kept, draw(weights, uniform())]


# %% nbgrader={"grade_id": "expected_tokens"}
def expected_tokens(a, k):
    a, total = Fraction(a), Fraction(1)
    for _ in range(k):  # Horner
        total = 1 + a * total
    return float(total)


# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):
    a, tokens, best = Fraction(a), Fraction(0), (Fraction(0), Fraction(1), 0)
    for k, seconds in enumerate(step_seconds):
        tokens += a**k
        time = Fraction(seconds) + k * Fraction(guess_seconds)
        if tokens * best[1] > best[0] * time and float(tokens / time) > float(best[0] / best[1]):
            best = (tokens, time, k)
    return best[2]


# %% nbgrader={"grade_id": "train_drafter"}
import itertools


def train_drafter(texts, vocab_size, smoothing):
    counts = [[Fraction(smoothing)] * vocab_size for _ in range(vocab_size)]
    for text in texts:
        for a, b in itertools.pairwise(text):
            counts[a][b] += 1
    return np.array([[float(n / sum(row)) for n in row] for row in counts], dtype=np.float32)


# %% nbgrader={"grade_id": "tree_mask"}
def tree_mask(parents):
    bits = []  # of each guess those it sees, as the bits of a whole number
    for i, parent in enumerate(parents):
        bits.append(1 << i | (bits[parent] if parent != -1 else 0))
    return [[bool(row >> j & 1) for j in range(len(parents))] for row in bits]


# %% nbgrader={"grade_id": "tree_positions"}
def tree_positions(parents, num_tokens):
    bits, positions = [], ()
    for i, parent in enumerate(parents):
        bits.append(1 << i | (bits[parent] if parent != -1 else 0))
        positions += (num_tokens + bin(bits[-1]).count("1") - 1,)
    return positions


# %% nbgrader={"grade_id": "roll_back"}
def roll_back(table, num_tokens, block_size, holders):
    full, rest = divmod(num_tokens, block_size)
    stays = full + bool(rest)
    freed = sorted((b for b in table[stays:] if holders[b] - 1 == 0), reverse=True)
    return table[:stays], freed


# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    out, to_come = [], num_tokens
    while to_come:
        useful = k if k < to_come else to_come - 1
        drafts = propose(prompt + out, useful) if useful else []
        kept, token = judge(prompt + out, drafts)
        out = out + list(drafts[:kept]) + [token]
        to_come -= kept + 1
    return out
