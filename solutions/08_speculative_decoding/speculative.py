# %% [markdown] nbgrader={"grade_id": "intro"}
# # Lab 08: draft and verify
#
# A draft model drafts four tokens in a step. Each draft token, a *draft* for short, is kept with probability 0.8, given
# that those before it were, and takes a tenth of the time of a step without drafts. A step that verifies four drafts
# takes 1.2 times as long as one without. How many times as fast is decoding? And with 32 requests in the batch, where
# that step takes 3 times as long? Write both numbers down; a cell below computes them.
#
# You build, in this order: drafts that are copied from the text, the rule that keeps or replaces a draft, the number
# of drafts that pays, a drafter counted from text, a tree of drafts, the roll-back of blocks, coupled sampling, and
# the loop around it all. At the end your verifier works inside the engine and serves text.
#
# - Parts 1 and 9 need notebook 08a, parts 2, 3 and 8 notebook 08b, part 4 notebook 08e, part 5 the
#   section on alignment of 08c, part 6 notebook 08d, part 7 notebook 08c.
# - Each part has a text, a cell for your code, and checks. Run a check as often as you like.
# - Hidden checks test the same properties. What is drawn here, they draw from the same functions, with other numbers.
# - `guess` in a name that is given (`guess_seconds`, `your_guesses`) is an older word for a draft.
# - A token is an int. A list of ints or of numbers that you return may be a list, a tuple, a tensor or a NumPy array.
#   Arguments belong to the caller: do not modify them. The checks notice.
# - Your own cells may use `torch`, `numpy` and the standard library. Nothing else is available when they are graded.
#
# 20 points.

# %% nbgrader={"grade_id": "imports"} inferlab={"where": "both"}
import math
import numpy as np
import torch


def draw(weights, u):
    """Given, also to your cells. A token: the first id whose sum of weights, with all before it, exceeds u times the
    sum of all. weights [vocab], none negative; they need not sum to 1. u in (0, 1)."""
    sums = torch.as_tensor(weights, dtype=torch.float64).cumsum(0)
    return int((sums <= float(u) * sums[-1]).sum().clamp(max=len(sums) - 1))


# %% nbgrader={"grade_id": "tools"}
# Given: helpers of the checks. You may read them, but do not change them.
import itertools
import operator

from grader.checks import rng, unchanging


def random_int(low, high, generator):
    """An integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def random_number(generator):
    """In (0, 1), float64."""
    return float(torch.rand((), dtype=torch.float64, generator=generator).clamp(1e-9, 1 - 1e-9))


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def eighths(*weights):
    """Distributions [rows, vocab] float64 whose numbers are exact: each row of weights sums to a power of 2."""
    rows = float64(weights)
    return rows / rows.sum(1, keepdim=True)


def random_rows(num_rows, vocab, generator, zeros=False):
    """Distributions [num_rows, vocab] float64; zeros: some tokens of each have 0, as after a filter."""
    weights = torch.rand(num_rows, vocab, dtype=torch.float64, generator=generator) ** 2 + 0.01
    if zeros:
        for row in weights:
            row[torch.randperm(vocab, generator=generator)[: vocab // 2]] = 0
    return weights / weights.sum(1, keepdim=True)


def int_of(what, value):
    """An int from an int, also of NumPy, or from a tensor with a single int."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    assert whole, f"{what}: expected an int, saw {value!r:.100}, a {type(value).__name__}"
    return int(operator.index(value))


def ints_of(what, seen):
    """A list of ints from a list, tuple, tensor or array of them."""
    if isinstance(seen, torch.Tensor | np.ndarray):
        seen = seen.tolist()
    assert isinstance(seen, list | tuple), f"{what}: expected a list of ints, saw {seen!r:.100}"
    return [int_of(what, value) for value in seen]


def number_of(what, value):
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    real = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    assert real, f"{what}: expected a number, saw {value!r:.100}, a {type(value).__name__}"
    return float(value)


def tensor_of(what, seen, shape):
    """Numbers of this shape as a float64 tensor."""
    try:
        values = torch.as_tensor(seen if isinstance(seen, torch.Tensor) else np.array(seen, dtype=np.float64)).double()
    except (TypeError, ValueError):
        raise AssertionError(f"{what}: expected numbers of shape {list(shape)}, saw {seen!r:.100}") from None
    assert list(values.shape) == list(shape), f"{what}: expected shape {list(shape)}, saw {list(values.shape)}"
    return values


def is_pair(seen):
    return isinstance(seen, list | tuple) and len(seen) == 2


def verdict_of(what, seen):
    """(what is kept, the token after it) from an answer of verify, verify_coupled or walk."""
    assert is_pair(seen), f"{what}: expected a pair (what is kept, token), saw {seen!r:.100}"
    return seen[0], int_of(f"{what}, the token", seen[1])


def verdict(kept, token):
    """The answer that says so; also what `judge` in part 9 gives you."""
    return kept, token


def guesses_of(what, seen, found=None):
    """The drafts in an answer of propose_ngram. found: as in check_proposed, where the right answer is known."""
    return ints_of(what, seen)


def your_parents(parents):
    """Parents, -1 for the text's end, as your functions take them."""
    return list(parents)


def sees_of(what, seen, n):
    """[n, n] bool from a mask of yours: True where a draft sees another."""
    values = tensor_of(what, seen, (n, n))
    assert bool(((values == 0) | (values == 1)).all()), f"{what}: expected True and False, saw {values.tolist()!r:.100}"
    return values == 1


def rolled_of(what, seen, unused):
    """(blocks of the table, freed blocks) from an answer of roll_back. unused: slots of its table that hold nothing."""
    assert is_pair(seen), f"{what}: expected a pair (table, freed), saw {seen!r:.100}"
    return ints_of(f"{what}, the table", seen[0]), ints_of(f"{what}, what is freed", seen[1])


class Numbers:
    """Uniform numbers of the examiner: each call gives the next one. After the last one it gives 0.5."""

    def __init__(self, numbers):
        self.left, self.given = list(numbers), 0

    def uniform(self):
        self.given += 1
        return self.left.pop(0) if self.left else 0.5


def judged(p, q, drafts, u):
    """(kept, token, how many numbers were taken) of your verify with these numbers."""
    numbers = Numbers(u)
    answer = unchanging(verify)(p.clone(), q.clone(), list(drafts), numbers.uniform)
    kept, token = verdict_of("verify", answer)
    kept = int_of("verify, how many are kept", kept)
    assert 0 <= kept <= len(drafts), f"verify keeps {kept} of {len(drafts)} drafts"
    return kept, token, numbers.given


def check_proposed(tokens, k, lengths, found):
    """found: (how many tokens the right pattern has, the place in the text from which is copied); None: no draft."""
    n, place = found or (0, len(tokens))
    text = str(tokens) if len(tokens) < 30 else f"of {len(tokens)} tokens that ends with {tokens[-8:]}"
    what = f"text {text}, k = {k}, n from {lengths[0]} to {lengths[1]}"
    answer = unchanging(propose_ngram)(list(tokens), k, *lengths)
    seen, expected = guesses_of(what, answer, (n, place) if found else (0, -1)), tokens[place : place + k]
    why = f"{tokens[len(tokens) - n :]} was followed by {expected} at position {place}" if found else "nothing to copy"
    print(f"{what}: {seen}")
    assert seen == expected, f"{what}: expected {expected} ({why}), saw {seen}"


def check_token(p, q, drafts, u, kept, token):
    """kept: how many drafts these numbers keep; token: what stands after them."""
    seen_kept, seen, _ = judged(p, q, drafts, u)
    row, place = f"row {kept} of p {in_row(p[kept][:8])}", "after the last draft"
    if kept < len(drafts):
        more = [max(float(a - b), 0.0) for a, b in zip(p[kept][:8], q[kept][:8], strict=True)]
        row, place = (
            f"{row}, of q {in_row(q[kept][:8], p[kept][:8])}, p has more {in_row(more)}",
            "in place of the first rejected draft",
        )
    number = u[kept + (kept < len(drafts))]
    what = f"{row}, the token's number {shown(number)}, {kept} of {len(drafts)} drafts kept"
    print(f"{what}: token {seen} {place}")
    assert seen == token, f"{what}: expected token {token} {place}, saw token {seen} after {seen_kept} kept"


def shown(value, other=None):
    """A number to four digits; to more where these would not tell it from 0, from 1, or from another one."""
    value, other = float(value), None if other is None else float(other)
    for digits in (4, 8, 17):
        text = f"{value:.{digits}g}"
        if float(text) == value or (float(text) not in (0, 1) and other in (None, value)):
            return text
        if float(text) not in (0, 1) and text != f"{other:.{digits}g}":
            return text
    return text


def in_row(values, others=None):
    others = [None] * len(values) if others is None else others
    return "[" + ", ".join(map(shown, values, others)) + "]"


def check_close(what, seen, expected, tolerance):
    """Numbers [n] that are off by no more than that; of many the one is shown that is off most."""
    off = torch.nan_to_num((seen - expected).abs(), nan=math.inf)
    at = int(off.argmax())
    if len(off) < 9:
        right, wrong = in_row(expected, seen), in_row(seen, expected)
    else:
        what, right, wrong = f"{what}, token {at}", shown(expected[at], seen[at]), shown(seen[at], expected[at])
    assert off[at] < tolerance, f"{what}: expected {right}, saw {wrong}"


# %% nbgrader={"grade_id": "inputs"}
# Given: inputs that are drawn, for your checks and for hidden ones, which draw with other numbers. Each is made around
# its answer: a pattern is put into a text, a path into a tree. They are of the kinds that wrong solutions get wrong.
import contextlib
import io

# Factors and remainders with which several tokens, or a token and a place, are often made into one number.
BASES = (1, 2, 10, 16, 31, 32, 37, 50, 64, 100, 127, 128, 131, 256, 257, 1000, 1009, 1024, 4096, 10_000, 32_000, 50_257, 65_536,
         65_537, 100_000, 128_256, 131_072, 151_936, 1_000_000, 1_000_003)  # fmt: skip


def drawn(check, cases):
    """The check with each of the cases; what it prints is shown only for one that fails."""
    cases = list(cases)
    for case in cases:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                check(*case)
        except BaseException:
            print(said.getvalue(), end="")
            raise
    print(f"... and {len(cases)} that were drawn")


def fresh(count, generator):
    """Different tokens."""
    return (2000 + torch.randperm(40_000, generator=generator)[:count]).tolist()


def texts_with_a_copy(generator):
    """(text, k, lengths, found): a pattern of different tokens that stands in the text once before its end, and what is
    like it."""
    for n in (1, 2, 3, 5, 12):
        tokens = fresh(n + 60, generator)
        pattern, follow, rest = tokens[:n], tokens[n : n + 50], tokens[n + 50 :]
        once = [*rest[:3], *pattern, *follow]
        yield [*once, *pattern], 3, (n + 2, 1), (n, 3 + n)
        yield [*once, *pattern], random_int(10, 45, generator), (n, n), (n, 3 + n)
        if n > 1:
            part = [*once, *pattern[1:], *rest[3:5], *pattern]  # more recently, but only a part of it
            yield part, 2, (n, 1), (n, 3 + n)
            yield part, 1, (n - 1, 1), (n - 1, len(once) + n - 1)
            yield [*once, *pattern[:-1], *rest[3:5], *pattern[::-1], rest[5], *pattern], 2, (n, n), (n, 3 + n)
    for distance in (70, 300, 1500, 5000):  # long ago
        tokens = fresh(distance + 2, generator)
        yield [*tokens, *tokens[:2]], 2, (3, 1), (2, 2)
    for period in (1, 2, 3, 4):  # the most recent occurrence overlaps the end
        unit, size, n = fresh(period, generator), random_int(12, 30, generator), random_int(2, 7, generator)
        yield [unit[i % period] for i in range(size)], 6, (n, n), (n, size - period)
    head, pattern, tail = fresh(8, generator), fresh(2, generator), fresh(8, generator)
    for _ in range(3):  # one after another, alike in length, at the front and at the end
        yield [*head, *pattern, *fresh(4, generator), *tail, *pattern], 2, (2, 1), (2, 10)
    text = [*head, *pattern, 5, *tail, *pattern]
    yield text, 3, (2, 1), (2, 10)
    yield text, 1, (2, 1), (2, 10)
    yield [*fresh(30, generator), *pattern], 3, (2, 1), None  # it stood in the texts before, and not in this one


def texts_that_look_alike(generator):
    """(text, k, lengths, found) without a copy, only with tokens that are like the text's last ones."""
    first, last = random_int(3000, 9000, generator), random_int(3000, 9000, generator)
    digit, others = random_int(1, 9, generator), fresh(3 * len(BASES), generator)
    alike = [
        int(f"{digit}{last}"),
        others[0],
        int(f"{last}{digit}"),
        others[1],
    ]  # the last token as a part of another one
    yield [*alike, last], 2, (1, 1), None
    yield [21, 7, 4, 1], 2, (1, 1), None
    front, back = f"{first}", f"{last}"
    texts = [(int(f"{digit}{front}"), last), (first, int(f"{back}{digit}")), (int(front + back[0]), int(back[1:] or 0)),
             (int(front[:-1]), int(front[-1] + back))]  # fmt: skip
    yield [*(x for pair, y in zip(texts, others, strict=False) for x in (*pair, y)), first, last], 2, (2, 2), None
    equal = [pair for base in BASES for pair in ((first - 1, last + base), (first + base, last - 1))]
    yield [*(x for pair, y in zip(equal, others, strict=False) for x in (*pair, y)), first, last], 2, (2, 2), None
    equal = [
        pair for base in BASES for pair in ((first + base, last), (first, last + base), (first + base, last + base))
    ]
    equal += [(first ^ bit, last ^ bit) for bit in (1, 2, 64, 1024)] + [(2 * first, last // 2), (last, first)]
    yield [*(x for pair, y in zip(equal, 2 * others, strict=False) for x in (*pair, y)), first, last], 2, (2, 2), None


def parts_of_a_distribution(generator):
    """(p, q, residual): p and q have a part in common, and of disjoint tokens each has more."""
    for vocab in (2, 3, random_int(4, 60, generator), 5000):
        for share in (0.5, 2.0**-10, 2.0**-30):
            common = random_rows(1, vocab, generator)[0] * (1 - share)
            of_p = torch.randperm(vocab, generator=generator) < max(1, vocab // 2)
            more, other = (
                weights * mine for weights, mine in zip(random_rows(2, vocab, generator), (of_p, ~of_p), strict=True)
            )
            p, q = (common + share * weights / weights.sum() for weights in (more, other))
            yield p, q, (p - common) / (p - common).sum()
        yield p, p.clone(), p


def judgements(generator):
    """(p, q, drafts, u, how many are kept, the token after them), for every number of drafts, and every place."""
    for k in (0, 1, 2, 3, 5, 8, 20):
        for kept in sorted({0, k // 2, max(k - 1, 0), k}):
            vocab = random_int(3, 30, generator) if k != 3 else 2000
            zeros = random_int(0, 1, generator) == 1
            p, q = random_rows(k + 1, vocab, generator, zeros), random_rows(k, vocab, generator, zeros)
            drafts, u = [], []
            for i in range(min(kept + 1, k)):
                ratio = torch.where(q[i] > 0, p[i] / q[i], -1.0)
                between = (ratio > 0) & (ratio < 1)  # drafts that are kept or not as their number says
                sure, never = (ratio >= 1, ratio == 0) if random_int(0, 1, generator) else (between & False,) * 2
                if not between.any():
                    p[i], q[i] = 0.0, 0.0
                    p[i, :2], q[i, :2] = float64([0.25, 0.75]), float64([0.5, 0.5])
                    between[0], sure, never = True, between & False, between & False
                wanted = next(group for group in (sure if i < kept else never, between) if group.any())
                drafts.append(int(wanted.double().multinomial(1, generator=generator)))
                bound = float(p[i, drafts[-1]] / q[i, drafts[-1]])
                if not 0 < bound < 1:
                    u.append(0.999999 if i < kept else 1e-9)
                elif random_int(0, 2, generator):
                    part = random_number(generator)
                    u.append(bound * part if i < kept else bound + (1 - bound) * part)
                else:
                    u.append(bound * (1 - 1e-9 if i < kept else 1 + 1e-9))
            drafts += q[len(drafts) :].multinomial(1, generator=generator)[:, 0].tolist() if len(drafts) < k else []
            row = p[k] if kept == k else (p[kept] - q[kept]).clamp(min=0)
            token = int(row.multinomial(1, generator=generator))
            part = 0.2 + 0.6 * random_number(generator)
            u.append(float((row[:token].sum() + row[token] * part) / row.sum()))
            yield p, q, drafts, u + [0.5] * (k + 1 - len(u)), kept, token


def step_times(generator):
    """(a, seconds of a draft, seconds of steps, the best k), with one that is nearly as good before it."""
    for best, most in ((1, 2), (2, 5), (7, 9), (12, 12), (20, 30)):
        for less, unit in ((0.5, 1.0), (5e-3, 1e-4), (1e-5, 1e4)):
            a, draft = 0.3 + 0.65 * random_number(generator), 0.01 * random_number(generator)
            speeds = [0.3 + 0.6 * random_number(generator) for _ in range(most + 1)]
            speeds[best], speeds[random_int(0, best - 1, generator)] = 1.0, 1.0 - less
            gives = [math.fsum(a**i for i in range(k + 1)) for k in range(most + 1)]
            seconds = [unit * (gives[k] / speeds[k] - k * draft) for k in range(most + 1)]
            yield a, unit * draft, seconds, best
    slow, fast = 2.0 + random_number(generator), 1.0 - 0.5 * random_number(generator)
    yield 0.0, 0.0, [slow, fast, slow], 1  # measured: steps with a draft are faster, though none is kept
    yield 0.0, 0.1, [slow, slow, fast], 2
    yield 0.02, 0.0, [slow, slow, fast], 2
    yield 0.9, 1.1 * slow, [slow, 0.01, 9.0], 1  # a draft takes longer than a step
    yield 0.5, 0.0, [slow, slow / 0.7, slow / 0.8, 9 * slow], 2  # the next has the same first step, and another best k
    yield 0.5, 0.0, [slow, slow * 1.4925, slow * 1.752, 9 * slow], 1
    yield 0.5, 0.0, [1.0, 1.5, 1.75, 9.0], 0


def trees(generator):
    """Parents: chains, chains with siblings, many siblings, and trees at random, deep ones among them."""
    yield list(range(-1, 19))
    yield [-1, *((i - 1) // 2 * 2 for i in range(1, 30))]
    yield [-1] * 20
    yield [-1] + [0] * 20
    yield [-1, *(random_int(max(-1, i - 3), i - 1, generator) for i in range(1, 70))]
    for n in (2, 3, random_int(4, 12, generator), 40):
        yield [-1, *(random_int(-1, i - 1, generator) for i in range(1, n))]


def way_to(parents, draft):
    return [] if draft < 0 else [*way_to(parents, parents[draft]), draft]


def walks(generator):
    """(parents, tokens, what the target says, path, token)."""
    for parents in trees(generator):
        n = len(parents)
        ways = [way_to(parents, draft) for draft in range(-1, n)]
        for path in (max(ways, key=len), ways[-1], ways[random_int(0, n, generator)]):
            names = torch.randperm(max(30, n), generator=generator).tolist()
            tokens = []
            for i, parent in enumerate(parents):  # the same tokens in several branches, different ones of one parent
                taken = [tokens[j] for j in range(i) if parents[j] == parent]
                tokens.append(next(name for name in names if name not in taken))
            says = [names[random_int(0, 2, generator)] for _ in range(n + 1)]
            for before, i in itertools.pairwise([-1, *path]):
                says[1 + before] = tokens[i]
            last = path[-1] if path else -1
            says[1 + last] = 99
            yield parents, tokens, says, path, 99
    for base in BASES[2:]:  # a draft's number and a token made into one
        token = random_int(1, 9, generator)
        yield [-1, 0, 0, 2], [5, 6, 7, token], [5, 6, token + base, 1, 1], [0, 1], token + base
    yield [-1, 0, *[0] * 10, 0, 12], [5, 6, *range(20, 30), 7, 3], [5, 6, 23, *[1] * 12], [0, 1], 23


def noises(generator):
    """(p, u, token): the token's number is set so that it wins, by much or by little."""
    for vocab in (2, 5, 50, 5000):
        for zeros in (False, True):
            for margin in (0.5, 0.99, 0.999999):
                p = random_rows(1, vocab, generator, zeros)[0]
                u = 0.05 + 0.949 * torch.rand(vocab, dtype=torch.float64, generator=generator)
                token = int((p > 0).double().multinomial(1, generator=generator))
                others = (torch.arange(vocab) != token) & (p > 0)
                if others.any():  # a token with p wins where u^(1 / p) is largest
                    largest = float((u[others].log() / p[others]).max())
                    u[token] = math.exp(largest * margin * float(p[token]))
                yield p, u, token
    yield eighths([4, 4])[0], float64([1 - 2.0**-40, 1 - 2.0**-45]), 1  # both nearly 1, and nearly 0
    yield eighths([4, 4])[0], float64([1e-12, 1e-14]), 0
    yield float64([1 - 2.0**-20, 2.0**-20]), float64([0.3, 1 - 2.0**-40]), 1  # what is rarely chosen


# %% [markdown] nbgrader={"grade_id": "text_ngram"}
# ## 1. Drafts from the text itself
#
# The cheapest drafter copies: it looks for the text's last tokens earlier in the text, and drafts what followed them
# there. This is called prompt lookup, or n-gram drafting.
#
# **Build** `propose_ngram(tokens, k, longest, shortest)`: a list of at most k tokens.
#
# - The *pattern* is the text's last n tokens. Try n = `longest` first, then one less, down to `shortest`
#   (1 ≤ `shortest` ≤ `longest`). The first n that has an earlier occurrence is the one that counts.
# - Of several earlier occurrences take the most recent one, which is the one that begins last. It may overlap the
#   text's end, but it is not the text's end itself.
# - The drafts are the k tokens that follow the occurrence; fewer, if the text ends before.
# - No occurrence, or k = 0: an empty list. A text may be shorter than `longest`, and empty.
#
# In a run of equal tokens the most recent earlier occurrence begins one place before the text's last n tokens, so that
# only one token follows it: text 6 6 6 6 with n = 2 gives the one draft 6, also for k = 4. The engine of this course goes on
# with what it has copied, 6 6 6 6; here the drafts end where the text does.
#
# **Hint:** two loops: over n, and over the place where an occurrence begins, from the right.
#
# **Trap (itself):** the last n tokens are at the text's end, always. What follows them there is not known.


# %% nbgrader={"grade_id": "propose_ngram", "solution": true}
def propose_ngram(tokens, k, longest, shortest):
    """What followed the text's last tokens when they occurred before: at most k tokens."""
    ### BEGIN SOLUTION
    for n in range(longest, shortest - 1, -1):
        pattern = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == pattern:
                return tokens[start + n : start + n + k]
    return []
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_ngram_match", "grade": true, "points": 1}
# property: the drafts follow the longest end of the text that occurred before, at its most recent occurrence.
# question: Which occurrence does your loop meet first, and with which n does it begin?
# hint: the outer loop is over n, from longest to shortest; the inner one over places, from the right.
# explanation: Text 1 2 9 . 2 7 . 1 2: with n = 2 the pattern 1 2 stands at the front, followed by 9; with n = 1 the
#   pattern 2 was followed by 7 more recently. The longer pattern counts, since it says more about where the text is.
check_proposed([5, 6, 7, 8, 9, 5, 6], 3, (2, 2), (2, 2))
check_proposed([1, 2, 9, 4, 2, 7, 4, 1, 2], 2, (2, 1), (2, 2))  # the longer pattern counts
check_proposed([1, 2, 9, 4, 2, 7, 4, 1, 2], 2, (1, 1), (1, 5))
check_proposed([3, 4, 1, 3, 4, 2, 3, 4], 2, (2, 1), (2, 5))  # the most recent one
check_proposed([8, 3, 4, 1, 0, 3, 4, 2, 3, 4], 4, (3, 1), (2, 7))  # no occurrence with n = 3
check_proposed([6, 6, 6, 6], 2, (2, 1), (2, 3))  # the most recent one overlaps the end
drawn(check_proposed, texts_with_a_copy(rng("texts")))
drawn(check_proposed, texts_that_look_alike(rng("texts that look alike")))


### BEGIN HIDDEN TESTS
def lookup(tokens, longest, shortest):
    for n in range(longest, shortest - 1, -1):
        ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[-n:]]
        if ends:
            return n, max(ends)
    return None


draw_numbers = rng("check_ngram_match")
check_proposed([0, 0, 7, 1, 5, 0, 0, 8, 1, 6, 0, 0], 2, (2, 1), (2, 7))  # token 0
for _ in range(14):
    size, vocab = random_int(4, 40, draw_numbers), random_int(2, 4, draw_numbers)
    tokens = [random_int(0, vocab - 1, draw_numbers) for _ in range(size)]
    longest = random_int(1, 4, draw_numbers)
    lengths, k = (longest, random_int(1, longest, draw_numbers)), random_int(1, 6, draw_numbers)
    check_proposed(tokens, k, lengths, lookup(tokens, *lengths))
check_proposed([1, 2, 1, 9, 1, 2, 1, 2, 1], 3, (3, 3), (3, 7))  # the most recent of three tokens overlaps the end
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_ngram_ends", "grade": true, "points": 1}
# property: never more than k drafts; fewer where the text ends before; none without an occurrence or with k = 0.
# question: The text is 1 1 1: where does the last 1 occur before, and what follows it there?
# hint: the last place where an occurrence may begin is len(tokens) - n - 1; a slice beyond the end is just shorter.
# explanation: Text 1 1 1 with n = 1: the most recent earlier 1 is the second, and one token follows it. With n = 2
#   the pattern 1 1 occurs at the front, overlapping the end, and the last 1 follows it. A text of one token has nothing
#   before its end, so there are no drafts.
check_proposed([7, 1, 7, 1], 5, (2, 1), (2, 2))  # fewer than k are left
check_proposed([1, 1, 1], 3, (1, 1), (1, 2))  # it overlaps the end
check_proposed([1, 1, 1], 3, (2, 2), (2, 2))
check_proposed([1, 2, 3, 4], 3, (3, 1), None)  # no occurrence
check_proposed([1, 2, 1, 2], 0, (2, 1), None)
check_proposed([4], 3, (3, 1), None)
check_proposed([], 3, (2, 1), None)
check_proposed([6, 5, 6, 6, 5], 1, (4, 2), (2, 2))  # k = 1; the text is hardly longer than the pattern
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_ngram_ends")
check_proposed([2, 1, 2, 1], 4, (2, 2), (2, 2))
check_proposed([1, 2, 5, 1, 2], 4, (2, 2), (2, 2))
check_proposed([3, 3], 4, (2, 1), (1, 1))
check_proposed([3, 3], 4, (2, 2), None)
check_proposed([3, 4, 3], 9, (8, 1), (1, 1))
check_proposed([1, 2, 1], 3, (2, 2), None)
check_proposed([1, 9, 1, 8, 1, 8, 1], 1, (1, 1), (1, 5))
for n in range(1, 5):  # patterns of each length, at the very front of the text
    pattern = (100 + torch.randperm(900, generator=draw_numbers)[:n]).tolist()  # all different
    check_proposed([*pattern, 7, 8, *pattern], 9, (n, n), (n, n))
    check_proposed([*pattern, 7, 8, *pattern], 1, (n + 3, 1), (n, n))
    check_proposed([*pattern, *pattern], 9, (n, n), (n, n))
    check_proposed([*pattern, 7, *pattern], 9, (n + 1, n + 1), None)
    check_proposed(pattern, 9, (n, 1), None)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_residual"}
# ## 2. What stands in for a rejected draft
#
# A draft was drawn from q, and the target's distribution is p. Where q(y) > p(y), y is drafted too often, and some of
# these drafts are rejected. What is drawn instead makes up for the tokens that are drafted too rarely, and for nothing
# else: the *residual*, max(p − q, 0), divided by its sum.
#
# **Build** `residual(p, q)`: p and q are distributions `[vocab]`, float64 tensors. Return a distribution `[vocab]`.
# Where p and q are equal nothing is left to divide by; return p then.
#
# **Trap (normaliser):** the sum to divide by is that of max(p − q, 0), not that of p − q, which is 0.


# %% nbgrader={"grade_id": "residual", "solution": true}
def residual(p, q):
    """max(p - q, 0) over its sum, [vocab]; p where that sum is 0."""
    ### BEGIN SOLUTION
    rest = (p - q).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 0 else p
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_residual", "grade": true, "points": 1}
# property: the residual is max(p - q, 0) divided by its own sum; where p and q are equal it is p.
# question: Which tokens have too little of q, and how much of p is that together?
# hint: subtract, cut at 0, then divide by what is left, unless nothing is.
# explanation: p = [0.5, 0.3, 0.2] and q = [0.2, 0.2, 0.6]. What p has more: [0.3, 0.1, 0], together 0.4. Divided:
#   [0.75, 0.25, 0]. The third token never stands in for a draft: q has more than enough of it.
def check_rest(p, q, expected):
    seen = tensor_of("residual", unchanging(residual)(p.clone(), q.clone()), p.shape)
    what = f"p {in_row(p, q)}, q {in_row(q, p)}" if len(p) < 9 else f"p and q of {len(p)} tokens"
    print(f"{what}: {in_row(seen[:8])}")
    check_close(what, seen, expected, 1e-9)


check_rest(float64([0.5, 0.3, 0.2]), float64([0.2, 0.2, 0.6]), float64([0.75, 0.25, 0.0]))
check_rest(float64([0.5, 0.5, 0.0]), float64([0.0, 0.5, 0.5]), float64([1.0, 0.0, 0.0]))  # after a filter
check_rest(float64([0.25, 0.75]), float64([0.25, 0.75]), float64([0.25, 0.75]))  # equal
check_rest(float64([0.1, 0.2, 0.7]), float64([0.0, 0.0, 1.0]), float64([1 / 3, 2 / 3, 0.0]))  # a copied draft
drawn(check_rest, parts_of_a_distribution(rng("residuals")))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_residual")
check_rest(float64([1.0]), float64([1.0]), float64([1.0]))
check_rest(float64([0.0, 1.0]), float64([1.0, 0.0]), float64([0.0, 1.0]))
check_rest(float64([0.5, 0.5]), float64([0.5 + 2.0**-20, 0.5 - 2.0**-20]), float64([0.0, 1.0]))  # nearly equal
for vocab in (2, 3, random_int(4, 60, draw_numbers), 5000):
    for zeros in (False, True):
        p, q = random_rows(2, vocab, draw_numbers, zeros)
        rest = torch.where(p > q, p - q, 0.0)
        check_rest(p, q, rest / rest.sum() if rest.any() else p)
        check_rest(p, p.clone(), p)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_verify"}
# ## 3. Keep or replace
#
# One pass of the target has computed p for every position: row i is its distribution at the place of draft i, after
# the text and the drafts before it. The last row is after all drafts. Both p and q are filtered already as the
# request says (temperature, top-k, top-p), so either may have zeros.
#
# **Build** `verify(p, q, drafts, uniform)`: p `[k + 1, vocab]`, q `[k, vocab]`, float64 tensors; `drafts` a list of k
# tokens, draft i drawn from q[i], so that q[i] is above 0 there; `uniform()` gives the next uniform number in (0, 1).
# Return a pair: how many drafts are kept, and the token after them.
#
# - Go through the drafts in order. Draft x is kept if u < p(x) / q(x), with u the next number: so with probability
#   min(1, p(x) / q(x)). u equal to the quotient does not keep it.
# - At the first one that is not kept, the token comes from the residual of this row, and all drafts after it are
#   dropped.
# - If all are kept, the token comes from the last row of p: the *bonus*. With k = 0 that is all there is to do.
# - The token is `draw(weights, u)`, given in the first, folded cell, with u the next number: the first id for which the
#   running sum of weights exceeds u times the whole sum.
#
# **Count:** every draft that is judged takes one number, also where p(x) ≥ q(x); the token takes one more. A number is
# used once. So with m of k drafts kept, m + 2 numbers are used if m < k, and k + 1 if m = k.
#
# A draft that was copied, as in part 1, was drawn from a q that is 1 at the draft: the rule is the same.
#
# **Hint:** a loop with a `return` in it, and a `return` after it. u · q(x) < p(x) does the same without a division.
#
# **Trap (same number):** that a draft was rejected says that its u was large. The same number, used again for the token,
# would favour tokens with large ids.


# %% nbgrader={"grade_id": "verify", "solution": true}
def verify(p, q, drafts, uniform):
    """(how many drafts are kept, the token after them). p [k + 1, vocab], q [k, vocab], drafts [k]."""
    ### BEGIN SOLUTION
    for i, draft in enumerate(drafts):
        if uniform() * q[i, draft] >= p[i, draft]:
            return i, draw(residual(p[i], q[i]), uniform())
    return len(drafts), draw(p[len(drafts)], uniform())
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_kept", "grade": true, "points": 1}
# property: a draft is kept if u < p(x) / q(x) and all before it were kept; each has its own row and its own u.
# question: What is p(x) / q(x) of the draft, and is u below it?
# hint: p in the numerator, q in the denominator, both at the draft and in its row; stop at the first rejection.
# explanation: p(x) = 0.2 and q(x) = 0.4: the draft comes twice as often as it should, so half of these drafts are
#   kept, those with u below 0.5. With p(x) = 0.4 and q(x) = 0.2 it comes too rarely, and is kept always. With p(x) = 0,
#   after a filter, it is never kept.
def check_kept_of(p, q, drafts, u, expected):
    kept, _, _ = judged(p, q, drafts, u)
    quotients = [f"{float(p[i, x] / q[i, x]):.4g}" for i, x in enumerate(drafts)]
    what = f"p(x) / q(x) of the drafts {', '.join(quotients)}; u {in_row(u)}"
    print(f"{what}: {kept} kept")
    assert kept == expected, f"{what}: expected {expected} kept, saw {kept}"


p, q = eighths([1, 3, 4], [4, 2, 2], [2, 2, 4]), eighths([2, 4, 2], [4, 3, 1])
check_kept_of(p, q, [0, 0], [0.6, 0.9, 0.5], 0)  # 1/2 and 1
check_kept_of(p, q, [0, 0], [0.4, 0.9, 0.5], 2)
check_kept_of(p, q, [1, 1], [0.7, 0.7, 0.5], 1)  # 3/4 and 2/3
check_kept_of(eighths([2, 4, 2], [4, 2, 2]), eighths([4, 2, 2]), [0], [0.5, 0.5], 0)  # equal does not keep
check_kept_of(p, q, [2, 2], [0.999, 0.999, 0.5], 2)  # 2 and 2: always
check_kept_of(eighths([0, 4, 4], [1, 3, 4]), eighths([4, 2, 2]), [0], [1e-9, 0.5], 0)  # p is 0: never
drawn(check_kept_of, (case[:5] for case in judgements(rng("kept"))))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_kept")
p, q = eighths([2, 2, 4], [2, 4, 2], [4, 2, 2]), eighths([4, 2, 2], [0, 0, 8])
check_kept_of(p, q, [0, 2], [0.49, 0.26, 0.5], 1)
check_kept_of(p, q, [0, 2], [0.51, 0.24, 0.5], 0)  # the second alone would be kept
check_kept_of(p, q, [0, 2], [0.49, 0.25, 0.5], 1)
check_kept_of(p, q, [1, 2], [0.999, 0.249, 0.5], 2)
for k in (1, 2, 3, 5, random_int(6, 9, draw_numbers)):
    for zeros in (False, True):
        for vocab in (2, random_int(3, 30, draw_numbers)):
            p, q = random_rows(k + 1, vocab, draw_numbers, zeros), random_rows(k, vocab, draw_numbers, zeros)
            drafts = q.multinomial(1, generator=draw_numbers)[:, 0].tolist()
            u = [min(0.999, random_number(draw_numbers) ** 3) for _ in range(k + 2)]
            right = [u[i] < float(p[i, x] / q[i, x]) for i, x in enumerate(drafts)]
            check_kept_of(p, q, drafts, u, right.index(False) if False in right else k)
            check_kept_of(q[:1].repeat(k + 1, 1), q[:1].repeat(k, 1), drafts[:1] * k, [0.99] * (k + 2), k)  # p = q
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_numbers", "grade": true, "points": 1}
# property: each draft that is judged takes one number, and the token one more; none is taken that is not used.
# question: How many drafts are looked at before one is rejected, and how many numbers is that with the token's own?
# hint: call uniform() in the loop, once a draft, and once for the token; not all in advance.
# explanation: Of four drafts the second is rejected: two drafts were judged, one token drawn, so three numbers.
#   A number that is taken and thrown away costs little, but two programs that should draw the same text must take the
#   same numbers.
def check_taken(p, q, drafts, u, kept):
    seen, _, taken = judged(p, q, drafts, u)
    expected = min(kept + 1, len(drafts)) + 1
    print(f"{seen} of {len(drafts)} drafts kept: {taken} numbers taken")
    assert taken == expected, f"{kept} of {len(drafts)} drafts are kept: expected {expected} numbers, saw {taken} taken"


p, q = (
    eighths([4, 2, 2], [1, 3, 4], [4, 2, 2], [2, 2, 4], [2, 2, 4]),
    eighths([4, 2, 2], [4, 2, 2], [4, 2, 2], [2, 2, 4]),
)
check_taken(p, q, [0, 0, 0, 2], [0.5, 0.9, 0.5, 0.5, 0.5], 1)
check_taken(p, q, [0, 0, 0, 2], [0.5, 0.1, 0.5, 0.5, 0.5], 4)
check_taken(p, q, [0, 2, 1, 0], [0.9, 0.9, 0.9, 0.9, 0.5], 4)  # p(x) >= q(x) takes a number, too
check_taken(p[:1], q[:0], [], [0.5], 0)
drawn(check_taken, (case[:5] for case in judgements(rng("numbers"))))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_numbers")
for k in (1, 2, 3, 6):
    p = random_rows(k + 1, 5, draw_numbers)
    for rejected in (*range(k), k):
        drafts, rows = p[:k].multinomial(1, generator=draw_numbers)[:, 0].tolist(), p.clone()
        if rejected < k:  # all of its probability goes to the next token
            moved = rows[rejected, drafts[rejected]].item()
            rows[rejected, drafts[rejected]] = 0
            rows[rejected, (drafts[rejected] + 1) % 5] += moved
        check_taken(rows, p[:k], drafts, [0.3 + 0.6 * random_number(draw_numbers) for _ in range(k + 1)], rejected)
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_replaced", "grade": true, "points": 1}
# property: in place of the first rejected draft comes a token from the residual of its row, drawn with the next number.
# question: Which tokens have weight in the residual, and whose running sum is the first above the next number?
# hint: draw(residual(p[i], q[i]), uniform()), with i the rejected draft; never from p itself.
# explanation: p = [0.125, 0.375, 0.5], q = [0.5, 0.25, 0.25], draft 0 rejected. What p has more is [0, 0.125, 0.25]:
#   token 1 for numbers below 1/3 and token 2 above. Drawn from p itself token 0 would come again, although it was
#   drafted too often already.
p, q = eighths([1, 3, 4], [4, 2, 2]), eighths([4, 2, 2])
check_token(p, q, [0], [0.3, 0.32], 0, 1)  # residual [0, 1/3, 2/3]
check_token(p, q, [0], [0.3, 0.34], 0, 2)
check_token(p, q, [0], [0.99, 0.01], 0, 1)
p, q = eighths([1, 3, 4], [6, 1, 1], [1, 1, 6]), eighths([4, 2, 2], [2, 2, 4])
check_token(p, q, [1, 2], [0.9, 0.3, 0.99], 1, 0)  # the second is rejected; residual [1, 0, 0]
check_token(eighths([0, 2, 2], [1, 1, 2]), eighths([4, 0, 0]), [0], [0.1, 0.6], 0, 2)  # a copied draft that p forbids
drawn(check_token, (case for case in judgements(rng("replaced")) if case[4] < len(case[2])))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_replaced")
for k in (1, 2, 4):
    for first in range(k):
        for zeros in (False, True):
            vocab = random_int(3, 30, draw_numbers)
            p, q = random_rows(k + 1, vocab, draw_numbers, zeros), random_rows(k, vocab, draw_numbers, zeros)
            p[:first] = q[:first]  # those before it are kept
            drafts = q.multinomial(1, generator=draw_numbers)[:, 0].tolist()
            drafts[first] = int((q[first] - p[first]).argmax())
            quotient = float(p[first, drafts[first]] / q[first, drafts[first]])
            u = [0.5] * first + [quotient + (1 - quotient) * 0.9]
            rest = (p[first] - q[first]).clamp(min=0)
            token = int(rest.multinomial(1, generator=draw_numbers))
            u.append(float((rest[:token].sum() + rest[token] * (0.2 + 0.6 * random_number(draw_numbers))) / rest.sum()))
            check_token(p, q, drafts, u, first, token)
tiny = torch.tensor(
    [[2.0**-30] * 64 + [1 - 2.0**-24, 0.0]] * 2, dtype=torch.float64
)  # a large vocabulary has such tokens
for token in (0, 9, 63):
    check_token(tiny, eighths([0] * 65 + [1]), [65], [0.5, (token + 0.5) * 2.0**-30], 0, token)
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_bonus", "grade": true, "points": 1}
# property: where all drafts are kept, a token comes from the last row of p, drawn with the next number.
# question: All drafts were kept: which row of p has not been used yet?
# hint: after the loop: draw(p[k], uniform()). No residual here: there is no q for this row.
# explanation: Two drafts, three rows of p. If both are kept, the target has already computed what follows them: row 2.
#   The step gives three tokens. With no drafts at all row 0 is the last one, and the step is an ordinary decode step.
def check_bonus_of(p, q, drafts, u, token):
    check_token(p, q, drafts, u, len(drafts), token)


p, q = eighths([4, 2, 2], [2, 4, 2], [1, 3, 4]), eighths([4, 2, 2], [2, 4, 2])
check_bonus_of(p, q, [0, 1], [0.5, 0.5, 0.1], 0)
check_bonus_of(p, q, [0, 1], [0.5, 0.5, 0.4], 1)
check_bonus_of(p, q, [0, 1], [0.1, 0.1, 0.6], 2)
check_bonus_of(eighths([2, 4, 2]), torch.zeros(0, 3, dtype=torch.float64), [], [0.8], 2)  # no drafts
check_bonus_of(eighths([8, 0, 0], [0, 8, 0], [1, 3, 4]), eighths([8, 0, 0], [0, 8, 0]), [0, 1], [0.5, 0.5, 0.6], 2)
drawn(check_token, (case for case in judgements(rng("bonus")) if case[4] == len(case[2])))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_bonus")
for k in (0, 1, 2, random_int(3, 8, draw_numbers)):
    for zeros in (False, True):
        vocab = random_int(2, 30, draw_numbers)
        p = random_rows(k + 1, vocab, draw_numbers, zeros)
        token = int(p[k].multinomial(1, generator=draw_numbers))
        u = [random_number(draw_numbers) * 0.999 for _ in range(k)]
        u.append(float(p[k, :token].sum() + p[k, token] * (0.2 + 0.6 * random_number(draw_numbers))))
        drafts = p[:k].multinomial(1, generator=draw_numbers)[:, 0].tolist() if k else []
        check_bonus_of(p, p[:k].clone(), drafts, u, token)
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_distribution", "grade": true, "points": 1}
# property: over all drafts of q and all numbers, the token that comes out is distributed as p, whatever q is.
# question: Over an even grid of numbers, how often does each token come out, and which comes too often?
# hint: nothing new: keeping with min(1, p/q) and replacing from the residual give p together. If one of the checks above
#   fails, mend that first.
# explanation: y is drafted and kept with q(y) min(1, p(y)/q(y)) = min(p(y), q(y)). It replaces a rejected draft with
#   probability max(p(y) - q(y), 0): the residual's share of all rejections. Both together are p(y). The check takes
#   every draft with its weight in q, and an even grid of numbers, so that no luck is in it.
def come_out(p, q, num_places):
    """Shares of the first token [vocab], and, of rows where the first draft is kept, of the second one [vocab]: over all
    drafts, and all numbers of a grid on which every boundary lies between two places."""
    k, vocab = q.shape
    grid = [(place + 0.5) / num_places for place in range(num_places)]
    first, second = torch.zeros(vocab, dtype=torch.float64), torch.zeros(vocab, dtype=torch.float64)
    for drafts in itertools.product(range(vocab), repeat=k):
        weight = math.prod(float(q[i, x]) for i, x in enumerate(drafts))
        for u in itertools.product(grid, repeat=k + 1) if weight else ():
            kept, token, _ = judged(p, q, drafts, u)
            text = [*drafts[:kept], token]
            first[text[0]] += weight
            if kept:
                second[text[1]] += weight
    return first / num_places ** (k + 1), second / second.sum()


def check_comes_out(p, q, num_places):
    which = "the first token after the text", "the second one, where the first draft is kept"
    for place, (seen, expected) in enumerate(zip(come_out(p, q, num_places), p, strict=False)):
        rows = f"p {in_row(expected)}" + (f", q {in_row(q[place])}" if place < len(q) else ", where no draft is left")
        print(f"{rows}: the shares of {which[place]} are {in_row(seen)}")
        what = (
            f"{rows}, every draft with its weight in q, {num_places} numbers for each draw, {which[place]}, p's shares"
        )
        check_close(what, seen, expected, 1e-9)


check_comes_out(eighths([1, 5, 2], [4, 2, 2]), eighths([2, 2, 4]), 8)
check_comes_out(eighths([2, 3, 1.5, 1.5], [2, 4, 2, 0]), eighths([4, 2, 1, 1]), 4)  # residual [0, 1/2, 1/4, 1/4]
### BEGIN HIDDEN TESTS
# Boundaries lie at quarters, or at thirds and halves, so that few places see them all.
draw_numbers = rng("check_distribution")
pairs = [([2, 3, 1.5, 1.5], [4, 2, 1, 1], 4), ([0, 4, 4, 0], [3, 1, 3, 1], 4), ([2, 3, 2, 1], [3, 2, 2, 1], 6)]
for weights_p, weights_q, places in pairs:
    order = torch.randperm(4, generator=draw_numbers)
    bonus = eighths([0, 4, 4, 0]) if places == 6 else eighths([2, 2, 2, 2])
    check_comes_out(torch.cat([eighths(weights_p)[:, order], bonus]), eighths(weights_q)[:, order], places)
check_comes_out(eighths([1, 3], [3, 1], [2, 2]), eighths([2, 2], [2, 2]), 2)  # two drafts
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_expected"}
# ## 4. How many drafts pay
#
# Let each draft be kept with probability a, given that those before it were. A step then gives the drafts before the
# first wrong one, and one token more.
#
# **Build** `expected_tokens(a, k)`: how many tokens a step with k drafts gives on average, a float. a in [0, 1], k an
# int from 0 on. It is (1 − a^(k+1)) / (1 − a); be careful where a = 1.
#
# **Build** `best_k(a, guess_seconds, step_seconds)`: how many drafts give the most tokens per second, an int.
# `step_seconds[k]` is how long a step takes in which each request has k drafts to verify, *measured*, for k = 0, 1, 2,
# ...; the list ends at the largest k that was measured. `guess_seconds` is how long one draft takes to make, and a step
# with k drafts makes k of them, before it verifies.
#
# - k = 0, no speculation, is one of the answers, with no draft to make. Of equally good numbers it is the smallest.
# - Measured times are what they are: they need not grow with k, and any k may be the best.
#
# **Hint:** tokens per second of each k: what it gives, divided by all the time that it takes. `max` over a range gives
# the first of equals.
#
# **Trap (v of 1):** papers often take a step to be equally long for every k. In a full batch it is not.


# %% nbgrader={"grade_id": "expected_tokens", "solution": true}
def expected_tokens(a, k):
    """Tokens of a step with k drafts, of which each is kept with probability a if those before it were."""
    ### BEGIN SOLUTION
    return float(sum(a**i for i in range(k + 1)))
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_expected", "grade": true, "points": 1}
# property: a step gives 1 + a + ... + a^k tokens on average: the kept drafts and one more.
# question: How many tokens does a step give that has no draft, and one whose k drafts are always kept?
# hint: k + 1 powers of a, from a^0 on; at a = 1 the fraction has no value, and the sum is k + 1.
# explanation: a = 0.5 and k = 2. The first draft is kept with probability 0.5, both with 0.25, so on average 0.75
#   drafts are kept, and one token comes after them: 1.75. The fraction says (1 - 0.125) / 0.5 = 1.75.
def check_gives(a, k, expected):
    seen = number_of("expected_tokens", expected_tokens(a, k))
    print(f"a = {a:.4g}, k = {k}: {seen:.6g} tokens")
    assert abs(seen - expected) < 1e-9 * max(1, expected), f"a = {a}, k = {k}: expected {expected}, saw {seen}"


check_gives(0.5, 2, 1.75)
check_gives(0.8, 5, 3.68928)
check_gives(0.5, 0, 1.0)
check_gives(1.0, 4, 5.0)
check_gives(0.0, 4, 1.0)
check_gives(0.0, 0, 1.0)
drawn_numbers = rng("tokens of a step")
for k in (1, 3, random_int(10, 30, drawn_numbers), 100):
    for a in (random_number(drawn_numbers), 1e-3 * random_number(drawn_numbers), 1 - 1e-6):
        check_gives(a, k, 1 + math.fsum(a ** (i + 1) for i in range(k)))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_expected")
check_gives(1.0, 0, 1.0)
check_gives(1, 7, 8.0)
check_gives(0, 3, 1.0)
for k in (1, 2, 3, 8, random_int(10, 40, draw_numbers)):
    a = 0.05 + 0.9 * random_number(draw_numbers)
    first_wrong = [a**kept * (1 - a) for kept in range(k)] + [a**k]  # the probability that so many are kept
    check_gives(a, k, sum(chance * (kept + 1) for kept, chance in enumerate(first_wrong)))
for a in (0.99, 0.995, 0.999, 0.9999):
    check_gives(a, 12, math.fsum(a**i for i in range(13)))
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "best_k", "solution": true}
def best_k(a, guess_seconds, step_seconds):
    """The number of drafts with the most tokens per second, the smallest of equal ones; 0: none."""

    ### BEGIN SOLUTION
    def speed(k):
        return expected_tokens(a, k) / (step_seconds[k] + k * guess_seconds)

    return max(range(len(step_seconds)), key=speed)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_best_k", "grade": true, "points": 1}
# property: best_k has the most tokens per second, with the measured time of a step with k drafts and k drafts' own.
# question: For each k: how many tokens, in how many seconds? Is no draft better than all?
# hint: expected_tokens(a, k) / (step_seconds[k] + k * guess_seconds) for every k of the list, also for 0.
# explanation: a = 0.5, a draft takes 0.1 s, steps take 1.0, 1.2 and 2.0 s for k = 0, 1, 2. Tokens per second: 1 / 1.0 =
#   1; 1.5 / 1.3 = 1.15; 1.75 / 2.2 = 0.80. One draft is best; in a fuller batch, where the steps take 1.0, 1.6 and 2.2
#   s, none is.
def check_chosen(a, guess_seconds, step_seconds, expected):
    seen = int_of("best_k", unchanging(best_k)(a, guess_seconds, list(step_seconds)))
    what = f"a = {a:.4g}, {guess_seconds:.4g} s a draft, steps of {in_row(step_seconds)} s"
    speeds = [sum(a**i for i in range(k + 1)) / (v + k * guess_seconds) for k, v in enumerate(step_seconds)]
    print(f"{what}: k = {seen}; tokens per second {in_row(speeds)}")
    assert 0 <= seen < len(speeds), f"{what}: expected k = {expected}, saw {seen}"
    of = [
        f"k = {k}, {shown(speeds[k], speeds[other])} tokens per second"
        for k, other in ((expected, seen), (seen, expected))
    ]
    assert seen == expected, f"{what}: expected {of[0]}, saw {of[1]}"


check_chosen(0.5, 0.125, [1.0, 1.125, 2.0], 1)
check_chosen(0.5, 0.125, [1.0, 1.5, 2.0], 0)  # off
check_chosen(0.9, 0.0, [0.01, 0.01, 0.01, 0.01, 0.01], 4)  # drafts and verifying cost nothing
check_chosen(0.9, 0.02, [0.01, 0.01, 0.01, 0.01, 0.01], 0)  # the drafter is slower than the target
check_chosen(0.5, 0.0, [1.0, 1.5, 1.75], 0)  # all are equally good
check_chosen(0.75, 0.0, [2.0, 2.5, 4.0, 2.5, 6.0], 3)  # with a kernel for which four tokens are cheap
check_chosen(0.75, 0.5, [3.0], 0)  # nothing else was measured
drawn(check_chosen, step_times(rng("step times")))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_best_k")
check_chosen(0.0, 0.0, [1.0, 1.0, 1.0], 0)
check_chosen(1.0, 0.0, [1.0, 2.0, 3.0], 0)
check_chosen(1.0, 0.25, [1.0, 1.5, 2.0, 2.0], 3)
check_chosen(1.0, 1.0, [3.0, 3.0, 3.0, 9.0], 2)
check_chosen(0.5, 0.5, [4.0, 3.0, 6.0], 1)  # a step with a draft is faster than one without
for case in range(12):
    most, rise = random_int(1, 8, draw_numbers), (0.05, 0.3, 1.0)[case % 3]
    a, c = 0.2 + 0.8 * random_number(draw_numbers), (0, 0.02, 0.2)[case // 4] * random_number(draw_numbers)
    unit = (0.001, 1.0, 30.0)[case % 3]
    seconds = [unit]
    for _ in range(most):
        seconds.append(seconds[-1] + unit * rise * random_number(draw_numbers))
    speeds = [sum(a**i for i in range(k + 1)) / (v + k * c * unit) for k, v in enumerate(seconds)]
    check_chosen(a, c * unit, seconds, speeds.index(max(speeds)))
check_chosen(0.9, 0.01, [1.0, 1.1, 1.2, 2.5, 1.3], 4)  # slower with one draft more, and fast with two more
check_chosen(0.9, 0.01, [1.0, 2.5, 1.1, 2.5, 1.9, 1.2], 5)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_top"}
# Here are the two numbers from the top, and what `best_k` says about the step times that the formulas of notebook 08e
# give for an 8B model on one H100: 500 tokens of context, a draft model at a twentieth of a step.

# %% nbgrader={"grade_id": "top"} inferlab={"where": "notebook"}
for v in (1.2, 3.0):
    print(f"v(4) = {v}: {expected_tokens(0.8, 4) / (v + 4 * 0.1):.2f} times as fast")

from reference_impl.theory import speculative as theory
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as shape_of

h100 = Deployment(shape_of("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)
for batch in (1, 16, 64, 256):
    seconds = [theory.verify_seconds(h100, batch, 500, k) for k in range(9)]
    found = {a: best_k(a, 0.05 * seconds[0], seconds) for a in (0.5, 0.7, 0.9)}
    print(f"batch {batch:3}: the best k for each acceptance {found}")

# %% [markdown] nbgrader={"grade_id": "text_drafter"}
# ## 5. A drafter that is trained
#
# A drafter learns from text that the target has written: what it says next. The smallest one looks at one token and
# knows how often each token followed it.
#
# **Build** `train_drafter(texts, vocab_size, smoothing)`: q `[vocab_size, vocab_size]`, where `q[a][b]` is the
# probability of b after a: (how often b follows a in the texts + `smoothing`) / (the sum of these over all b).
#
# - `texts`: lists of tokens, each a text of its own: the last token of one is not followed by the first of the next.
# - `smoothing` is positive, so that every row sums to 1 and nothing is impossible.
#
# **Hint:** start from a table that is full of `smoothing`, count, then divide each row by its sum.
#
# **Trap (direction):** a is before, b after. The other way round the table drafts what came before.


# %% nbgrader={"grade_id": "train_drafter", "solution": true}
def train_drafter(texts, vocab_size, smoothing):
    """q [vocab_size, vocab_size]: row a is the distribution of the token after a."""
    ### BEGIN SOLUTION
    counts = torch.full((vocab_size, vocab_size), smoothing, dtype=torch.float64)
    for text in texts:
        for i in range(len(text) - 1):
            counts[text[i], text[i + 1]] += 1
    return counts / counts.sum(1, keepdim=True)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_drafter", "grade": true, "points": 1}
# property: row a of the drafter is the smoothed share of each token after a, within each text alone.
# question: Which pairs of neighbours does a text of three tokens have?
# hint: count pairs (text[i], text[i + 1]), add the smoothing to every entry, divide by the row's sum.
# explanation: Texts 0 1 0 and 1 1 with two tokens and smoothing 1. Pairs: 0 1, 1 0, 1 1. Row 0: [0 + 1, 1 + 1] / 3;
#   row 1: [1 + 1, 1 + 1] / 4. The 0 at the end of the first text has nothing after it.
def check_trained(texts, vocab_size, smoothing):
    answer = unchanging(train_drafter)([list(text) for text in texts], vocab_size, smoothing)
    seen = tensor_of("train_drafter", answer, (vocab_size, vocab_size))
    pairs = [(a, b) for text in texts for a, b in itertools.pairwise(text)]
    for a in range(vocab_size):
        weights = [pairs.count((a, b)) + smoothing for b in range(vocab_size)]
        expected = float64([weight / sum(weights) for weight in weights])
        shown = f"texts {texts}" if sum(map(len, texts)) < 30 else f"{len(texts)} texts"
        what = f"{shown}, smoothing {smoothing:.4g}, row {a}, which tokens come after {a}"
        if vocab_size < 4:
            print(f"{what}: {in_row(seen[a])}")
        check_close(what, seen[a], expected, 1e-6)


check_trained([[0, 1, 0], [1, 1]], 2, 1)
check_trained([[0, 1, 2, 0, 1, 1]], 3, 0.5)
check_trained([[2], [0, 2], []], 3, 0.5)
drawn_numbers = rng("texts of a drafter")
like = [
    [1, 23],
    [12, 3],
    *([x, y] for base in (10, 32, 64, 100, 128) for x, y in ((5, 6 + base), (6, 6), (6 + base, 5))),
]
more = torch.randint(140, (20, 9), generator=drawn_numbers).tolist()
check_trained([*like, *more, *like[:3]], 140, 0.1 + random_number(drawn_numbers))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_drafter")
check_trained([], 2, 1)
check_trained([[1, 1, 1, 1]], 3, 0.25)
for _ in range(4):
    vocab = random_int(2, 8, draw_numbers)
    sizes = [0, 1, 2, random_int(3, 60, draw_numbers), random_int(3, 60, draw_numbers)]
    texts = [torch.randint(vocab, (size,), generator=draw_numbers).tolist() for size in sizes]
    check_trained(texts, vocab, 0.1 + random_number(draw_numbers))
check_trained([[0, 1], [], [2, 0], [], []], 3, 0.5)
check_trained([[0] * 2100 + [1], [1] * 3], 2, 1)  # many of a kind
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_tree"}
# ## 6. A tree of drafts
#
# Several drafts for one position are right more often than one. Together they are a tree, which one pass verifies:
# draft i has a parent, the draft that it continues, or the text's end. All drafts are rows of the same batch, so the
# causal mask does not do: a draft may see the text, the drafts it continues, and itself, but no sibling.
#
# A tree is a list `parents`: `parents[i]` is the draft that draft i continues, -1 if it continues the text. A parent
# comes before its children: parents[i] < i. Siblings need not be neighbours.
#
# **Build** `tree_mask(parents)`: `[n, n]` bool (a tensor, an array, or lists of bool): entry [i][j] is True where draft
# i sees draft j. What of the text a draft sees is not in it. n is at least 1.
#
# **Build** `tree_positions(parents, num_tokens)`: for each draft the position in the text that it would have if it were
# kept: a text of `num_tokens` tokens has the positions 0 to num_tokens − 1.
#
# **Build** `walk(parents, tokens, says)`: greedy verification. `tokens[i]` is the token that draft i stands for;
# siblings have different tokens. `says[0]` is the target's own next token after the text, `says[1 + i]` the one after
# draft i. From the text's end go to the child whose token the target says, from there on to its child, as long as there
# is one. Return a pair: the drafts on that path, in order (a list, maybe empty), and the target's token after them.
#
# **Hint:** a draft sees what its parent sees, and itself; its position is one after that of its parent.
#
# **Trap (place):** drafts 1 and 2 may be siblings: both have the same position, whatever their places in the list.


# %% nbgrader={"grade_id": "tree_mask", "solution": true}
def tree_mask(parents):
    """[n, n] bool: which drafts each draft sees: itself and those it continues."""
    ### BEGIN SOLUTION
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_mask", "grade": true, "points": 1}
# property: a draft sees itself and all drafts that it continues, up to the text's end, and no other.
# question: From draft i go to its parent, and on to the parent's parent: whom do you meet?
# hint: the row of the parent, and a True on the diagonal; parents come before their children.
# explanation: parents [-1, 0, 0, 2]: drafts 1 and 2 both continue 0, and 3 continues 2. Row 3 is True at 0, 2 and 3,
#   and not at 1: its keys belong to another text. In a chain the mask is the causal one.
def check_sees(parents):
    n = len(parents)
    seen = sees_of("tree_mask", unchanging(tree_mask)(your_parents(parents)), n)
    print(f"parents {parents}" if n < 12 else f"a tree of {n} drafts")
    for i in range(n):
        expected, at = {i}, i
        while parents[at] >= 0:
            at = parents[at]
            expected.add(at)
        row = seen[i].nonzero()[:, 0].tolist()
        if n < 7:
            print(f"    draft {i} sees {row}")
        what = f"parents {parents}, row {i} of the mask, what draft {i} sees"
        assert row == sorted(expected), f"{what}: expected True at {sorted(expected)}, saw True at {row}"


check_sees([-1, 0, 0, 2])
check_sees([-1, 0, 1])  # a chain
check_sees([-1, -1, 0, 1, 1, 3])  # two that continue the text
check_sees([-1])
drawn(check_sees, ((parents,) for parents in trees(rng("trees"))))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_mask")


def random_tree(n, generator):
    return [-1] + [random_int(-1, i - 1, generator) for i in range(1, n)]


check_sees([-1, -1, -1])
check_sees([-1, 0, 1, 2, 3, 1, 5, 0])
for n in (2, 3, random_int(4, 12, draw_numbers), 40):
    check_sees(random_tree(n, draw_numbers))
check_sees([-1, 0, 1, 2, 2, 2, 4, 4])  # siblings deep in the tree
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "tree_positions", "solution": true}
def tree_positions(parents, num_tokens):
    """The position of each draft after a text of num_tokens tokens."""
    ### BEGIN SOLUTION
    positions = []
    for parent in parents:
        positions.append(num_tokens if parent < 0 else positions[parent] + 1)
    return positions
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_positions", "grade": true, "points": 1}
# property: a draft that continues the text has position num_tokens, any other the position after its parent's.
# question: If draft i is kept, how many tokens stand before it?
# hint: depth decides, not the place in the list: num_tokens for those that continue the text, parent's + 1 for others.
# explanation: A text of 10 tokens, parents [-1, 0, 0, 2]: draft 0 would be the 11th token, so position 10. Drafts 1
#   and 2 are two candidates for the same place, position 11, and draft 3 stands after draft 2 at 12.
def check_places(parents, num_tokens):
    seen = ints_of("tree_positions", unchanging(tree_positions)(your_parents(parents), num_tokens))
    expected = []
    for i in range(len(parents)):
        at, depth = i, 0
        while parents[at] >= 0:
            at, depth = parents[at], depth + 1
        expected.append(num_tokens + depth)
    print(f"parents {parents}, {num_tokens} tokens: {seen}")
    assert seen == expected, f"parents {parents}, {num_tokens} tokens: expected positions {expected}, saw {seen}"


check_places([-1, 0, 0, 2], 10)
check_places([-1, 0, 1], 7)
check_places([-1, -1, 0, 1, 1, 3], 100)
check_places([-1], 1)
drawn_numbers = rng("positions")
drawn(check_places, ((tree, n) for tree in trees(drawn_numbers) for n in (0, random_int(1, 500, drawn_numbers))))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_positions")
check_places([-1, -1, -1], 0)
for n in (2, 3, random_int(4, 12, draw_numbers), 40):
    check_places([-1] + [random_int(-1, i - 1, draw_numbers) for i in range(1, n)], random_int(1, 500, draw_numbers))
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "walk", "solution": true}
def walk(parents, tokens, says):
    """(drafts on the path that the target says, in order; its token after them)."""
    ### BEGIN SOLUTION
    at, path = -1, []
    for i, parent in enumerate(parents):
        if parent == at and tokens[i] == says[1 + at]:
            at = i
            path.append(i)
    return path, says[1 + at]
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_walk", "grade": true, "points": 1}
# property: the path goes from the text's end to the child that the target says, as far as there is one.
# question: At the draft that was reached last: what does the target say after it, and which child has this token?
# hint: says[0] at the text's end and says[1 + i] at draft i; only children of the draft that was reached count.
# explanation: parents [-1, -1, 0, 1] with tokens 5 6 7 7, and the target says 6 after the text: draft 1. After draft
#   1 it says 7: draft 3, not 2, which continues another branch. After draft 3 it says 9: there is no child, so the path
#   is [1, 3], and the step gives 6, 7 and 9.
def check_walked(parents, tokens, says, path, token):
    answer = unchanging(walk)(your_parents(parents), list(tokens), list(says))
    seen, own_token = verdict_of("walk", answer)
    seen = ints_of("walk, the path", seen)
    what = f"parents {parents}, tokens {tokens}, the target says {says}"
    print(f"{what}: path {seen}, then token {own_token}")
    assert (seen, own_token) == (path, token), (
        f"{what}: expected path {path}, then token {token}; saw {seen}, {own_token}"
    )


check_walked([-1, -1, 0, 1], [5, 6, 7, 7], [6, 7, 7, 1, 9], [1, 3], 9)
check_walked([-1, 0, 1], [5, 6, 7], [5, 6, 7, 8], [0, 1, 2], 8)  # a chain, all right
check_walked([-1, 0, 1], [5, 6, 7], [5, 1, 7, 8], [0], 1)  # the second is wrong
check_walked([-1, 0, 1], [5, 6, 7], [2, 6, 7, 8], [], 2)
check_walked([-1, 0, -1, 2], [5, 6, 3, 6], [3, 6, 1, 6, 0], [2, 3], 0)
drawn(check_walked, walks(rng("walks")))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_walk")
check_walked([-1], [0], [0, 0], [0], 0)
check_walked([-1], [1], [0, 5], [], 0)
check_walked([-1, 0, 0], [4, 4, 5], [4, 4, 4, 4], [0, 1], 4)  # the same token on every level
check_walked([-1, 0, -1, 0, 3], [4, 6, 5, 5, 4], [4, 5, 9, 9, 4, 4], [0, 3, 4], 4)
for n in (3, 6, 12, 12, 30, 30):
    parents = [-1] + [random_int(-1, i - 1, draw_numbers) for i in range(1, n)]
    tokens, says = [], [0] * (n + 1)
    for i, parent in enumerate(parents):
        taken = [tokens[j] for j in range(i) if parents[j] == parent]
        tokens.append(next(t for t in range(n + 1) if t not in taken))
    target = random_int(0, n - 1, draw_numbers)  # the path to this draft
    path, at = [], target
    while at >= 0:
        path, at = [at, *path], parents[at]
    says = [random_int(0, 3, draw_numbers) for _ in range(n + 1)]
    for before, i in itertools.pairwise([-1, *path]):
        says[1 + before] = tokens[i]
    says[1 + target] = 99
    check_walked(parents, tokens, says, path, 99)
check_walked([-1, 0, 1, 2, 1, 0, 1], [5, 6, 7, 8, 9, 9, 4], [5, 6, 9, 0, 0, 3, 0, 1], [0, 1, 4], 3)  # a child far on
check_walked([-1, 0, 1, 2, 1, 0, 1], [5, 6, 7, 8, 9, 9, 4], [5, 6, 4, 0, 0, 3, 0, 1], [0, 1, 6], 1)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_roll_back"}
# ## 7. Roll-back
#
# Before a step, blocks are reserved for all drafts. After the step, only the keys and values of the text's tokens
# count; those of rejected drafts are never read, and the next step writes over them. Blocks in which nothing counts go
# back, so that other requests can have them. (This course's engine keeps them, since the request soon grows into them: you
# build the thriftier form.)
#
# **Build** `roll_back(table, num_tokens, block_size, holders)`: `table` is the list of the request's block numbers, in
# order: entry i has the positions from i × block_size on. `num_tokens` is how many tokens count after the step, from
# position 0 on; the table has at least as many slots. `holders[b]` is how many requests hold block b, this one
# included: samples of one prompt share blocks. Return a pair: the table that the request keeps, and the list of blocks
# that are free now, in any order.
#
# - A block stays as long as one of its slots counts, even if the others do not.
# - A block that leaves the table while another request holds it is not free.
#
# **Hint:** how many blocks do num_tokens tokens need? Round up.
#
# **Trap (partial):** the last block that counts is rarely full. Rounded down, the text loses its end.


# %% nbgrader={"grade_id": "roll_back", "solution": true}
def roll_back(table, num_tokens, block_size, holders):
    """(the blocks that the request keeps, the blocks that are free now)."""
    ### BEGIN SOLUTION
    num_blocks = -(-num_tokens // block_size)
    return table[:num_blocks], [block for block in table[num_blocks:] if holders[block] == 1]
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_roll_back", "grade": true, "points": 1}
# property: a block stays while one of its slots counts; of the others those are free that no other request holds.
# question: Which is the last position that counts, and in which block does it lie?
# hint: num_tokens / block_size, rounded up, blocks stay, from the front; after them holders decides.
# explanation: Blocks of 4 tokens, table [7, 2, 9], 5 tokens count: positions 0 to 4, so blocks 7 and 2 stay, 2 with one
#   slot that counts. Block 9 leaves; if this request alone held it, it is free. With 4 tokens 2 leaves as well, and
#   with none all do.
def check_rolled(table, num_tokens, block_size, holders=None):
    holders = dict.fromkeys(table, 1) | (holders or {})
    answer = unchanging(roll_back)(list(table), num_tokens, block_size, dict(holders))
    what = f"table {table}, {num_tokens} tokens count, blocks of {block_size}"
    shared = {block: n for block, n in holders.items() if n > 1}
    what += f", shared {shared}" if shared else ""
    counts = [block for i, block in enumerate(table) if i * block_size < num_tokens]
    kept, freed = rolled_of(what, answer, len(counts) * block_size - num_tokens)
    print(f"{what}: keeps {kept}, frees {freed}")
    assert kept == counts, f"{what}: expected the table {counts}, saw {kept}"
    free = sorted(block for block in table if block not in counts and holders[block] == 1)
    assert sorted(freed) == free, f"{what}: expected {free} to be free, saw {freed}"


check_rolled([7, 2, 9], 5, 4)
check_rolled([7, 2, 9], 4, 4)
check_rolled([7, 2, 9], 8, 4)
check_rolled([7, 2, 9], 9, 4)  # all stay
check_rolled([7, 2, 9], 12, 4)
check_rolled([7, 0, 9, 3], 3, 4, {7: 3, 9: 2})  # another sample holds 9
check_rolled([5, 6], 0, 16)
check_rolled([], 0, 16)
drawn_numbers = rng("tables")
for block_size in (1, 16, random_int(2, 9, drawn_numbers), 128, 1000):
    table = torch.randperm(400, generator=drawn_numbers)[: random_int(30, 40, drawn_numbers)].tolist()
    for num_tokens in (0, 1, block_size, 9 * block_size + 1, 20 * block_size - 1, len(table) * block_size):
        check_rolled(table, num_tokens, block_size, {block: random_int(1, 5, drawn_numbers) for block in table})
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_roll_back")
for block_size in (1, 2, 16, random_int(3, 9, draw_numbers)):
    n = random_int(3, 8, draw_numbers)
    table = torch.randperm(40, generator=draw_numbers)[:n].tolist()
    for num_tokens in {
        0,
        1,
        block_size - 1,
        block_size,
        block_size + 1,
        2 * block_size,
        n * block_size - 1,
        n * block_size,
    }:
        holders = {block: random_int(1, 3, draw_numbers) for block in table}
        check_rolled(table, num_tokens, block_size)
        check_rolled(table, num_tokens, block_size, holders)
        check_rolled(table, num_tokens, block_size, dict.fromkeys(table, 2))
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_coupled"}
# ## 8. Coupled sampling
#
# `verify` keeps the distribution, but which text is drawn depends on how many drafts there were. A request with a seed
# is promised its text. So let each position have random numbers of its own, its *noise*, and let the target choose with
# them as it does without speculation. A draft is kept if it is what the target chooses there. If the draft model chooses its
# draft by the same noise, alike distributions mostly give the same token.
#
# **Build** `gumbel_token(p, u)`: a token from a distribution p `[vocab]`, by noise for every token: u `[vocab]`, each in
# (0, 1), float64 tensors. It is the token with the largest log p − log(−log u): the *Gumbel-max* way to draw. A token
# with p = 0 is never chosen. No two are equal here.
#
# **Build** `verify_coupled(p, drafts, noise, choose)`: p `[k + 1, vocab]`, as in part 3; `drafts` k tokens; `noise[i]` is
# that of row i's position, a list of k + 1. `choose(row, noise)` gives the token that the target chooses from a row of p.
# Return a pair, as `verify` does: how many drafts are kept, and the token after them.
#
# - A draft is kept if it is the chosen token of its row, and all before it were kept. The token after them is what is
#   chosen at the next row, so that the text is that of plain decoding.
# - Call `choose` for no row after that.
# - What the noise is, you need not know: it is for `choose`. With `gumbel_token` as `choose` it is `[vocab]` numbers a
#   position; with `draw`, which part 10 passes, it is one number. So call `choose` and no function of your own. q is not
#   needed: how a draft was made does not matter.
#
# **Hint:** log p is −inf where p is 0, and −inf plus any noise is never the largest: nothing needs clamping.
#
# **Trap (chosen twice):** at a rejected draft the token has been chosen already. It is given out as it is; a new one from
# the residual, or with other noise, would be a different text.


# %% nbgrader={"grade_id": "gumbel_token", "solution": true}
def gumbel_token(p, u):
    """The token with the largest log p - log(-log u). p, u [vocab]."""
    ### BEGIN SOLUTION
    return int((p.log() - (-u.log()).log()).argmax())
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_gumbel", "grade": true, "points": 1}
# property: the token is that with the largest log p - log(-log u), never one with p = 0; so tokens come as p says.
# question: With equal p for all tokens: does a u near 1 make a token more or less likely to be chosen?
# hint: two minus signs and two logarithms of u; then argmax over all tokens.
# explanation: p = [0.5, 0.5], u = [0.9, 0.1]. log u is -0.105 and -2.303; -log(-log u) is 2.25 and -0.83. Both have the
#   same log p, so token 0. The larger u wins among equals; a token with more p needs less of it: it wins where u^(1/p)
#   is largest.
def check_gumbel_of(p, u, expected):
    seen = int_of("gumbel_token", unchanging(gumbel_token)(p.clone(), u.clone()))
    what = f"p {in_row(p[:8])}, u {in_row(u[:8])}" if len(p) < 9 else f"{len(p)} tokens"
    print(f"{what}: token {seen}")
    assert 0 <= seen < len(p), f"{what}: expected a token from 0 to {len(p) - 1}, saw {seen}"
    of = [f"{token} with p {shown(p[token])}, u {shown(u[token])}" for token in (expected, seen)]
    assert seen == expected, f"{what}: expected token {of[0]}, saw token {of[1]}"


check_gumbel_of(float64([0.5, 0.5]), float64([0.9, 0.1]), 0)
check_gumbel_of(float64([0.8, 0.2]), float64([0.5, 0.7]), 0)
check_gumbel_of(float64([0.8, 0.2]), float64([0.3, 0.9]), 1)
check_gumbel_of(float64([0.0, 0.5, 0.5]), float64([0.999999, 0.2, 0.1]), 1)  # p is 0: never
check_gumbel_of(float64([1.0]), float64([0.5]), 0)
drawn(check_gumbel_of, noises(rng("noises")))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_gumbel")
for vocab in (2, 5, 50, 5000):
    for zeros in (False, True):
        for _ in range(4):
            p = random_rows(1, vocab, draw_numbers, zeros)[0]
            u = torch.rand(vocab, dtype=torch.float64, generator=draw_numbers).clamp(1e-12, 1 - 1e-12)
            scores = torch.where(p > 0, u.log() / p.clamp(min=1e-300), -torch.inf)  # log u / p: the same order
            check_gumbel_of(p, u, int(scores.argmax()))
p = eighths([1, 4, 0, 3])[0]
numbers = torch.rand(600, 4, dtype=torch.float64, generator=rng("gumbel shares")).clamp(1e-9, 1 - 1e-9)
seen = [int_of("gumbel_token", unchanging(gumbel_token)(p, u)) for u in numbers]
wins = [int((u.log() / p).argmax()) for u in numbers]
assert seen == wins, f"of 600 draws {sum(a != b for a, b in zip(seen, wins, strict=True))} are wrong"
p, u = torch.zeros(100, dtype=torch.float64), torch.full((100,), 1 - 2.0**-53, dtype=torch.float64)
p[[40, 60]], u[[40, 60]] = 0.5, float64([1e-9, 1e-12])
check_gumbel_of(p, u, 40)  # p is 0 for 98 tokens with the largest noise there is
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "verify_coupled", "solution": true}
def verify_coupled(p, drafts, noise, choose):
    """(how many drafts are kept, the token after them): those of plain decoding with the same noise."""
    ### BEGIN SOLUTION
    for i, draft in enumerate(drafts):
        token = choose(p[i], noise[i])
        if token != draft:
            return i, token
    return len(drafts), choose(p[len(drafts)], noise[len(drafts)])
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_coupled", "grade": true, "points": 1}
# property: drafts are kept as long as they are what is chosen with their position's noise; then comes the next choice.
# question: What does plain decoding choose at each of these positions, and where does the first draft differ from it?
# hint: choose(p[i], noise[i]) once for each row, in order, until it is not the draft; give that choice out.
# explanation: The target chooses 4, 7, 2 at three positions. Drafts 4, 9: the first is kept, and 7 comes after it; what
#   is chosen at the third row, after a wrong draft, means nothing. Drafts 4, 7: both are kept, and 2 comes. Either way
#   the text begins 4, 7.
class Chooser:
    """Chooses with the noise that it is given, and records it. choices: {noise: token}; -1 for any other noise."""

    def __init__(self, p, choices):
        self.p, self.choices, self.asked = p.clone(), choices, []

    def choose(self, row, noise):
        number = int_of("the noise", noise)
        self.asked.append(number)
        values = tensor_of("choose, its row", row, self.p[0].shape)
        call, num_rows = len(self.asked), len(self.p)
        assert call <= num_rows, f"choose: expected at most {num_rows} calls, one for each row of p, saw {call}"
        right, expected = torch.equal(values, self.p[call - 1]), in_row(self.p[call - 1])
        assert right, f"choose, call {call}: expected row {call - 1} of p, {expected}, saw {in_row(values)}"
        return self.choices.get(number, -1)


def check_coupled_of(choices, drafts):
    """choices: what plain decoding chooses at each of the k + 1 positions."""
    k, noise = len(drafts), [100 + 7 * i for i in range(len(drafts) + 1)]
    p = eighths(*([1 + i, 7 - i] for i in range(k + 1)))
    chooser = Chooser(p, dict(zip(noise, choices, strict=True)))
    answer = unchanging(verify_coupled)(p, list(drafts), list(noise), chooser.choose)
    kept, token = verdict_of("verify_coupled", answer)
    kept = int_of("verify_coupled, how many are kept", kept)
    expected = next((i for i in range(k) if drafts[i] != choices[i]), k)
    what = f"with the noise {noise} the target chooses {choices}, drafts {drafts}"
    print(f"{what}: {kept} kept, then {token}")
    asked = noise[: expected + 1]
    assert chooser.asked == asked, f"{what}: expected calls of choose with the noise {asked}, saw {chooser.asked}"
    seen, right = (kept, token), (expected, choices[expected])
    assert seen == right, f"{what}: expected {right[0]} kept, then {right[1]}, saw {kept} kept, then {token}"


check_coupled_of([4, 7, 2], [4, 9])
check_coupled_of([4, 7, 2], [4, 7])
check_coupled_of([4, 7, 2], [9, 7])
check_coupled_of([3], [])
drawn_numbers = rng("choices")
for k in (1, 2, 4, 9, 20):
    choices = [random_int(0, 50, drawn_numbers) for _ in range(k + 1)]
    for wrong in (0, k // 2, k - 1, k):
        check_coupled_of(choices, [choice + (i == wrong) for i, choice in enumerate(choices[:k])])
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_coupled")
check_coupled_of([0, 0], [0])
check_coupled_of([0, 0], [1])
for k in (1, 2, 3, 6):
    for right in range(k + 1):
        choices = [random_int(0, 50, draw_numbers) for _ in range(k + 1)]
        drafts = [choice if i != right else choice + 1 for i, choice in enumerate(choices[:k])]
        check_coupled_of(choices, drafts)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_gives_up"}
# What does the promise of a text cost? p and q as in notebook 08b, k = 1. Rejection keeps Σ min(p, q) of the drafts, and no
# rule by which the tokens come as p says keeps more. With shared noise as many are kept as both choose alike, where the
# draft model, too, chooses with the noise of the position. Gumbel noise is a number for every token. "One number" is one for the
# whole position, with which each takes the token that `draw` gives: then both choose alike where their parts of (0, 1) for
# the same token overlap, and that depends on the order in which the vocabulary lists its tokens. It is counted for two
# orders: in one it keeps more than Gumbel noise, in the other less. Gumbel noise does not depend on the order.

# %% nbgrader={"grade_id": "gives_up"} inferlab={"where": "notebook"}
generator = torch.Generator().manual_seed(0)
p, q = float64([0.5, 0.3, 0.2]), float64([0.6, 0.1, 0.3])
noise = torch.rand(4000, 3, dtype=torch.float64, generator=generator)
alike = sum(gumbel_token(p, u) == gumbel_token(q, u) for u in noise) / len(noise)
print(f"rejection keeps {float(torch.minimum(p, q).sum()):.0%}, Gumbel noise {alike:.0%} of 4,000 drafts")
for order in ([0, 1, 2], [1, 0, 2]):
    one = sum(draw(p[order], u) == draw(q[order], u) for u in noise[:, 0]) / len(noise)
    print(f"one number, tokens in the order {order}: {one:.0%}")

# %% [markdown] nbgrader={"grade_id": "text_loop"}
# ## 9. The loop
#
# **Build** `speculate(prompt, num_tokens, k, propose, judge)`: the list of `num_tokens` tokens that follow `prompt`.
#
# - `propose(tokens, n)` gives at most n drafts of what follows `tokens`, a list, maybe empty.
# - `judge(tokens, drafts)` is one pass of the target: it gives a pair as `verify` does: how many drafts are kept, and the
#   token after them.
# - A round has at most k drafts, and never more than can be of use: with r tokens still to come, at most r − 1, because
#   one token comes after the drafts anyway. So exactly `num_tokens` tokens come out, and none is computed in vain.
# - Ask for as many drafts as that allows, with the whole text so far. Where it allows none, `judge` gets an empty list.
#   `propose` need not be asked then.
# - `judge` is called once a round. `num_tokens` may be 0: then there is no round.
#
# **Hint:** `while` there are tokens to come: propose, judge, append the kept drafts and the token.
#
# **Trap (dropped):** drafts after the kept ones are not part of the text.


# %% nbgrader={"grade_id": "speculate", "solution": true}
def speculate(prompt, num_tokens, k, propose, judge):
    """The num_tokens tokens after prompt, in rounds of at most k drafts."""
    ### BEGIN SOLUTION
    tokens, end = list(prompt), len(prompt) + num_tokens
    while len(tokens) < end:
        drafts = list(propose(list(tokens), min(k, end - len(tokens) - 1)))
        kept, token = judge(list(tokens), drafts)
        tokens += [*drafts[:kept], token]
    return tokens[len(prompt) :]
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_loop", "grade": true, "points": 1}
# property: the text is that of plain decoding for every k and drafter, in as few rounds as the kept drafts allow.
# question: With three tokens still to come, how many drafts can be of use?
# hint: min(k, tokens to come - 1) drafts; append drafts[:kept] and the token; the next round sees the longer text.
# explanation: Five tokens to come and k = 4: a round that keeps all of four drafts gives five tokens and is the last.
#   With three to come only two drafts are asked for. A round with no kept draft gives one token, so nothing ever hangs.
class Target:
    """A target whose text is known, and a drafter of it. It records each round; right(i): is the draft at i right?"""

    def __init__(self, prompt, text, k, right, shorter=0):
        self.prompt, self.text, self.k, self.right = list(prompt), list(text), k, right
        self.shorter, self.rounds, self.wrong = shorter, 0, ""

    def allowed(self, tokens):
        return min(self.k, len(self.prompt) + len(self.text) - len(tokens) - 1)

    def refuse(self, problem):
        self.wrong = self.wrong or problem
        raise ValueError(self.wrong)

    def read(self, call, tokens, other):
        """The text so far, from the arguments of a call of judge or propose."""
        want = {"judge": "the text so far, then the drafts", "propose": "the text so far, then how many drafts"}[call]
        many = [isinstance(given, list | tuple | torch.Tensor | np.ndarray) for given in (tokens, other)]
        if many != [True, call == "judge"] or other is None:
            saw = ", ".join("none" if given is None else f"{given!r:.60}" for given in (tokens, other))
            self.refuse(f"{call}: expected two arguments, {want}, saw {saw}")
        tokens, done = ints_of(f"{call}, the text", tokens), len(tokens) - len(self.prompt)
        if tokens == self.prompt + self.text:
            self.refuse(f"{call}: expected no call once all {len(self.text)} tokens have come, saw one")
        if 0 <= done < len(self.text) and tokens == self.prompt + self.text[:done]:
            return tokens
        return self.refuse(
            f"{call}: expected two arguments, {want}, so first the prompt and what was given out after it, saw a first "
            f"argument of {len(tokens)} tokens, the last of them {tokens[-8:]}"
        )

    def propose(self, tokens=None, n=None):
        tokens = self.read("propose", tokens, n)
        done, allowed = len(tokens) - len(self.prompt), self.allowed(tokens)
        if n != allowed:
            self.wrong = (
                self.wrong or f"{len(self.text) - done} tokens to come, k = {self.k}: {n} drafts were asked for"
            )
        ahead = self.text[done : done + max(0, min(n, allowed) - self.shorter)]
        return [token if self.right(done + i) else token + 1 for i, token in enumerate(ahead)]

    def judge(self, tokens=None, drafts=None):
        self.rounds += 1
        tokens, drafts = self.read("judge", tokens, drafts), ints_of("judge, the drafts", drafts)
        if self.rounds > len(self.text):
            self.refuse(
                f"{self.rounds} rounds for {len(self.text)} tokens: does each round append the token after the kept "
                "drafts, also when all were kept?"
            )
        done = len(tokens) - len(self.prompt)
        if drafts and len(drafts) > self.allowed(tokens) and tokens[-len(drafts) :] == drafts:
            self.refuse(f"judge: expected the text so far without the drafts {drafts}, saw one that ends with them")
        if len(drafts) > self.allowed(tokens):
            self.wrong = self.wrong or f"{len(drafts)} drafts in a round that can use {self.allowed(tokens)}"
        kept = 0
        while kept < len(drafts) and done + kept < len(self.text) and drafts[kept] == self.text[done + kept]:
            kept += 1
        return verdict(kept, self.text[min(done + kept, len(self.text) - 1)])


def rounds_of(num_tokens, k, right, shorter):
    done = rounds = 0
    while done < num_tokens:
        drafts = max(0, min(k, num_tokens - done - 1) - shorter)
        done += 1 + next((i for i in range(drafts) if not right(done + i)), drafts)
        rounds += 1
    return rounds


def check_loop_of(prompt, text, k, right, what, shorter=0):
    target = Target(prompt, text, k, right, shorter)
    what = f"{len(text)} tokens, k = {k}, {what}"
    try:
        answer = unchanging(speculate)(list(prompt), len(text), k, target.propose, target.judge)
    except ValueError:  # also what the target said of its arguments
        assert not target.wrong, f"{what}: {target.wrong}"
        raise
    assert not target.wrong, f"{what}: {target.wrong}"
    seen = ints_of("speculate", answer)
    print(f"{what}: {target.rounds} rounds")
    assert seen == list(text), f"{what}: expected {list(text)}, saw {seen}"
    expected = rounds_of(len(text), k, right, shorter)
    assert target.rounds == expected, f"{what}: expected {expected} rounds, saw {target.rounds}"


check_loop_of([1, 2], [3, 4, 5, 6, 7], 4, lambda i: True, "all drafts right")
check_loop_of([1, 2], [3, 4, 5, 6, 7], 4, lambda i: False, "all wrong")
check_loop_of([1, 2], [3, 4, 5, 6, 7, 8, 9], 3, lambda i: i % 3 != 1, "each third wrong")
check_loop_of([1, 2], [3, 4, 5], 0, lambda i: True, "no drafts")
check_loop_of([1], [], 4, lambda i: True, "nothing to come")
check_loop_of([1], [5, 5, 5, 5], 2, lambda i: True, "fewer drafts than asked for", shorter=1)
drawn_numbers = rng("loops")
for k in (1, 4, 20):
    prompt, text = fresh(300, drawn_numbers), fresh(random_int(100, 130, drawn_numbers), drawn_numbers)
    check_loop_of(prompt, text, k, lambda i, k=k: i % (k + 2) != k, "wrong now and then")
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_loop")
check_loop_of([1], [0], 3, lambda i: True, "one token")
check_loop_of([], [4, 0], 3, lambda i: True, "an empty prompt")
check_loop_of([1], [7, 8, 9] * 3, 6, lambda i: False, "fewer drafts than asked for, all wrong", shorter=1)
for k in (1, 2, 5, 9):
    prompt = [random_int(0, 50, draw_numbers) for _ in range(random_int(1, 9, draw_numbers))]
    text = [random_int(0, 50, draw_numbers) for _ in range(random_int(5, 25, draw_numbers))]
    flags = [random_int(0, 3, draw_numbers) > 0 for _ in text]
    check_loop_of(prompt, text, k, lambda i, flags=flags: flags[i], "some right")
    check_loop_of(prompt, text, k, lambda i: True, "fewer drafts than asked for", shorter=2)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_engine"}
# ## 10. Inside the engine
#
# The engine plans a step with drafts, computes all their positions at once, and asks who is right. The cells below let
# your functions answer: `propose_ngram` drafts, or a small model of the course does; `verify` judges the drafts of
# requests without a seed, and `verify_coupled` those of requests with one, with the engine's own numbers and its own
# filtered distributions. A greedy request is one whose p is 1 at the largest logit.
#
# The engine's own rule judges the same drafts with the same numbers. At the first difference the message says which
# function gave it. Greedy texts, and texts of a seed, must be those of plain decoding, token for token.
#
# There is nothing to build in this part: the two checks need `propose_ngram` (called with n from 3 down to 1), `verify`
# with the `residual` that it calls, and `verify_coupled` (called with `draw` as `choose`, and one number a position). If
# one fails, mend that function in its own part. The loop is the engine's own here: `speculate`, `gumbel_token` and the
# functions of parts 4 to 7 are not called.


# %% nbgrader={"grade_id": "engine_parts"}
from reference_impl.assembly.lab_parts import LabEngine, Speculation, course_llm, drafted_by, speculating

encode = course_llm().encode  # loads both models, once for all the cells below
course_llm("draft")


def your_verdict(asked):
    """What your verify or verify_coupled says of a round of drafts, compared with the engine's own rule."""
    p, drafts, name = asked.p, list(asked.drafts), "verify_coupled" if asked.seeded else "verify"
    if asked.seeded:
        answer = unchanging(verify_coupled)(p.clone(), drafts, list(asked.u), draw)
    else:
        answer = unchanging(verify)(p.clone(), asked.q.clone(), drafts, Numbers(asked.u).uniform)
    kept, token = verdict_of(name, answer)
    seen = int_of(f"{name}, how many are kept", kept), token
    chances = [f"{float(p[i, x]):.3g}/{float(asked.q[i, x]):.3g}" for i, x in enumerate(drafts)]
    assert seen == asked.expected, (
        f"{name}: drafts {drafts} with p/q {', '.join(chances)}, u {in_row(asked.u)}: the engine's own rule keeps "
        f"{asked.expected[0]} and gives token {asked.expected[1]}; {name} keeps {seen[0]} and gives {seen[1]}"
    )
    return asked.expected


def your_guesses(request, k):
    """What your propose_ngram drafts, at most k tokens, which were not drawn."""
    return guesses_of("propose_ngram", unchanging(propose_ngram)(list(request.tokens), k, 3, 1))[:k], None


def write(prompt, settings, num_tokens, seed, k=0, drafter=None):
    """(what the engine with this seed generates for each of the settings, the rounds of drafts)."""
    options, part = {"num_blocks": 64, "seed": seed}, Speculation(drafter, your_verdict)
    engine = speculating(course_llm(), options, k, part) if k else LabEngine(course_llm(), options)
    for setting in settings:
        engine.add(prompt, num_tokens, **setting)
    return list(engine.run().values()), part.rounds


def is_promised(setting):
    """Whether a request with these settings has one text, with drafts and without."""
    return setting.get("temperature", 0) == 0 or "seed" in setting


def check_written(prompt, settings, num_tokens, k, drafter, what, seed=5):
    """Generates for each of the settings with at most k drafts a step; the texts that are promised also without.
    Returns how many drafts were kept."""
    promised = [setting for setting in settings if is_promised(setting)]
    plain, _ = write(prompt, promised, num_tokens, seed)
    seen, rounds = write(prompt, settings, num_tokens, seed, k, drafter)
    num_kept = sum(kept for _, kept in rounds)
    print(f"{what}, k = {k}: {len(rounds)} rounds with drafts, {num_kept} of {sum(n for n, _ in rounds)} kept")
    texts = [text for text, setting in zip(seen, settings, strict=True) if is_promised(setting)]
    for text, own, setting in zip(texts, plain, promised, strict=True):
        assert text == own, f"{setting}, k = {k}: plain decoding gives {own}, with drafts {text}"
    return num_kept


def greedy_seeded_and_not(seed, other):
    """Settings of seven requests: a greedy one, two with a seed, and four without one, half of them with a filter."""
    seeded = {"temperature": 0.8, "seed": seed}, {"temperature": 1.2, "seed": other}
    filtered = {"temperature": 0.8, "top_k": 20}, {"temperature": 1.2, "top_p": 0.9}
    return [{}, *seeded, *filtered, {"temperature": 1.2}, {"temperature": 1.2}]


REPEATS = "def area(a, b):\n    return a * b\n\ndef area(a, b):\n    return a * b\n\ndef area("


# %% nbgrader={"grade_id": "check_engine_copied", "grade": true, "points": 1}
# property: with drafts that your propose_ngram copies, your verdicts are those of the engine, and promised texts stay.
# question: Which function does the message name, and what are p and q at its drafts?
# hint: the message names the function that gave the first wrong answer; make that part's own checks pass first.
# explanation: A copied draft was not drawn, so q is 1 there: it is kept with probability p(x), and replaced by a draw
#   from p without x. For a greedy request p is 1 at one token. All three kinds of request run in one batch, each with its
#   own filters.
# Seeds with which drafts are kept and dropped at every place.
num_kept = check_written(encode(REPEATS), greedy_seeded_and_not(4, 36), 7, 4, your_guesses, "copied drafts", 78)
assert num_kept, "no copied draft was kept"
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_engine_copied")
words = ["self.items", "for item in items:\n    total += item\n", "x = x + 1\n"]
prompt = encode(words[random_int(0, 2, draw_numbers)] * 4)
settings = [{}, *({"temperature": 0.5 + random_number(draw_numbers), **more} for more in (
    {"seed": random_int(0, 10**6, draw_numbers)}, {}, {"top_k": random_int(2, 40, draw_numbers)}))]  # fmt: skip
check_written(prompt, settings, 7, 3, your_guesses, "copied drafts")
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_engine_drafted", "grade": true, "points": 1}
# property: with drafts that a draft model draws, your verdicts are those of the engine, and promised texts stay.
# question: Which function does the message name, and what are p and q at its drafts?
# hint: the message names the function that gave the first wrong answer; make that part's own checks pass first.
# explanation: Here the drafts are drawn from the draft model's q, filtered as the request says, so p and q both have many
#   zeros. Where the target forbids a draft, p is 0 there, and it is never kept. A request with a seed is judged by the
#   numbers of its positions, and q does not matter.
prompt = encode("class Stack:\n    def push(self, item):\n")
drafter = drafted_by(course_llm("draft"))
num_kept = check_written(prompt, greedy_seeded_and_not(14, 45), 5, 4, drafter, "a draft model", 16)
assert num_kept, "no draft of the draft model was kept"
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_engine_drafted")
settings = [{}, *({"temperature": 0.5 + random_number(draw_numbers), **more} for more in (
    {"seed": random_int(0, 10**6, draw_numbers)}, {}, {"top_p": 0.7 + 0.3 * random_number(draw_numbers)}))]  # fmt: skip
prompt = encode("def is_even(number):\n    return ")
check_written(prompt, settings, 5, 3, drafted_by(course_llm("draft")), "a draft model")
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_measure"}
# ## 11. What pays on this machine
#
# v(k), measured here: a step of one request and of 16, with drafts that are always the last token again, so that only
# verifying takes time. `best_k` says how many drafts pay at which acceptance, if drafts are copied and cost nothing.
# The seconds depend on this machine and are not checked.

# %% nbgrader={"grade_id": "measure"} inferlab={"where": "notebook"}
import statistics


def step_seconds(batch, k):
    """The median time of a step in which each of `batch` requests has k drafts."""
    part = Speculation(lambda request, n: ([request.tokens[-1]] * n, None), lambda asked: asked.expected)
    engine = speculating(course_llm(), {"num_blocks": 256, "max_num_seqs": 16}, k, part)
    for _ in range(batch):
        engine.add(course_llm().encode("def add(a, b):\n    return "), 16)
    engine.run()
    return statistics.median(step.finished_at - step.started_at for step in list(engine.trace.steps())[2:10])


for batch in (1, 16):
    seconds = [step_seconds(batch, k) for k in range(5)]
    v = ", ".join(f"{second / seconds[0]:.2f}" for second in seconds)
    print(f"batch {batch}: v(0) to v(4) {v}; best k {[(a, best_k(a, 0, seconds)) for a in (0.3, 0.6, 0.9)]}")

# %% [markdown] nbgrader={"grade_id": "text_milestone"}
# ## 12. Your verifier serves a text
#
# Your `propose_ngram` drafts, your `verify` says what stays, and the engine serves the text in fewer steps than it has
# tokens. With all checks passed, `inferlab lab check` shows this, too.
#
# The last two lines count. A step computes one position for each token that the request had before it and that was not
# computed yet: first the whole prompt, then only the newest token. The drafts are positions beside these. A draft that
# is kept is not computed again, so the text has more new tokens than steps; a draft that is dropped was computed in vain.

# %% nbgrader={"grade_id": "milestone"} inferlab={"where": "milestone"}
from reference_impl.assembly.lab_parts import show_served

part = Speculation(your_guesses, your_verdict)
engine = speculating(course_llm(), {"num_blocks": 64, "seed": 5}, 4, part)
engine.add(course_llm().encode(REPEATS), 24)
engine.run()
show_served("Your drafter and your verifier just served this text", engine, course_llm())
print(f"{sum(n for n, _ in part.rounds)} drafts, of which you kept {sum(kept for _, kept in part.rounds)}.")

# %% [markdown] nbgrader={"grade_id": "extensions"}
# ## Further (not graded)
#
# Add cells below and try one.
#
# - **An index.** Your `propose_ngram` looks through the whole text in every round. Keep a dict from each n-gram to where
#   it ended last, as the engine's own does. How long may a text be before the difference shows?
# - **A trained drafter in the engine.** Count `train_drafter` on texts that the course model has written, restricted to
#   the tokens that occur there, and let `Speculation` draw from it: its `draft` returns the drafts and their rows of q.
#   How often are they kept, compared with the draft model's?
# - **Sampled trees.** Several candidates for a position, drawn from q without replacement: try them in order, with p
#   replaced by the residual after each. Count on a vocabulary of three that p comes out.
# - **Adapt.** Measure a for each request while it runs, and choose k with `best_k` in every round.
