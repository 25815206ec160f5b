# %% [markdown] nbgrader={"grade_id": "intro"}
# # Lab 02: a KV cache
#
# A prompt has 200 tokens and the model writes 500 more. Without a cache, how many tokens go through the model's
# linear layers in all? With one? Write both guesses down; a cell below computes them.
#
# You build, in this order: generation without a cache, the cache, attention over it, one step of a layer, generation
# with the cache, a batch of unequal rows, and the memory budget. At the end your parts run inside the engine and serve
# text.
#
# - Each part has a text, a cell for your code, and checks. Run a check as often as you like.
# - Grading draws other inputs of the same kinds. A check that passes here for the right reason passes there.
# - Tensors, lists and dicts that your functions are given belong to the caller: do not modify them. (Only
#   `attend_batch` writes, into the two caches that it is given.)
# - Everything is float32 on the CPU. Use `torch`, `numpy` and the standard library: nothing else is available when your
#   cells are graded, neither engine nor grader.
#
# 20 points.

# %% nbgrader={"grade_id": "imports"} inferlab={"where": "both"}
import math

import torch

# %% nbgrader={"grade_id": "tools"}
# Given: helpers of the checks. You may read them, but do not change them.
import hashlib
import numbers

import numpy

from grader.checks import drawn, lent, rng, seed, unchanging


class CountingModel:
    """A stand-in for a model with its own KV cache. It counts the tokens and pairs it computes.

    forward(tokens, start): computes `tokens` at positions start, start + 1, ... and returns the logits [vocab] after
    the last of them. They depend on every token so far. start 0 clears the cache; any other start must be the number of
    tokens cached so far.
    """

    def __init__(self, key, vocab=64):
        self.key, self.vocab = key, vocab
        self.cached = []
        self.log = []  # (first position, number of tokens) of every call

    def forward(self, tokens, start):
        if not isinstance(tokens, list | tuple | torch.Tensor) or len(tokens) == 0:
            raise ValueError(f"the model was called without a list of token ids: {short(tokens)}")
        tokens = [int(token) for token in tokens]
        if not isinstance(start, numbers.Integral | torch.Tensor):
            raise ValueError(f"model(tokens, start): start is an int, saw {short(start)}")
        start = int(start)
        self.log.append((start, len(tokens)))
        if start == 0:
            self.cached = []
        if start != len(self.cached):
            raise ValueError(f"the model was called at position {start}, but {len(self.cached)} tokens are cached")
        self.cached = self.cached + tokens
        return self.logits(self.cached)

    def logits(self, tokens):
        digest = hashlib.sha256(f"{self.key}:{tokens}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        logits = torch.randn(self.vocab, generator=generator) - 10.0  # all below 0, as logits may be
        if digest[7] % 2:
            low, high = sorted(logits.topk(2).indices.tolist())
            logits[high] = logits.max()
            logits[low] = logits[high] - 0.001  # too close to be told apart in half precision
        return logits

    def first_wrong(self, prompt, output):
        """Index of the first token of `output` that is not the most likely one after all tokens before it, or None."""
        for i, token in enumerate(output):
            if token != int(self.logits([*prompt, *output[:i]]).argmax()):
                return i
        return None

    @property
    def num_calls(self):
        return len(self.log)

    @property
    def num_tokens(self):
        """Tokens that went through the linear layers."""
        return sum(n for _, n in self.log)

    @property
    def num_pairs(self):
        """(query, key) pairs of attention: the token at position p attends to p + 1 keys."""
        return sum(n * start + n * (n + 1) // 2 for start, n in self.log)


def random_tokens(num_tokens, generator, vocab=64):
    return torch.randint(vocab, (num_tokens,), generator=generator).tolist()


def random_int(low, high, generator):
    """An integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def error_of(function, *args):
    """The exception that function(*args) raises, or None."""
    try:
        function(*args)
    except NotImplementedError:
        raise
    except Exception as error:
        return error
    return None


def short(value):
    """How a value looks in a message."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor {list(value.shape)}"
    if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(short(item) for item in value[:3])}"
    text = repr(value)
    return text if len(text) < 90 else f"{text[:80]}..."


def away(keys, num_visible):
    """How keys differ from 0..num_visible - 1."""
    left_out, ahead = [j for j in range(num_visible) if j not in keys], [j for j in keys if j >= num_visible]
    return f"{f'it does not see {short(left_out)}' if left_out else f'it sees {short(ahead)}, too'}"


def about_token(model, prompt, output, i):
    expected = int(model.logits([*prompt, *output[:i]]).argmax())
    return f"new token {i} of {len(output)}: after the {len(prompt) + i} tokens before it {expected} is most likely, saw {output[i]}"


def check_calls(seen, expected):
    """The calls of a model, pairs (first position, tokens)."""
    for i, call in enumerate(expected):
        assert i < len(seen), f"expected {len(expected)} calls, saw {len(seen)}: {short(seen)}"
        assert seen[i] == call, (
            f"call {i}: expected {call[1]} tokens from position {call[0]} on, saw {seen[i][1]} from {seen[i][0]}"
        )
    assert len(seen) == len(expected), (
        f"expected {len(expected)} calls, saw {len(seen)}, the next one {seen[len(expected)]}"
    )


def short_row(tensor, most=6):
    """The first numbers of a tensor."""
    shown_ones = [f"{value:.7g}" for value in tensor.flatten()[:most].tolist()]
    return f"[{', '.join(shown_ones)}{', ...' if tensor.numel() > most else ''}]"


def tensor_of(seen, what, *shape):
    """`seen`, if it is a float32 tensor of this shape; a NumPy array counts as one."""
    if isinstance(seen, numpy.ndarray):
        seen = torch.from_numpy(seen.copy())
    assert isinstance(seen, torch.Tensor), f"{what}: expected a float32 tensor {list(shape)}, saw {short(seen)}"
    assert tuple(seen.shape) == shape, f"{what}: expected a tensor {list(shape)}, saw {list(seen.shape)}"
    assert seen.dtype == torch.float32, f"{what}: expected float32, saw {seen.dtype}"
    return seen.detach()


def tokens_of(output, num_tokens):
    """`output`, if it is a list or tuple of so many ints."""
    expected = f"expected a list of {num_tokens} ints"
    assert isinstance(output, list | tuple), f"{expected}, saw {short(output)}"
    wrong = [token for token in output if not isinstance(token, numbers.Integral)]
    assert not wrong, f"{expected}, saw {short(wrong[0])} in it; int(logits.argmax()) is an int"
    assert len(output) == num_tokens, f"{expected}, saw {len(output)}: {short(output)}"
    return [int(token) for token in output]


def shown(cache, num_tokens, num_kv_heads, head_dim):
    """(keys, values) as view() gives them, if they are [num_tokens, num_kv_heads, head_dim] each."""
    view = cache.view()
    is_pair = isinstance(view, list | tuple | torch.Tensor) and len(view) == 2
    assert is_pair, f"view() gives (keys, values), saw {short(view)}"
    shape = (num_tokens, num_kv_heads, head_dim)
    return [tensor_of(seen, f"view(): {name}", *shape) for name, seen in zip(("keys", "values"), view, strict=True)]


def attended(out, num_new, num_heads, head_dim):
    """What attend returns, if it is [num_new, num_heads, head_dim]."""
    return tensor_of(out, "attend", num_new, num_heads, head_dim)


def told(held, num_new, max_len):
    """What attend_batch gets for rows that hold held[r] tokens."""
    return list(held)


def difference(seen, expected):
    """Largest absolute difference of two tensors; infinite where shapes differ or a number is not finite."""
    if tuple(seen.shape) != tuple(expected.shape) or not bool(torch.isfinite(seen).all()):
        return math.inf
    return float((seen - expected).abs().max()) if seen.numel() else 0.0


def keys_for(q, scores, generator):
    """Keys [tokens, head_dim] with which the query q [head_dim] has these scores [tokens]."""
    noise, q, size = torch.randn(len(scores), len(q), generator=generator).double(), q.double(), q.double() @ q.double()
    along = scores.double() * math.sqrt(len(q)) - noise @ q
    return (noise + along[:, None] * q / size).float()


def seen_by(attend, num_new, past_len, unused=0, score=0.0):
    """The attention weights [num_new, tokens] of `attend` with one-hot values, if all scores are the same.

    Each of the n visible keys of a query has weight 1/n, the others 0. Unused slots hold NaN.
    """
    num_tokens = past_len + num_new
    head_dim = num_tokens
    q, k = torch.zeros(num_new, 1, head_dim), torch.zeros(num_tokens + unused, 1, head_dim)
    v = torch.eye(num_tokens + unused, head_dim)[:, None]
    q[:, :, 0], k[:, :, 0] = 1.0, score * math.sqrt(head_dim)
    k[num_tokens:], v[num_tokens:] = math.nan, math.nan
    return attended(attend(q, k, v, past_len), num_new, 1, head_dim)[:, 0]


# %% [markdown] nbgrader={"grade_id": "text_no_cache"}
# ## 1. Generate without a cache
#
# A model is a function `model(tokens, start)`: it computes `tokens` (a list of token ids) at positions `start`,
# `start + 1`, ... and returns the logits `[vocab]` after the last of them. With `start=0` it clears its cache.
#
# **Build** `generate_no_cache(model, prompt, num_new_tokens)`: greedy generation (always the most likely token). Every
# step gives the model the whole sequence so far, prompt and generated tokens, at `start=0`. Return the new tokens as a
# list (or tuple) of `num_new_tokens` ints, at least one.
#
# **Count** with S prompt tokens and N new ones. Step t (from 0) computes S + t tokens, so all steps together put
# N·S + N(N-1)/2 tokens through the linear layers, in N calls.
#
# **Hint:** `int(logits.argmax())` is the next token, an int. The logits may all be negative.
#
# **Trap (one call too many):** N tokens take N calls. Do not compute the logits after the last token.


# %% nbgrader={"grade_id": "generate_no_cache", "solution": true}
def generate_no_cache(model, prompt, num_new_tokens):
    """Greedy generation without a cache. prompt: list of S ids -> list of num_new_tokens ids."""
    ### BEGIN SOLUTION
    tokens = list(prompt)
    for _ in range(num_new_tokens):
        logits = model(tokens, 0)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_no_cache", "grade": true, "points": 1}
# property: without a cache every step computes the whole sequence: N calls, N*S + N(N-1)/2 tokens.
# question: After the last new token has been chosen, is there anything left to compute?
# hint: each call gets prompt + all tokens generated so far, from position 0 on; N new tokens need N calls.
# explanation: A prompt of 4 tokens, 3 new ones: the calls get 4, 5 and 6 tokens, each from position 0 on, which is 15 =
#   3 × 4 + 3 × 2 / 2. The first call chooses the first new token, the third the last. A fourth call would compute logits that
#   nobody uses; a call with only the newest token would need a cache.
def check_no_cache(model, prompt, N):
    output = tokens_of(unchanging(generate_no_cache)(model.forward, list(prompt), N), N)
    S = len(prompt)
    print("calls (first position, tokens):", short(model.log))
    print(f"{model.num_tokens} tokens for S={S}, N={N}; expected {N * S + N * (N - 1) // 2}")
    wrong = model.first_wrong(prompt, output)
    assert wrong is None, about_token(model, prompt, output, wrong)
    check_calls(model.log, [(0, S + t) for t in range(N)])


check_no_cache(CountingModel(seed("no_cache")), [5, 9, 2, 7], 6)
with drawn("check_no_cache") as draw:
    for case, (N, vocab) in enumerate(((1, 50), (2, 32_000), (random_int(3, 12, draw), 64))):
        prompt = random_tokens((1, random_int(2, 20, draw), random_int(2, 20, draw))[case], draw, vocab)
        check_no_cache(CountingModel(seed(f"no_cache {case}"), vocab), prompt, N)
    check_no_cache(CountingModel(seed("no_cache, far")), random_tokens(600, draw), 2)
    prompt = random_tokens(5, draw, 3)
    for case in range(2):  # three tokens, so that each comes, and comes again; the same prompt for another model
        check_no_cache(CountingModel(seed(f"no_cache, three {case}"), 3), prompt, 130)


# %% [markdown] nbgrader={"grade_id": "text_why"}
# ## 2. What to cache: K and V, never Q
#
# Per head, the output at position t is a weighted mean of the values at positions 0..t, with weights from the query at
# t and the keys at 0..t. The query of an earlier position does not appear in it: it was used once, for its own
# position, and that output does not change when tokens follow, because no position looks ahead. Keys and values are
# different: every later query reads them again. So K and V are cached and Q is not.
#
# The cell below drops all queries but the last, and the last output stays the same. It also changes the last token's
# key and value, and no earlier output changes.

# %% nbgrader={"grade_id": "why_not_q"} inferlab={"where": "notebook"}
sdpa = torch.nn.functional.scaled_dot_product_attention
q, k, v = torch.randn(3, 1, 6, 8, generator=rng("why"))  # each [heads, tokens, head_dim]
outputs = sdpa(q, k, v, is_causal=True)
only_last_query = sdpa(q[:, -1:], k, v)  # the last position sees everything: no mask needed
print("last output, all queries or only the last: difference", difference(only_last_query, outputs[:, -1:]))
k[:, -1], v[:, -1] = 100.0, 100.0
print(
    "earlier outputs, after the last key and value changed: difference",
    difference(sdpa(q, k, v, is_causal=True)[:, :-1], outputs[:, :-1]),
)

# %% [markdown] nbgrader={"grade_id": "text_cache"}
# ## 3. The cache
#
# **Build** the class `KVCache` for one sequence and one layer: a buffer that is allocated once, with capacity for
# `max_len` tokens, and a count of the tokens in it. The buffer does not grow; only the count does.
#
# What you take and give has positions first, `[tokens, heads, head_dim]`. How it lies in your memory is your choice:
# kernels exist for positions first and for heads first. The checks see what the methods give, and nothing else.
#
# - `KVCache(num_kv_heads, head_dim, max_len)`: empty, float32.
# - `append(k, v)`: `k` and `v` are `[num_new, num_kv_heads, head_dim]`. They are appended to the cached tokens. A
#   prompt, a chunk of a prompt and a single token are the same case: `num_new` differs.
# - `view()`: `(keys, values)`, each `[len, num_kv_heads, head_dim]`, in the order of arrival. Unused slots are not
#   included.
# - `len(cache)`: tokens in it.
# - If the new tokens do not all fit, `append` raises `ValueError` and the cache stays as it was. `max_len` tokens fit.
#
# **Hint:** slots `[length, length + num_new)` are next; `view()` is a slice.
#
# **Trap (borrowed memory):** `k` and `v` belong to the caller. An engine computes them into the same memory in every
# step, so you must store a copy. The check does as such an engine: when `append` has returned, it overwrites what it
# passed.


# %% nbgrader={"grade_id": "KVCache", "solution": true}
class KVCache:
    """Keys and values of one sequence in one layer: a preallocated buffer and a length.

    max_len: its capacity in tokens. All tensors are float32, [tokens, num_kv_heads, head_dim].
    """

    def __init__(self, num_kv_heads, head_dim, max_len):
        ### BEGIN SOLUTION
        self.keys = torch.empty(max_len, num_kv_heads, head_dim)
        self.values = torch.empty(max_len, num_kv_heads, head_dim)
        self.length = 0
        ### END SOLUTION

    def append(self, k, v):
        """Adds k and v [num_new, num_kv_heads, head_dim]. ValueError if they do not fit; then nothing changes."""
        ### BEGIN SOLUTION
        end = self.length + len(k)
        if end > len(self.keys):
            raise ValueError(f"{len(k)} more tokens do not fit: {self.length} of {len(self.keys)} slots are used")
        self.keys[self.length : end] = k
        self.values[self.length : end] = v
        self.length = end
        ### END SOLUTION

    def view(self):
        """(keys, values), each [len(self), num_kv_heads, head_dim]."""
        ### BEGIN SOLUTION
        return self.keys[: self.length], self.values[: self.length]
        ### END SOLUTION

    def __len__(self):
        ### BEGIN SOLUTION
        return self.length
        ### END SOLUTION


# %% nbgrader={"grade_id": "check_append", "grade": true, "points": 2}
# property: view() gives exactly what was appended, in order, whatever the sizes of the pieces.
# question: After 3 tokens were stored, where do the next ones go, and what tells the cache so?
# hint: new tokens go to slots [length, length + num_new), then the length grows; every cache has its own buffer.
# explanation: Pieces of 3, 1 and 4 tokens: they take the slots 0-2, 3 and 4-7, and the length is 3, 4 and 8 in between.
#   view() shows 8 tokens in the order of arrival, and no slot behind them. Two caches at the same time do not see each
#   other's tokens: a buffer that belongs to the class, or is made once for all, is shared.
def check_appends(sizes, num_kv_heads, head_dim, max_len, generator, size=1.0):
    k, v = torch.randn(2, sum(sizes), num_kv_heads, head_dim, generator=generator) * size
    cache, other = KVCache(num_kv_heads, head_dim, max_len), KVCache(num_kv_heads, head_dim, max_len)
    assert len(cache) == 0, f"a new cache holds 0 tokens, len() says {len(cache)}"
    shown(cache, 0, num_kv_heads, head_dim)
    start = 0
    for num_new in sizes:
        end = start + num_new
        cache.append(k[start:end].clone(), v[start:end].clone())
        other.append(v[start:end].clone(), k[start:end].clone())  # another sequence of the same length
        start = end
        assert len(cache) == end, f"{end} tokens were appended, len() says {len(cache)}"
        keys, values = shown(cache, end, num_kv_heads, head_dim)
        print(f"append {num_new:2d}: len {len(cache):2d}, keys {tuple(keys.shape)}")
        for name, seen, expected in (("keys", keys, k[:end]), ("values", values, v[:end])):
            off = [p for p in range(end) if not torch.equal(seen[p], expected[p])]
            if off:
                numbers_of = f"appended {short_row(expected[off[0]])}, saw {short_row(seen[off[0]])}"
                raise AssertionError(
                    f"position {off[0]}: {numbers_of}; {name} at positions {short(off)} are not those that were appended there"
                )


check_appends([3, 1, 4], num_kv_heads=2, head_dim=4, max_len=10, generator=rng("append"))
cache, zeros = KVCache(num_kv_heads=2, head_dim=4, max_len=5), torch.zeros(2, 2, 4)
for held in (2, 4):
    cache.append(zeros.clone(), zeros.clone())
    assert len(cache) == held, f"{held} tokens, with keys and values of 0, were appended, len() says {len(cache)}"
    shown(cache, held, 2, 4)
with drawn("check_append") as draw:
    check_appends([1, 1, 2], num_kv_heads=1, head_dim=1, max_len=5, generator=draw)
    for _ in range(4):
        sizes = [random_int(1, 6, draw) for _ in range(random_int(1, 5, draw))]
        heads, dim, spare = random_int(1, 4, draw), random_int(1, 9, draw), random_int(1, 5, draw)
        check_appends(sizes, heads, dim, max_len=sum(sizes) + spare, generator=draw)
    check_appends([600, 1, 500], num_kv_heads=1, head_dim=2, max_len=1200, generator=draw)
    check_appends([2, 3], num_kv_heads=1, head_dim=4, max_len=8, generator=draw, size=1e30)


# %% nbgrader={"grade_id": "check_full", "grade": true, "points": 1}
# property: max_len tokens fit; more raise ValueError and change nothing.
# question: If 8 of 10 slots are used and 3 tokens come, what must be true after the error?
# hint: compare length + num_new with max_len before you write anything.
# explanation: 8 of 10 slots are used: 2 more fit, since 10 <= 10. Of 3 none is stored: the check of the size comes
#   before the first write, so that length and contents are what they were. A cache that stored 2 of the 3 would be
#   right for nobody.
def check_full_buffer(held, num_new, max_len, generator):
    k, v = torch.randn(2, max(max_len, held + num_new), 2, 4, generator=generator)
    cache = KVCache(2, 4, max_len)
    if held:
        cache.append(k[:held].clone(), v[:held].clone())
    before = [tensor.clone() for tensor in shown(cache, held, 2, 4)]
    for name, seen, given in zip(("keys", "values"), before, (k, v), strict=True):
        assert torch.equal(seen, given[:held]), (
            f"the {name} of the first {held} tokens are not those that were appended"
        )
    error = error_of(cache.append, k[held : held + num_new].clone(), v[held : held + num_new].clone())
    print(f"{held} of {max_len} slots used, {num_new} more: {type(error).__name__}: {error}")
    assert isinstance(error, ValueError), f"{held} + {num_new} > {max_len}: expected ValueError, saw {error!r}"
    assert len(cache) == held, f"after a refused append len() is still {held}, saw {len(cache)}"
    same = all(torch.equal(a, b) for a, b in zip(before, shown(cache, held, 2, 4), strict=True))
    assert same, "a refused append changed what view() shows"
    if held < max_len:
        twin = KVCache(2, 4, max_len)  # the same without a refused append
        for one, start in ((twin, 0), (cache, held)):
            for begin, end in ((start, held), (held, max_len)):
                if begin < end:
                    one.append(k[begin:end].clone(), v[begin:end].clone())
            assert len(one) == max_len, f"all {max_len} slots can be used; after filling them len() says {len(one)}"
        shows = zip(shown(cache, max_len, 2, 4), shown(twin, max_len, 2, 4), strict=True)
        same = all(torch.equal(a, b) for a, b in shows)
        assert same, "after a refused append the next tokens, which fit, were not stored as without it"


check_full_buffer(held=5, num_new=1, max_len=5, generator=rng("full"))
check_full_buffer(held=3, num_new=4, max_len=5, generator=rng("full"))
with drawn("check_full") as draw:
    check_full_buffer(0, 2, 1, draw)
    for held in (0, 1, random_int(2, 11, draw), 12):
        check_full_buffer(held, 12 - held + 1, 12, draw)
        check_full_buffer(held, 12 - held + random_int(2, 20, draw), 12, draw)


# %% nbgrader={"grade_id": "check_owns", "grade": true, "points": 1}
# property: the cache keeps copies: it does not change when the caller writes over k and v.
# question: Who else can write into the tensor that append was given?
# hint: keeping the tensor you were given keeps its memory; copy the numbers into your own buffer.
# explanation: The engine puts k of step 1 into its workspace and calls append; in step 2 it writes new numbers into the
#   same memory. A cache that kept the tensor, or a view of it, now shows step 2's numbers as those of step 1. Numbers
#   that were copied into the cache's own buffer stay.
def check_owned(sizes, generator, spare=1):
    k, v = torch.randn(2, sum(sizes), 2, 4, generator=generator)
    given = (k.clone(), v.clone())
    max_len, end = sum(sizes) + spare, 0
    cache, twin = KVCache(2, 4, max_len), KVCache(2, 4, max_len)
    for size in sizes:
        start, end = end, end + size
        lent(cache.append)(
            k[start:end].clone(), v[start:end].clone()
        )  # `lent` overwrites with NaN what append was given, afterwards
        twin.append(k[start:end].clone(), v[start:end].clone())
    keys, values = shown(cache, end, 2, 4)
    print(f"pieces of {sizes}: {int(keys.isnan().sum())} of {keys.numel()} numbers in the keys have become NaN")
    expected = shown(twin, end, 2, 4) if len(sizes) > 1 else given  # the order of pieces is for another check
    assert bool(torch.isin(keys[0], given[0]).all()), "the first keys are not any that were appended"
    assert torch.equal(keys, expected[0]), "the keys changed when the caller wrote over its memory"
    assert torch.equal(values, expected[1]), "the values changed when the caller wrote over its memory"


check_owned([3], generator=rng("owns"))
check_owned([2, 1], generator=rng("owns"))
check_owned([3], generator=rng("owns"), spare=0)  # all slots at once
with drawn("check_owns") as draw:
    for sizes in ([1], [random_int(2, 9, draw)], [random_int(1, 4, draw) for _ in range(4)]):
        check_owned(sizes, draw)
    for sizes in ([1, 2], [random_int(1, 4, draw), random_int(2, 5, draw)], [2, 1, 3]):
        check_owned(sizes, draw, spare=0)  # the last piece fills the cache

# %% [markdown] nbgrader={"grade_id": "text_attend"}
# ## 4. Attention on a cache
#
# **Build** `attend(q, k, v, past_len)`, one function for prefill, chunks of a prompt and decode.
#
# - `q` `[num_new, num_heads, head_dim]`: queries of the new tokens, at positions `past_len`, `past_len + 1`, ...
# - `k`, `v` `[num_slots, num_kv_heads, head_dim]`: keys and values from position 0 on, those of the new tokens
#   included. `num_slots` is at least `past_len + num_new`; later slots are unused and may hold anything, even NaN.
# - The query at position p attends to the keys at positions 0..p, with weights softmax(q·k / sqrt(head_dim)), however
#   large the scores are. All other keys have weight exactly 0.
# - `num_heads` is a multiple of `num_kv_heads` (grouped-query attention): query head h reads KV head `h // (num_heads
#   // num_kv_heads)`. Adjacent query heads share a KV head; KV heads are not assigned round-robin.
# - Returns `[num_new, num_heads, head_dim]`, float32. The inputs are not modified.
#
# You often read "prefill has T > 1 and a mask, decode has T = 1 and needs none". A chunk of a prompt, a prompt with a
# cached prefix, and the verification of drafted tokens have T > 1 *and* cached tokens. One query needs no mask only
# because it is the last: it attends to all keys. That is the same rule, not a different one.
#
# **Hint:** slice `k` and `v` to `past_len + num_new` slots first. A mask does not protect from NaN: 0 × NaN is NaN.
# `torch.einsum` keeps the axes readable; `repeat_interleave` on the head axis repeats the KV heads. exp(100) is infinite
# in float32; `softmax` subtracts the largest score first.
#
# **Trap (top-left):** the mask is aligned at the *bottom right*: the last query attends to all keys.
# `scaled_dot_product_attention(..., is_causal=True)` aligns it at the *top left* when there are more keys than queries.
# The cell below shows it: keys are zero, so every visible key has the same weight, and row i shows what query i attends
# to.

# %% nbgrader={"grade_id": "top_left"} inferlab={"where": "notebook"}
zero_q, zero_k, one_hot = torch.zeros(1, 2, 5), torch.zeros(1, 5, 5), torch.eye(5)[None]  # 3 tokens cached, 2 new
lower_right = torch.ones(2, 5, dtype=torch.bool).tril(5 - 2)
print("is_causal=True: query 3 and 4 see\n", sdpa(zero_q, zero_k, one_hot, is_causal=True)[0])
print("bottom right: query 3 and 4 see\n", sdpa(zero_q, zero_k, one_hot, attn_mask=lower_right)[0])


# %% nbgrader={"grade_id": "attend", "solution": true}
def attend(q, k, v, past_len):
    """Causal attention of new tokens over a cache that holds them and the past_len tokens before them.

    q [num_new, num_heads, head_dim]; k, v [num_slots, num_kv_heads, head_dim] -> like q.
    """
    ### BEGIN SOLUTION
    num_new, num_heads, head_dim = q.shape
    num_tokens = past_len + num_new
    group = num_heads // k.shape[1]
    k = k[:num_tokens].repeat_interleave(group, dim=1)  # [num_tokens, num_heads, head_dim]
    v = v[:num_tokens].repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
    query_position = torch.arange(past_len, num_tokens)
    visible = torch.arange(num_tokens)[None] <= query_position[:, None]  # [num_new, num_tokens]
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_weights", "grade": true, "points": 1}
# property: weights are softmax(q.k / sqrt(head_dim)) over the keys; the inputs stay as they are.
# question: By how much is the softmax of scores changed if they are not scaled?
# hint: scale before the softmax, over the axis of the keys; do not write into q, k or v.
# explanation: head_dim 4, one query [2, 0, 0, 0], keys [2, 0, 0, 0] and [0, 0, 0, 0]: the scores are 4 and 0, divided
#   by sqrt(4) they are 2 and 0, and the weights 0.88 and 0.12. Unscaled they would be 0.98 and 0.02; divided by 4, 0.73
#   and 0.27. For each query the weights over the keys sum to 1.
def last_output(q, k, v, num_heads):
    """What attend gives for the last query of a prompt, where all heads hold the same q, k and v [tokens, head_dim]."""
    q, k, v = (tensor[:, None].expand(-1, num_heads, -1).clone() for tensor in (q, k, v))
    return attended(unchanging(attend)(q, k, v, 0), *q.shape)[-1]


for largest, num_heads in ((2.0, 1), (2.0, 2), (200.0, 1)):
    q, k = torch.zeros(2, 3, 4)
    q[:, 0], k[:, 0] = 2.0, torch.tensor([0.0, largest / 2, largest])
    seen = last_output(q, k, torch.eye(3, 4), num_heads)[:, :3]  # one-hot values: the output is the weights
    scores = [0.0, largest / 2, largest]
    expected = torch.tensor(scores).softmax(0).expand(num_heads, -1)
    weights = [round(float(weight), 4) for weight in seen[0]]
    print(f"{num_heads} heads, head_dim 4, q.k {[2 * s for s in scores]}: scores {scores}, weights {weights}")
    assert difference(seen, expected) < 1e-4, f"expected weights {short_row(expected[0])}, saw {short_row(seen[0])}"
expected = torch.tensor([2.0, 0.0, 1.0]).softmax(0)
for query, head in ((0, 0), (0, 1), (2, 1)):  # the scores of this one are hundreds, those of all others at most 2
    q, k = torch.zeros(2, 3, 2, 4)
    q[:, :, 0], k[:, :, 0] = 2.0, torch.tensor([2.0, 0.0, 1.0])[:, None]
    q[query, head] *= 300
    seen = attended(attend(q, k, torch.eye(3, 4)[:, None].repeat(1, 2, 1), 0), 3, 2, 4)[2, 0, :3]
    about = f"query {query} of head {head} has scores up to 600; query 2 of head 0 has the scores [2, 0, 1]"
    assert difference(seen, expected) < 1e-4, f"{about}: expected weights {short_row(expected)}, saw {short_row(seen)}"
with drawn("check_weights") as draw:
    for num_heads in (1, 2, 3, 5):
        num_tokens, head_dim = random_int(2, 6, draw) if num_heads > 1 else 300, random_int(6, 40, draw)
        q, v = torch.randn(2, num_tokens, head_dim, generator=draw)
        scores = 2 * torch.randn(num_tokens, generator=draw)
        k = keys_for(q[-1], scores, draw)
        for scale in (2.0, 1.0):
            expected = ((scale * scores.double()).softmax(0) @ v.double()).float().expand(num_heads, -1)
            off = difference(last_output(scale * q, k, v, num_heads), expected)
            assert off < 1e-5, f"head_dim {head_dim}, {num_heads} heads, {num_tokens} keys: off by up to {off:.2g}"
    largest = float(random_int(200, 400, draw))  # float32 tells scores apart there, however it comes to them
    q, k = torch.zeros(2, 3, 4)
    q[:, 0], k[:, 0] = 2.0, torch.tensor([0.0, -2.0, -1.0]) + largest
    seen, expected = last_output(q, k, torch.eye(3, 4), 1)[0, :3], torch.tensor([0.0, -2.0, -1.0]).softmax(0)
    about = f"scores {largest:.0f}, {largest - 2:.0f}, {largest - 1:.0f}"
    assert difference(seen, expected) < 1e-3, f"{about}: expected weights {short_row(expected)}, saw {short_row(seen)}"
    largest = float(10 ** random_int(5, 6, draw))
    k[:, 0] = torch.tensor([largest / 4, largest / 2, largest])
    seen, expected = last_output(q, k, torch.eye(3, 4), 1)[0, :3], torch.tensor([0.0, 0.0, 1.0])
    about = f"scores {largest / 4:.0f}, {largest / 2:.0f}, {largest:.0f}"
    assert difference(seen, expected) < 1e-4, f"{about}: expected weights {short_row(expected)}, saw {short_row(seen)}"
    k[:, 0] = torch.tensor([0.0, -10.0, -30.0])  # small weights count where their values are large
    seen = float(last_output(q, k, torch.tensor([0.0, 1e4, 1e13])[:, None].expand(-1, 4), 1)[0, 0])
    expected = float(torch.tensor([0.0, -10.0, -30.0]).double().softmax(0) @ torch.tensor([0.0, 1e4, 1e13]).double())
    about = "scores 0, -10 and -30, values 0, 1e4 and 1e13"
    assert abs(seen / expected - 1) < 1e-4, f"{about}: expected {expected:.7g}, saw {seen:.7g}"


# %% nbgrader={"grade_id": "check_heads", "grade": true, "points": 1}
# property: query head h reads KV head h // (num_heads // num_kv_heads).
# question: With 6 query heads and 2 KV heads, which query heads share the first KV head?
# hint: with 6 query and 2 KV heads, query heads 0, 1, 2 read KV head 0 and 3, 4, 5 read KV head 1.
# explanation: 6 query heads over 2 KV heads: groups of 3. Heads 0, 1, 2 read KV head 0; 3, 4, 5 read KV head 1. An
#   interleaved order would give 0, 2, 4 to KV head 0: that is what comes of repeating the KV heads as a whole in place
#   of each one by itself.
def heads_read(num_heads, num_kv_heads, num_new, past_len):
    """The KV head that each query head reads: all values of KV head g are g, so every weighted mean of them is g."""
    q, k = torch.zeros(num_new, num_heads, 8), torch.zeros(past_len + num_new, num_kv_heads, 8)
    v = torch.arange(num_kv_heads).float()[None, :, None].expand(past_len + num_new, -1, 8).clone()
    return attended(attend(q, k, v, past_len), num_new, num_heads, 8)[-1, :, 0]


def check_heads_of(num_heads, num_kv_heads, num_new, past_len, generator):
    seen = heads_read(num_heads, num_kv_heads, num_new, past_len)
    expected = torch.arange(num_heads) // (num_heads // num_kv_heads)
    print(f"{num_heads} query heads, {num_kv_heads} KV heads: they read", [round(float(g), 2) for g in seen])
    assert difference(seen, expected.float()) < 1e-4, (
        f"expected KV heads {expected.tolist()}, saw {short_row(seen, 20)}"
    )
    q = torch.randn(num_new, num_heads, 8, generator=generator)
    k, v = torch.randn(2, past_len + num_new, num_kv_heads, 8, generator=generator)
    together = attended(attend(q.clone(), k.clone(), v.clone(), past_len), num_new, num_heads, 8)
    for h, g in enumerate(expected.tolist()):
        alone = attend(q[:, h : h + 1].clone(), k[:, g : g + 1].clone(), v[:, g : g + 1].clone(), past_len)
        off = difference(together[:, h : h + 1], attended(alone, num_new, 1, 8))
        assert off < 1e-5, f"query head {h} gives other numbers than alone with KV head {g}, by up to {off:.2g}"


for num_heads, num_kv_heads in ((6, 2), (4, 4), (4, 1)):  # GQA, MHA, MQA
    check_heads_of(num_heads, num_kv_heads, num_new=3, past_len=0, generator=rng("heads"))
with drawn("check_heads") as draw:
    for num_kv_heads, group in (
        (1, random_int(2, 7, draw)),
        (random_int(2, 4, draw), 1),
        (2, 3),
        (3, 2),
        (4, 4),
        (2, 9),
    ):
        check_heads_of(num_kv_heads * group, num_kv_heads, random_int(1, 5, draw), random_int(0, 5, draw), draw)


# %% nbgrader={"grade_id": "check_mask", "grade": true, "points": 2}
# property: the query at position p sees keys 0..p, whether it comes in a prompt, in a chunk or alone.
# question: Which position has the first new query, if 5 tokens are in the cache?
# hint: the first new query is at position past_len, so key j is visible to new query i if j <= past_len + i.
# explanation: 5 cached tokens and a chunk of 3: the queries are at positions 5, 6, 7 and see 6, 7 and 8 keys. A square
#   mask from the corner of the matrix would give them 1, 2 and 3. For one new token (position 5) nothing is hidden; for
#   a whole prompt (0 cached) it is the usual triangle.
def check_seen(num_new, past_len, score=0.0):
    for i, row in enumerate(seen_by(attend, num_new, past_len, score=score)):
        position = past_len + i
        keys = [j for j, weight in enumerate(row.tolist()) if weight != 0]
        print(f"{past_len} cached, {num_new} new: the query at position {position} sees keys {short(keys)}")
        about = f"position {position}, {past_len} tokens before the new ones, all scores {score:g}"
        assert keys == list(range(position + 1)), f"{about}: expected keys 0..{position}, {away(keys, position + 1)}"
        off = difference(row[: position + 1], torch.full((position + 1,), 1 / (position + 1)))
        rounding = 1e-5 + 1e-7 * abs(score)
        assert off < rounding, f"{about}: so the weights are equal; saw {short_row(row)}"


def check_chunks_of(chunk_size, num_tokens, num_heads, num_kv_heads, generator):
    """A prompt in chunks gives the same as in one pass."""
    q = torch.randn(num_tokens, num_heads, 8, generator=generator)
    k, v = torch.randn(2, num_tokens, num_kv_heads, 8, generator=generator)
    once = attended(attend(q.clone(), k.clone(), v.clone(), 0), num_tokens, num_heads, 8)
    chunks = []
    for start in range(0, num_tokens, chunk_size):
        end = min(start + chunk_size, num_tokens)
        out = attend(q[start:end].clone(), k[:end].clone(), v[:end].clone(), start)
        chunks.append(attended(out, end - start, num_heads, 8))
    off = difference(torch.cat(chunks), once)
    print(f"{num_tokens} tokens in chunks of {chunk_size}: largest difference from one chunk {off:.1e}")
    assert off < 1e-5, f"chunks of {chunk_size} give other outputs than one chunk, by up to {off:.2g}"


for num_new, past_len in ((3, 0), (2, 3), (1, 4)):  # prefill, a chunk, decode
    check_seen(num_new, past_len)
for chunk_size in (1, 7, 64):
    check_chunks_of(chunk_size, 20, 4, 2, rng("chunks"))
q, k, v = torch.ones(2, 1, 4), torch.zeros(3, 1, 4), torch.eye(3, 4)[:, None]
k[2] = 150.0  # a score of 300, hidden from the first of two queries
row = attended(attend(q, k, v, 1), 2, 1, 4)[0, 0]
about = f"keys 0 and 1 have the same score, key 2 is hidden: saw the weights {row[:3].tolist()}"
assert difference(row, torch.tensor([0.5, 0.5, 0.0, 0.0])) < 1e-4, about
with drawn("check_mask") as draw:
    for score in (-1e30, -30_000.0, 0.0, 300.0):
        check_seen(1, random_int(1, 9, draw), score)
        check_seen(random_int(2, 6, draw), 0, score)
        check_seen(random_int(2, 4, draw), random_int(5, 9, draw), score)
        check_seen(random_int(5, 9, draw), random_int(2, 4, draw), score)
    for chunk_size, num_heads, num_kv_heads in ((1, 3, 1), (2, 2, 2), (random_int(3, 9, draw), 6, 2)):
        check_chunks_of(chunk_size, random_int(10, 30, draw), num_heads, num_kv_heads, draw)
    check_seen(2, 600)  # far behind
    q, (k, v) = torch.randn(5, 2, 8, generator=draw), torch.randn(2, 9, 2, 8, generator=draw)
    out = attended(attend(q.clone(), k.clone(), v.clone(), 4), 5, 2, 8)
    k[7:], v[7:] = 50.0, 1e6  # future keys of the first three queries
    off = difference(attended(attend(q, k, v, 4), 5, 2, 8)[:3], out[:3])
    assert off < 1e-5, f"other keys and values in the future changed the present by {off:.2g}"
    for query, head in ((0, 0), (0, 3), (1, 1)):  # a chunk, two heads a group: the scores of one query are hundreds
        q, k, v = torch.zeros(3, 4, 4), torch.zeros(5, 2, 4), torch.randn(5, 1, 4, generator=draw).repeat(1, 2, 1)
        q[query, head, 0], k[..., 0] = 600.0, torch.tensor([2.0, 0.0, 1.0, 2.0, 0.0])[:, None]
        off = difference(attended(attend(q, k, v, 2), 3, 4, 4)[2], v.mean(0)[:1].expand(4, -1))
        about = f"3 new tokens behind 2 cached ones, query {query} of head {head} has scores of hundreds"
        assert off < 1e-4, f"{about}: query 2 has scores of 0, so equal weights, and is off by {off:.2g}"


# %% nbgrader={"grade_id": "check_unused", "grade": true, "points": 1}
# property: slots behind past_len + num_new are neither read, even if they hold NaN, nor written.
# question: What is 0 × NaN?
# hint: cut k and v to past_len + num_new slots; a weight of 0 times NaN is NaN.
# explanation: A buffer of 8 slots with 5 tokens: slots 5-7 hold whatever was there. A weight of 0 for such a slot is
#   not enough: 0 × NaN is NaN, and it spreads over the whole output. Only what is not read at all does no harm.
def check_unused_slots(num_new, past_len, unused):
    rows = seen_by(attend, num_new, past_len, unused)
    num_nan = int(rows.isnan().sum())
    print(f"{past_len} + {num_new} tokens in {past_len + num_new + unused} slots: {num_nan} NaN in the output")
    assert num_nan == 0, f"{num_nan} NaN from unused slots reached the output"
    # Only the last row, and only without cached tokens: other checks test which keys the others see.
    if past_len == 0:
        off = difference(rows[-1], torch.full((num_new,), 1 / num_new))
        assert off < 1e-5, f"the last query must see keys 0..{num_new - 1} alike, saw {short_row(rows[-1])}"


def check_behind(num_new, past_len, unused, held, generator):
    """Unused slots that hold the number `held` change nothing, and stay as they are."""
    q, num_tokens = torch.randn(num_new, 4, 8, generator=generator), past_len + num_new
    k, v = torch.randn(2, num_tokens + unused, 2, 8, generator=generator)
    without = attended(attend(q.clone(), k[:num_tokens].clone(), v[:num_tokens].clone(), past_len), num_new, 4, 8)
    k[num_tokens:], v[num_tokens:] = held, held
    off = difference(attended(attend(q.clone(), k, v, past_len), num_new, 4, 8), without)
    print(f"{past_len} + {num_new} tokens, {unused} unused slots that hold {held}: the output is off by {off:.1e}")
    assert off < 1e-5, f"unused slots that hold {held} change the output by up to {off:.2g}"
    for name, slots in (("k", k[num_tokens:]), ("v", v[num_tokens:])):
        kept = bool(slots.isnan().all()) if math.isnan(held) else bool((slots == held).all())
        assert kept, f"attend wrote into the unused slots of {name}"


check_unused_slots(num_new=4, past_len=0, unused=3)
check_unused_slots(num_new=1, past_len=5, unused=2)
check_behind(num_new=2, past_len=3, unused=2, held=math.nan, generator=rng("unused"))
with drawn("check_unused") as draw:
    for past_len, held in ((0, math.nan), (random_int(1, 9, draw), math.inf), (random_int(1, 9, draw), 40.0)):
        num_new, unused = random_int(1, 6, draw), random_int(1, 20, draw)
        check_unused_slots(num_new, past_len, unused)
        check_behind(num_new, past_len, unused, held, draw)

# %% [markdown] nbgrader={"grade_id": "text_step"}
# ## 5. One step of one layer
#
# **Build** `attention_step(cache, attend, q, k, v)`: what an attention layer does with the new tokens of a sequence.
# Append their keys and values to `cache`, then let their queries attend to all its tokens.
#
# - `cache` has the methods of your `KVCache`; `attend` has the signature of yours. The check passes its own, so this
#   part can be right even if an earlier one is not.
# - `q` `[num_new, num_heads, head_dim]`; `k`, `v` `[num_new, num_kv_heads, head_dim]`. Returns what `attend` returns.
#
# **Hint:** there is no branch for prefill or decode, and no mask here.
#
# **Trap (past after):** `past_len` counts the tokens *before* the new ones. After the append, `len(cache)` counts them
# too.


# %% nbgrader={"grade_id": "attention_step", "solution": true}
def attention_step(cache, attend, q, k, v):
    """Stores k and v in the cache, then attends. q [num_new, num_heads, head_dim] -> like q."""
    ### BEGIN SOLUTION
    past_len = len(cache)
    cache.append(k, v)
    keys, values = cache.view()
    return attend(q, keys, values, past_len)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_step", "grade": true, "points": 1}
# property: the new keys and values are stored first; then attend gets all keys and the number of tokens before.
# question: Does the query of a new token see the new token's own key?
# hint: read len(cache), append, view, attend: in this order, for any number of new tokens.
# explanation: 4 tokens are cached and 2 come. Number before: 4. They are stored, so that 6 keys are there, and attend
#   gets the 2 queries, 6 keys, 6 values and past_len 4. If len is read after the append, past_len is 6 and the mask is
#   shifted by two; without the append first, a token does not see itself.
class Recorder:
    """Stands in for a cache and for attend, and records its calls. Its keys are just numbered, its values negative."""

    def __init__(self, held):
        self.held = held
        self.appended = []
        self.attended = []

    def append(self, k, v):
        for tensor in (k, v):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"append(k, v) takes tensors, saw {short(tensor)}")
        self.appended.append((k.clone(), v.clone()))
        self.held += len(k)

    def view(self):
        numbers = torch.arange(8.0 * self.held).view(-1, 2, 4)
        return numbers, -numbers

    def __len__(self):
        return self.held

    def attend(self, q, k, v, past_len):
        for tensor in (q, k, v):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"attend(q, k, v, past_len) takes tensors, saw {short(tensor)}")
        self.attended.append((q.clone(), k.clone(), v.clone(), int(past_len)))
        return q * 2 + 1


def check_one_step(held, num_new, generator):
    q, (k, v) = torch.randn(num_new, 4, 4, generator=generator), torch.randn(2, num_new, 2, 4, generator=generator)
    recorder = Recorder(held)
    out = unchanging(attention_step)(recorder, recorder.attend, q.clone(), k.clone(), v.clone())
    assert len(recorder.attended) == 1, f"expected one call of attend, saw {len(recorder.attended)}"
    seen_q, seen_k, seen_v, past_len = recorder.attended[0]
    print(f"{held} cached, {num_new} new: attend got {len(seen_k)} keys and past_len {past_len}")
    stored_k = torch.cat([pair[0] for pair in recorder.appended]) if recorder.appended else torch.empty(0)
    stored_v = torch.cat([pair[1] for pair in recorder.appended]) if recorder.appended else torch.empty(0)
    assert torch.equal(stored_k, k), f"the {num_new} new keys must be appended once; {len(stored_k)} were"
    assert torch.equal(stored_v, v), f"the {num_new} new values must be appended once; {len(stored_v)} were"
    total = held + num_new
    assert len(seen_k) >= total, f"attend must see all {total} keys, the new ones included; it got {len(seen_k)}"
    expected = torch.arange(8.0 * total).view(-1, 2, 4)
    same = torch.equal(seen_k[:total], expected) and torch.equal(seen_v[:total], -expected)
    assert same, "attend must get the keys and values of the cache, as view() gives them"
    assert past_len == held, f"{held} tokens were there before the new ones; attend got past_len={past_len}"
    assert torch.equal(seen_q, q), "attend must get the queries as they came"
    out = tensor_of(out, "attention_step returns what attend returns", num_new, 4, 4)
    assert torch.equal(out, q * 2 + 1), "what attend returns must be returned"


for held, num_new in ((0, 3), (5, 1), (5, 3)):  # prefill, decode, a chunk
    check_one_step(held, num_new, rng("step"))
with drawn("check_step") as draw:
    for held, num_new in (
        (0, 1),
        (1, 1),
        (random_int(1, 4, draw), random_int(5, 9, draw)),
        (9, random_int(2, 6, draw)),
    ):
        check_one_step(held, num_new, draw)

# %% [markdown] nbgrader={"grade_id": "text_cached"}
# ## 6. Generate with the cache
#
# Now `model` has a KV cache inside. `model(tokens, start)` with `start > 0` computes only `tokens` and attends to the
# `start` tokens it has cached; it rejects any `start` other than the number of cached tokens.
#
# **Build** `generate_cached(model, prompt, num_new_tokens, chunk_size)`: the same greedy tokens as
# `generate_no_cache`, each token computed once.
#
# - Prefill: feed the prompt in as few calls as possible, of at most `chunk_size` tokens each. The last may be shorter.
#   Only the logits after the *last* prompt token choose the first new token.
# - Decode: each call feeds the one token that was chosen last.
# - Return a list (or tuple) of `num_new_tokens` ints, at least one, as in part 1.
#
# **Count:** S + N - 1 tokens go through the linear layers, in ceil(S / chunk_size) + N - 1 calls. Attention still
# covers all tokens: the token at position p attends to p + 1 keys, with or without a cache. A cache saves recomputing
# the old keys and values, and the outputs of the old positions. It does not save attending to them.
#
# **Hint:** keep a variable for the position where the next call starts.
#
# **Trap (last token):** the prefill gives the first new token. Every later call takes one new token as input and gives
# the next. The last one is never fed in, so after N outputs the cache holds S + N - 1 tokens.


# %% nbgrader={"grade_id": "generate_cached", "solution": true}
def generate_cached(model, prompt, num_new_tokens, chunk_size):
    """Greedy generation, each token computed once. prompt: list of S ids -> list of num_new_tokens (>= 1) ids."""
    ### BEGIN SOLUTION
    for start in range(0, len(prompt), chunk_size):
        logits = model(prompt[start : start + chunk_size], start)
    output = [int(logits.argmax())]
    while len(output) < num_new_tokens:
        position = len(prompt) + len(output) - 1  # of the token chosen last
        logits = model(output[-1:], position)
        output.append(int(logits.argmax()))
    return output
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_cached_tokens", "grade": true, "points": 1}
# property: with the cache the output is token for token the same as without.
# question: The prompt has S tokens: at which position is the first token that you generate?
# hint: a new token's position is the number of tokens before it: S for the first one you feed.
# explanation: A prompt of 4 tokens fills positions 0-3. The first new token is at position 4, so it is fed at
#   position 4, and the next at 5. If a token is fed at a wrong position the model refuses, or answers as if another text had
#   come before; one wrong token changes all after it.
def check_same_tokens(model, prompt, N):
    output = tokens_of(unchanging(generate_cached)(model.forward, list(prompt), N, len(prompt)), N)
    print(f"{N} tokens after a prompt of {len(prompt)}: {output}")
    wrong = model.first_wrong(prompt, output)
    assert wrong is None, about_token(model, prompt, output, wrong)


check_same_tokens(CountingModel(seed("cached")), [5, 9, 2, 7], 6)
with drawn("check_cached_tokens") as draw:
    for case, (N, vocab) in enumerate(((1, 50), (2, 32_000), (random_int(3, 12, draw), 64))):
        prompt = random_tokens((1, random_int(2, 20, draw), random_int(2, 20, draw))[case], draw, vocab)
        check_same_tokens(CountingModel(seed(f"cached {case}"), vocab), prompt, N)
    check_same_tokens(CountingModel(seed("cached, far")), random_tokens(600, draw), 2)
    prompt = random_tokens(5, draw, 3)
    for case in range(2):  # three tokens, so that each comes, and comes again; the same prompt for another model
        check_same_tokens(CountingModel(seed(f"cached, three {case}"), 3), prompt, 130)


# %% nbgrader={"grade_id": "check_cached_work", "grade": true, "points": 2}
# property: each token is computed once: S + N - 1 tokens, N calls for a prompt in one chunk, the last token never fed.
# question: Which of the new tokens does nobody ask the model about?
# hint: count your calls: one for the prompt and one for each new token but the last.
# explanation: 4 prompt tokens and 3 new ones: the prompt's call chooses new token 1, feeding 1 chooses 2, feeding 2
#   chooses 3. Fed are 4 + 1 + 1 = 6 = S + N - 1 tokens in N = 3 calls. The last one is never fed: its logits would
#   choose a token that was not asked for.
def check_work(model, prompt, N):
    output = tokens_of(unchanging(generate_cached)(model.forward, list(prompt), N, len(prompt)), N)
    S = len(prompt)
    tokens, pairs = S + N - 1, (S + N - 1) * (S + N) // 2
    print(f"S={S}, N={N}: {model.num_calls} calls, {model.num_tokens} tokens, {model.num_pairs} pairs of attention,")
    print(f"    expected {N}, {tokens}, {pairs}; without a cache {N * S + N * (N - 1) // 2} tokens")
    assert model.num_calls == N, f"expected {N} calls, saw {model.num_calls}: {short(model.log)}"
    assert model.num_tokens == tokens, (
        f"expected S + N - 1 = {tokens} tokens, saw {model.num_tokens}: {short(model.log)}"
    )
    assert model.num_pairs == pairs, f"expected {pairs} pairs, saw {model.num_pairs}: {model.log}"
    fed = [*prompt, *output[:-1]]
    off = [i for i, (now, then) in enumerate(zip(model.cached, fed, strict=True)) if now != then]
    assert not off, (
        f"the cache must hold prompt and output but its last token: {fed[off[0]]} at position {off[0]}, saw "
        f"{model.cached[off[0]]}"
    )


check_work(CountingModel(seed("work")), [5, 9, 2, 7], 6)
with drawn("check_cached_work") as draw:
    for case, (N, S) in enumerate(
        ((1, 1), (1, 9), (2, random_int(2, 20, draw)), (random_int(3, 12, draw), 1), (5, 12))
    ):
        check_work(CountingModel(seed(f"work {case}")), random_tokens(S, draw), N)
    check_work(CountingModel(seed("work, far")), random_tokens(600, draw), 2)
    check_work(CountingModel(seed("work, three"), 3), random_tokens(5, draw, 3), 130)


# %% nbgrader={"grade_id": "check_chunks", "grade": true, "points": 1}
# property: the size of the prompt's chunks changes the number of calls, and nothing else.
# question: Of a prompt in three chunks, whose logits choose the first new token?
# hint: chunks start at 0, chunk_size, 2 * chunk_size, ...; the last may be shorter; its logits choose the first token.
# explanation: 7 prompt tokens in chunks of 3: (position 0, 3 tokens), (3, 3), (6, 1). The logits after the first two
#   chunks belong to the middle of the prompt and are not used; those after the last choose the first new token. For a
#   chunk size of 7 or more it is one call, and the output is the same.
def check_chunked(key, prompt, N, chunk_size, vocab=64):
    model, S = CountingModel(key, vocab), len(prompt)
    output = tokens_of(unchanging(generate_cached)(model.forward, list(prompt), N, chunk_size), N)
    prefill = [n for start, n in model.log if start < S]
    assert prefill, "the model was never called with a part of the prompt"
    print(f"chunk_size {chunk_size}: the prompt went in as {short(prefill)}, output {short(output)}")
    largest = max(prefill)
    assert largest <= chunk_size, f"a call had {largest} tokens of the prompt; chunk_size is {chunk_size}"
    assert sum(prefill) == S, f"the prompt has {S} tokens, {sum(prefill)} went in: {short(prefill)}"
    fewest = -(-S // chunk_size)
    assert len(prefill) == fewest, (
        f"{S} tokens fit into {fewest} chunks of {chunk_size}, saw {len(prefill)}: {short(prefill)}"
    )
    wrong = model.first_wrong(prompt, output)
    assert wrong is None, f"chunk_size {chunk_size}: {about_token(model, prompt, output, wrong)}"
    whole = CountingModel(key, vocab)
    generate_cached(whole.forward, list(prompt), N, S)
    decode, expected = ([call for call in m.log if call[0] >= S] for m in (model, whole))
    assert decode == expected, (
        f"with one chunk the calls after the prompt are {short(expected)}, with chunks of {chunk_size} {short(decode)}"
    )


for chunk_size in (1, 3, 5, 64):
    check_chunked(seed("chunked"), [5, 9, 2, 7, 1, 8, 3, 11, 4, 6], 4, chunk_size)
with drawn("check_chunks") as draw:
    check_chunked(seed("chunked, one"), random_tokens(1, draw), 3, 1)
    for case in range(3):
        N, prompt = (1, 2, random_int(3, 6, draw))[case], random_tokens(random_int(5, 30, draw), draw)
        for chunk_size in (1, random_int(2, 4, draw), len(prompt) - 1, len(prompt) + 1):
            check_chunked(seed(f"chunked {case}"), prompt, N, chunk_size)
        check_chunked(seed(f"chunked, no rest {case}"), random_tokens(12, draw), N, (2, 4, 6)[case])
    check_chunked(seed("chunked, far"), random_tokens(1100, draw), 2, 1040)
    check_chunked(seed("chunked, many"), random_tokens(70, draw), 2, 1)
    check_chunked(seed("chunked, three"), random_tokens(5, draw, 3), 130, 3, vocab=3)

# %% [markdown] nbgrader={"grade_id": "text_counts"}
# ### The contents of the cache, and its savings
#
# The first cell follows three prompt tokens and two new ones. The prefill gives the first new token; its key and value
# are cached one call later; those of the last new token never are.
#
# The second cell answers the question from the top with the closed forms, after comparing them with your counts on a
# small case. "O(n²) becomes O(n)" is only half a sentence: per step, attention falls from O(n²) to O(n) and the linear
# layers from O(n) to O(1); over a whole generation, attention from O(n³) to O(n²) and the linear layers from O(n²) to
# O(n). N tokens take N passes either way.

# %% nbgrader={"grade_id": "trace"} inferlab={"where": "notebook"}
traced = CountingModel(1)


def tracing(tokens, start):
    logits = traced.forward(tokens, start)
    print(f"in {tokens} at {start}: the cache now holds {len(traced.cached)} tokens, out comes {int(logits.argmax())}")
    return logits


print("output", generate_cached(tracing, [11, 12, 13], 2, chunk_size=3))


# %% nbgrader={"grade_id": "closed_forms"} inferlab={"where": "notebook"}
def closed_forms(S, N):
    """(tokens, pairs) without a cache, and with a cache."""
    lengths = range(S, S + N)  # what each step computes without a cache
    without = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    return without, (S + N - 1, (S + N - 1) * (S + N) // 2)


small, counts = list(range(12)), []
for generate, extra in ((generate_no_cache, ()), (generate_cached, (5,))):
    model = CountingModel(2)
    generate(model.forward, small, 9, *extra)
    counts.append((model.num_tokens, model.num_pairs))
print("S=12, N=9, counted:", counts, "closed forms:", list(closed_forms(12, 9)))

(tokens_without, pairs_without), (tokens_with, pairs_with) = closed_forms(200, 500)
print(
    f"S=200, N=500: {tokens_without:,} tokens without a cache, {tokens_with:,} with ({tokens_without / tokens_with:.0f}x)"
)
print(f"             {pairs_without:,} pairs without a cache, {pairs_with:,} with ({pairs_without / pairs_with:.0f}x)")

# %% [markdown] nbgrader={"grade_id": "text_batch"}
# ## 7. Two sequences of unequal length
#
# The simplest batch pads: one buffer `[rows, max_len, num_kv_heads, head_dim]` for all rows, each row with its own
# length. Paging will replace it; here you see its cost.
#
# **Build** `attend_batch(q, k, v, k_cache, v_cache, lengths)`: one step of a layer for all rows.
#
# - `k_cache`, `v_cache` `[rows, max_len, num_kv_heads, head_dim]`: row r holds `lengths[r]` tokens. Later slots may
#   hold anything, even NaN.
# - `q` `[rows, num_new, num_heads, head_dim]`; `k`, `v` `[rows, num_new, num_kv_heads, head_dim]`: each row's new
#   tokens, at *its* positions `lengths[r]`, `lengths[r] + 1`, ... They fit. `lengths` is a list of ints.
# - Write `k` and `v` into the caches, in place, each row at its own positions; no other slot changes, nor do `q`, `k` and
#   `v`. Then return attention `[rows, num_new, num_heads, head_dim]`, each row as if it were alone.
#
# **Hint:** a loop over rows is fine. All rows at once is one mask `[rows, num_new, max_len]` with
# `key <= lengths[r] + i`, and values in hidden slots set to 0.
#
# **Trap (padding):** the padding of a short row is not empty but uninitialized memory. Masking its scores makes its
# weight 0, and 0 × NaN is still NaN.


# %% nbgrader={"grade_id": "attend_batch", "solution": true}
def attend_batch(q, k, v, k_cache, v_cache, lengths):
    """One step of rows that hold lengths[r] tokens each: writes k and v into the caches, then attends.

    q [rows, num_new, num_heads, head_dim] -> like q; k, v [rows, num_new, num_kv_heads, head_dim];
    k_cache, v_cache [rows, max_len, num_kv_heads, head_dim], changed in place.
    """
    ### BEGIN SOLUTION
    rows, num_new, num_heads, head_dim = q.shape
    position = torch.tensor(lengths)[:, None] + torch.arange(num_new)  # [rows, num_new], of the new tokens
    row = torch.arange(rows)[:, None]
    k_cache[row, position] = k
    v_cache[row, position] = v
    max_len, group = k_cache.shape[1], num_heads // k_cache.shape[2]
    unused = torch.arange(max_len) > position[:, -1:]  # [rows, max_len], true in the padding
    keys = k_cache.masked_fill(unused[..., None, None], 0).repeat_interleave(group, dim=2)
    values = v_cache.masked_fill(unused[..., None, None], 0).repeat_interleave(group, dim=2)
    scores = torch.einsum("rqhd,rkhd->rhqk", q, keys) / math.sqrt(head_dim)
    hidden = torch.arange(max_len) > position[..., None]  # [rows, num_new, max_len]
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(dim=-1)
    return torch.einsum("rhqk,rkhd->rqhd", weights, values)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_batch_rows", "grade": true, "points": 1}
# property: each row of a batch gets what it would get alone, whatever the others' lengths and the padding hold.
# question: Two rows hold 2 and 5 tokens: which positions do their next tokens have?
# hint: row r's new token i is at position lengths[r] + i and sees keys 0..lengths[r] + i of its own row.
# explanation: Rows with 2 and 5 tokens before a step of one token each: the new ones are at positions 2 and 5, and see
#   3 and 6 keys. The shorter row's slots 3 and up are padding and hold anything, NaN too: neither a mask made for the
#   longest row nor a weight of 0 keeps them out of a sum.
def seen_by_rows(lengths, num_new, max_len, score=0.0):
    """Weights [rows, num_new, max_len] if all scores are the same; the unused slots of the caches hold NaN."""
    rows = len(lengths)
    k_cache, v_cache = torch.full((2, rows, max_len, 1, max_len), math.nan)
    q, k, v = torch.zeros(3, rows, num_new, 1, max_len)
    key = torch.zeros(max_len)
    key[0], q[..., 0], k[..., 0] = score * math.sqrt(max_len), 1.0, score * math.sqrt(max_len)
    for r, n in enumerate(lengths):
        k_cache[r, :n] = key
        v_cache[r, :n, 0] = torch.eye(max_len)[:n]
        v[r, :, 0] = torch.eye(max_len)[n : n + num_new]
    out = attend_batch(q, k, v, k_cache, v_cache, told(lengths, num_new, max_len))
    return tensor_of(out, "attend_batch", rows, num_new, 1, max_len)[:, :, 0]


def check_rows(lengths, num_new, max_len, score=0.0):
    seen = seen_by_rows(lengths, num_new, max_len, score)
    for r, n in enumerate(lengths):
        for i in range(num_new):
            keys = [j for j, weight in enumerate(seen[r, i].tolist()) if weight != 0]
            nan = ", with NaN" if bool(seen[r, i].isnan().any()) else ""
            print(f"row {r} holds {n}: its new token at position {n + i} sees keys {short(keys)}{nan}")
            assert not nan, f"row {r}: NaN from the padding reached the output"
            about = f"row {r}, position {n + i}, all scores {score:g}"
            assert keys == list(range(n + i + 1)), f"{about}: expected keys 0..{n + i}, {away(keys, n + i + 1)}"
            off = difference(seen[r, i, keys], torch.full((len(keys),), 1 / len(keys)))
            rounding = 1e-5 + 1e-7 * abs(score)
            assert off < rounding, f"{about}: so the weights are equal; saw {short_row(seen[r, i, keys])}"


def check_all_numbers(lengths, num_new, max_len, num_kv_heads, group, generator):
    """Random scores and values: the queries of one KV head have one direction, and the last of each row is the longest."""
    rows, head_dim = len(lengths), 8
    direction = torch.randn(rows, num_kv_heads, head_dim, generator=generator)
    factor = 0.5 + torch.rand(rows, num_new, num_kv_heads * group, generator=generator)
    factor[:, -1, -1] = 200.0
    q = factor[..., None] * direction.repeat_interleave(group, 1)[:, None]
    scores = torch.randn(rows, num_kv_heads, max_len, generator=generator)
    k_all = torch.stack([torch.stack([keys_for(direction[r, g], scores[r, g], generator) for g in range(num_kv_heads)], 1)
                         for r in range(rows)])  # fmt: skip
    v_all = torch.randn(rows, max_len, num_kv_heads, head_dim, generator=generator)
    k_cache, v_cache = k_all.clone(), v_all.clone()
    for r, n in enumerate(lengths):
        k_cache[r, n:], v_cache[r, n:] = (math.nan, math.nan) if r % 2 == 0 else (math.inf, -math.inf)
    k, v = (torch.stack([every[r, n : n + num_new] for r, n in enumerate(lengths)]) for every in (k_all, v_all))
    out = attend_batch(q.clone(), k, v, k_cache, v_cache, told(lengths, num_new, max_len))
    out = tensor_of(out, "attend_batch", *q.shape)
    for r, n in enumerate(lengths):
        for i in range(num_new):
            for h in range(num_kv_heads * group):
                weights = (factor[r, i, h] * scores[r, h // group, : n + i + 1].double()).softmax(0)
                off = difference(out[r, i, h], (weights @ v_all[r, : n + i + 1, h // group].double()).float())
                assert off < 1e-3 if factor[r, i, h] == 200 else off < 1e-5, (
                    f"lengths {lengths}, {num_new} new tokens, {num_kv_heads} KV heads, {num_kv_heads * group} heads: row {r}, "
                    f"new token {i}, head {h} is off by {off:.2g}"
                )


check_rows([2, 5], num_new=1, max_len=8)
check_rows([4, 1], num_new=2, max_len=8)
check_rows([0, 6], num_new=2, max_len=8)
check_all_numbers([0, 3], num_new=2, max_len=6, num_kv_heads=1, group=2, generator=rng("rows"))
with drawn("check_batch_rows") as draw:
    for rows, num_new, num_kv_heads, group in (
        (1, 1, 2, 3),
        (2, 3, 1, 3),
        (3, 2, 3, 1),
        (4, 2, 2, 2),
        (9, 4, 3, 4),
    ):
        for max_len in (12, 300) if rows == 3 else (12,):
            most = max_len - num_new
            lengths = [random_int(1, most - 1, draw) for _ in range(rows)]
            if rows > 3:
                lengths[1:4] = [2, 2, most - 1]  # two of the same length, and not from long to short
            lengths[-1], lengths[0] = 0, most  # a row that begins, and one that becomes full
            check_rows(lengths, num_new, max_len, score=(-1e30, 0.0, 300.0, -30_000.0)[rows % 4])
            check_all_numbers(lengths, num_new, max_len, num_kv_heads, group, draw)


# %% nbgrader={"grade_id": "check_batch_writes", "grade": true, "points": 1}
# property: the caches you were given hold each row's new keys and values at its own positions; nothing else changed.
# question: After your function returns, does the caller's tensor hold the new keys, or does a copy?
# hint: write into k_cache[r, lengths[r] : lengths[r] + num_new] of the tensors you were given, not into copies.
# explanation: Rows with 2 and 5 tokens, 2 new ones each: row 0's slots 2 and 3 and row 1's slots 5 and 6 get the new
#   keys and values; every other number is what it was. An operation that makes a new tensor leaves the caller's cache
#   as it was, and the next step lacks these tokens.
def check_writes(lengths, num_new, max_len, generator):
    rows = len(lengths)
    k_cache, v_cache = torch.randn(2, rows, max_len, 2, 4, generator=generator)
    k, v = torch.randn(2, rows, num_new, 2, 4, generator=generator)
    q = torch.randn(rows, num_new, 4, 4, generator=generator)
    for r, n in enumerate(lengths):
        k_cache[r, n + num_new + 1 :], v_cache[r, n + num_new + 1 :] = math.nan, math.nan
    caches, before = (k_cache, v_cache), (k_cache.clone(), v_cache.clone())
    given = (q.clone(), k.clone(), v.clone(), k_cache, v_cache, told(lengths, num_new, max_len))
    unchanging(attend_batch, but=(3, 4))(*given)
    for r, n in enumerate(lengths):
        slots = list(range(n, n + num_new))
        for name, cache, was, new in zip(("keys", "values"), caches, before, (k, v), strict=True):
            changed = [p for p in range(max_len) if not torch.equal(*(t[r, p].nan_to_num(9e9) for t in (cache, was)))]
            print(f"row {r} holds {n}, {num_new} new: slots {changed} of its {name} changed")
            same = torch.equal(cache[r, slots], new[r]) and changed == slots
            what = f"slots {changed} changed" if changed != slots else "other numbers are there"
            assert same, f"row {r}, {what}: slots {slots} must hold its new {name} and all others what they held"


check_writes([2, 5], num_new=1, max_len=8, generator=rng("writes"))
check_writes([0, 3], num_new=1, max_len=8, generator=rng("writes"))
with drawn("check_batch_writes") as draw:
    for rows, num_new in ((1, 2), (2, 1), (5, 3)):
        lengths = [random_int(1, 11 - num_new, draw) for _ in range(rows)]
        if rows > 3:
            lengths[1:3] = [2, 7]  # not from long to short
        lengths[-1], lengths[0] = 0, 12 - num_new  # a row that begins, and one that becomes full
        check_writes(lengths, num_new, 12, draw)

# %% [markdown] nbgrader={"grade_id": "text_padding"}
# ### The cost of padding, and the limits of masks
#
# Per-row positions have to be computed, and the mask follows from them; it does not replace them. The rotary embedding
# needs the same positions. And a mask hides scores that are computed anyway. The cell below takes three prompts of 3, 5
# and 2 tokens. Packed into one row of 10 tokens with one big mask they take more scores than padded, and several times
# the necessary ones. Engines run the linear layers on the packed tokens and attention per sequence, which needs no mask
# between sequences at all.

# %% nbgrader={"grade_id": "padding"} inferlab={"where": "notebook"}
prompts = (3, 5, 2)
needed, packed, padded = sum(n * n for n in prompts), sum(prompts) ** 2, len(prompts) * max(prompts) ** 2
print(f"scores: {needed} per sequence, {padded} padded to {max(prompts)}, {packed} packed under one mask")
slots = len(prompts) * max(prompts)
print(f"cache slots reserved when padded: {slots}, of which {1 - sum(prompts) / slots:.0%} hold nothing")


# %% [markdown] nbgrader={"grade_id": "text_budget"}
# ## 8. How many tokens fit
#
# Each token leaves one key and one value per layer and KV head:
# bytes per token = 2 × layers × KV heads × head_dim × bytes per value.
#
# **Build** `max_new_tokens(budget_bytes, num_users, config, prompt_len, bytes_per_value=2)`: how many tokens each of
# `num_users` users can still *generate* if they share `budget_bytes` of cache evenly and each has a prompt of
# `prompt_len` tokens. An int, never below 0.
#
# - `config` is a dict as in a model's `config.json`: `num_hidden_layers`, `hidden_size`, `num_attention_heads`,
#   `num_key_value_heads`, `head_dim`.
#
# **Hint:** `//` rounds down. `head_dim` is an independent number: in some models it is not `hidden_size /
# num_attention_heads`.
#
# **Trap (total context):** memory divided by bytes per token is the whole context, prompt *and* output.


# %% nbgrader={"grade_id": "max_new_tokens", "solution": true}
def max_new_tokens(budget_bytes, num_users, config, prompt_len, bytes_per_value=2):
    """Tokens each user can generate after a prompt of prompt_len; budget_bytes is shared evenly."""
    ### BEGIN SOLUTION
    values_per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    context = budget_bytes // (num_users * values_per_token * bytes_per_value)
    return max(0, context - prompt_len)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_budget", "grade": true, "points": 1}
# property: tokens left = budget / users / bytes per token - prompt; KV heads count, query heads do not.
# question: Which heads have keys and values that are stored: those of the queries?
# hint: 2 x layers x KV heads x head_dim x bytes for one token; a prompt of the whole budget leaves 0.
# explanation: A model with 2 layers, 4 KV heads, head_dim 8 and 2 bytes per value: one token takes 2 × 2 × 4 × 8 × 2 =
#   256 bytes. 10,000 bytes for 2 users are 5,000 each, 19 whole tokens. With a prompt of 15 there are 4 left to
#   generate; with a prompt of 30 none, and not -11.
qwen25_72b = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
qwen3_06b = {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
budget = 180_000_000_000  # bytes left for the cache


def whole(seen):
    assert isinstance(seen, numbers.Integral), f"expected an int, saw {short(seen)}"
    return seen


for users, prompt_len, expected in (
    (50, 0, 10_986),
    (100, 0, 5_493),
    (50, 4_096, 6_890),
    (50, 10_986, 0),
    (50, 20_000, 0),
):
    seen = whole(unchanging(max_new_tokens)(budget, users, dict(qwen25_72b), prompt_len))
    print(f"Qwen2.5-72B, 180 GB, {users} users, prompts of {prompt_len}: {seen} new tokens each")
    assert seen == expected, f"{users} users, prompts of {prompt_len}: expected {expected} new tokens, saw {seen}"
seen = whole(unchanging(max_new_tokens)(1_000_000_000, 1, dict(qwen3_06b), 0))
print(f"Qwen3-0.6B (head_dim 128, hidden_size / heads 64), 1 GB, one user: {seen}")
assert seen == 8_719, f"Qwen3-0.6B, 1 GB, one user: expected 8719 tokens, saw {seen}"
with drawn("check_budget") as draw:
    for case_number in range(8):
        kv_heads = (1, 96, 8, random_int(2, 64, draw))[case_number % 4]
        config = {
            "num_hidden_layers": random_int(2, 80, draw),
            "hidden_size": 64 * random_int(4, 128, draw),
            "num_attention_heads": kv_heads * random_int(2, 8, draw),
            "num_key_value_heads": kv_heads,
            "head_dim": 32 * random_int(1, 8, draw),
        }
        users, bytes_per_value = random_int(2, 60, draw), 1 + case_number % 4
        one = 2 * config["num_hidden_layers"] * kv_heads * config["head_dim"] * bytes_per_value
        context = random_int(10, 5000, draw) if case_number else 2_000_003
        for rest in (0, one * users - 1):  # not one byte more than they fill, and one too few for another token each
            for prompt_len in (0, random_int(1, context - 2, draw), context - 1, context, context + 7):
                total = context * one * users + rest
                seen = whole(unchanging(max_new_tokens)(total, users, dict(config), prompt_len, bytes_per_value))
                case = f"{total} bytes, {users} users, {config}, {bytes_per_value} bytes per value, prompts of {prompt_len}"
                expected = max(0, context - prompt_len)
                assert seen == expected, f"{case}: expected {expected}, saw {seen}"

# %% [markdown] nbgrader={"grade_id": "text_drill"}
# For more practice, the cell below draws a model, a machine and questions about them. Put your answer into the last
# line; change the seed for another drill.

# %% nbgrader={"grade_id": "drill"} inferlab={"where": "notebook"}
from reference_impl.theory import drills

drill = drills.make_drill(seed=2)
print(drill.describe())
for question in drill.questions:
    print(f"\n{question.key}: {question.prompt} [{question.unit}]")
print("\n" + drills.check(drill, drill.questions[0].key, given=1.0).message)

# %% [markdown] nbgrader={"grade_id": "text_engine"}
# ## 9. Inside the engine
#
# The engine asks an *attention backend* for attention over a batch of ragged rows. `AttentionByRequest` is one that
# makes one call per request, and the cell below implements it with your code: one `KVCache` per request and layer, and
# `attention_step` with your `attend`. Each cache has a capacity of exactly prompt + output - 1 tokens. The engine's
# scheduler, model and sampler stay as they are; prompts are split into chunks, and two requests of unequal length run
# together.
#
# Each call also has the result of the engine's own attention, to tell you at the first difference which property
# failed. The model continues with your output. The tokens must be those that the engine generates by itself.


# %% nbgrader={"grade_id": "engine_parts"}
from reference_impl.assembly.lab_parts import AttentionByRequest, LabEngine, course_llm

course_llm("draft")  # loads a model of two layers, once for all the cells below


class YourAttention:
    """Attention of one request at a time with your parts. max_len: capacity of the caches, by request id."""

    def __init__(self, max_len):
        self.max_len = max_len
        self.caches = {}  # (request id, layer) -> your KVCache
        self.lengths = {}  # (request id, layer) -> tokens it must hold

    def __call__(self, asked):
        of, num_new = (asked.request_id, asked.layer), len(asked.q)
        if asked.num_before == 0:  # the request begins
            self.caches[of] = KVCache(asked.k.shape[1], asked.k.shape[2], self.max_len[asked.request_id])
        self.lengths[of] = asked.num_tokens
        seen = attended(attention_step(self.caches[of], attend, asked.q, asked.k, asked.v), *asked.q.shape)
        off = difference(seen, asked.expected)
        assert off <= 1e-4, (
            f"request {asked.request_id}, layer {asked.layer}, {num_new} new of {asked.num_tokens} tokens: "
            + _first_failing(self.caches[of], asked.keys, asked.values, off)
        )
        return seen


def _first_failing(cache, keys, values, off):
    """keys, values: the engine's own for the request, in order."""
    if len(cache) != len(keys):
        return f"append or len() is wrong: the cache must hold {len(keys)} tokens, len() says {len(cache)}"
    seen_keys, seen_values = shown(cache, *keys.shape)
    if difference(seen_keys, keys) > 0 or difference(seen_values, values) > 0:
        return "append or view() is wrong: the cache does not show the keys and values that were appended"
    return f"the cache is right, attention_step or attend is not: the output is off by {off:.2g}"


def serve(name, prompts, num_new_tokens, attention=None, max_num_batched_tokens=16):
    """Greedy output of a course model for prompts of token ids, all in one engine, in chunks."""
    # A hit in the engine's prefix cache would skip tokens that are not in your cache.
    options = {"num_blocks": 64, "max_num_batched_tokens": max_num_batched_tokens, "prefix_cache": "off"}
    engine = LabEngine(course_llm(name), options, attention=attention)
    for prompt in prompts:
        engine.add(prompt, num_new_tokens)
    return list(engine.run().values())


def check_served(name, prompts, num_new_tokens, max_num_batched_tokens):
    """Serves with and without your parts, and compares; returns the tokens. name: of the course model."""
    max_len = {str(i): len(prompt) + num_new_tokens - 1 for i, prompt in enumerate(prompts)}
    yours = YourAttention(max_len)
    attention = AttentionByRequest(course_llm(name).engine.attention, yours)
    seen = serve(name, prompts, num_new_tokens, attention, max_num_batched_tokens)
    expected = serve(name, prompts, num_new_tokens, None, max_num_batched_tokens)
    assert seen == expected, f"the engine generates {expected}, with your pieces it generated {seen}"
    for (request_id, layer), cache in yours.caches.items():
        held, length = yours.lengths[request_id, layer], len(cache)
        assert length == held, f"request {request_id}, layer {layer}: {held} tokens were appended, len() says {length}"
        at_end = max_len[request_id]
        assert held == at_end, f"request {request_id}: prompt + output - 1 = {at_end} tokens must be cached, saw {held}"
    return seen


# %% nbgrader={"grade_id": "check_engine", "grade": true, "points": 2}
# property: the engine serves the same tokens with your cache and attention as with its own.
# question: Which part does the message name first, and does its own check pass?
# hint: the message names the first property that failed; make that part's own checks pass first.
# explanation: The engine feeds prompts in chunks and several requests at once, so each request's cache sees pieces of
#   all sizes, between those of others. What passes alone and fails here shares something between caches, or takes a
#   chunk in the middle of a prompt for its beginning.
texts = ["def add(a, b):\n", "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read("]
prompts = [course_llm().encode(text) for text in texts]
print("prompts of", [len(prompt) for prompt in prompts], "tokens, at most 8 new tokens a step")
for text, tokens in zip(
    texts, check_served("target", prompts, num_new_tokens=6, max_num_batched_tokens=8), strict=True
):
    print(repr(text), "->", repr(course_llm().tokenizer.decode(tokens)))
check_served("draft", [prompts[0]], num_new_tokens=2, max_num_batched_tokens=4)  # a model with one KV head
### BEGIN HIDDEN TESTS
draw = rng("check_engine")
prompts = [
    torch.randint(100, 4000, (random_int(low, high, draw),), generator=draw).tolist()
    for low, high in ((2, 9), (15, 40))
]
check_served("draft", prompts, num_new_tokens=4, max_num_batched_tokens=random_int(6, 20, draw))
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_measure"}
# ## 10. Operations and seconds
#
# Now your two generators run the course model itself, with and without its cache, and are timed. The ratio of tokens is
# exact. The ratio of seconds depends on this machine, so it is printed and never checked.
#
# You will read that a KV cache makes generation 40 or 50 times faster. Your measurement is likely far below that, and
# below the ratio of tokens. The reasons:
#
# - Both ways make the same number of calls, and a call has a fixed cost: Python, kernel launches, reading every weight
#   once. For a small model and a short sequence that is most of the time.
# - Many tokens in one call are cheaper per token than one alone, because each weight is read once and used for all of
#   them. The run without a cache computes its many tokens in that cheaper way.
# - So the ratio grows with the length, and with the size of the model, and no single number describes it. The last line
#   shows the ratio of tokens for a commonly quoted example (prompt 16, 256 new tokens): it is the most that the linear
#   layers could gain.

# %% nbgrader={"grade_id": "measure"} inferlab={"where": "notebook"}
import time

from reference_impl.features.baselines.contiguous_cache import ContiguousAttention, ContiguousKVCache
from reference_impl.features.baselines.ragged import ragged_batch


class CourseModel:
    """The course model as model(tokens, start), with one contiguous cache."""

    def __init__(self, decoder, max_len):
        self.decoder, self.max_len, self.num_tokens = decoder, max_len, 0
        self.cache = ContiguousKVCache(decoder, rows=1, max_len=max_len)
        self.attention = ContiguousAttention(decoder.config.head_dim**-0.5)

    @torch.inference_mode()
    def forward(self, tokens, start):
        self.num_tokens += len(tokens)
        batch = ragged_batch([(tokens, start)], self.max_len, self.decoder.device)
        return self.decoder(batch, self.cache, self.attention)[0]


decoder, prompt = course_llm().engine.model, course_llm().encode("import os\n\n\ndef find(folder, name):\n")
for N in (8, 32, 96):
    outputs, tokens, seconds = [], [], []
    for generate, extra in ((generate_no_cache, ()), (generate_cached, (512,))):
        model = CourseModel(decoder, max_len=len(prompt) + N)
        started = time.perf_counter()
        outputs.append(generate(model.forward, list(prompt), N, *extra))
        seconds.append(time.perf_counter() - started)
        tokens.append(model.num_tokens)
    same = "same tokens" if outputs[0] == outputs[1] else "tokens differ (a near tie, or a bug)"
    print(f"S={len(prompt)}, N={N}: {tokens[0]:6d} against {tokens[1]:4d} tokens = {tokens[0] / tokens[1]:5.1f}x, "
          f"{seconds[0]:6.2f} against {seconds[1]:5.2f} s = {seconds[0] / seconds[1]:4.1f}x, {same}")  # fmt: skip
(tokens_without, _), (tokens_with, _) = closed_forms(16, 256)
print(f"S=16, N=256: {tokens_without} against {tokens_with} tokens = {tokens_without / tokens_with:.0f}x")

# %% [markdown] nbgrader={"grade_id": "text_milestone"}
# ## 11. Your cache serves a text
#
# Your `KVCache` keeps every key and value of this text, in all layers, and your `attend` reads them. With all checks
# passed, `inferlab lab check` shows this, too.

# %% nbgrader={"grade_id": "milestone"} inferlab={"where": "milestone"}
from reference_impl.assembly.lab_parts import DEMO_PROMPT, show_served

prompt = course_llm().encode(DEMO_PROMPT)
yours = YourAttention({"0": len(prompt) + 19 - 1})
attention = AttentionByRequest(course_llm().engine.attention, yours)
engine = LabEngine(course_llm(), {"num_blocks": 64, "prefix_cache": "off"}, attention=attention)
engine.add(prompt, 19)
engine.run()
show_served("Your cache just served this text", engine, course_llm())
held = len(yours.caches["0", 0])
print(f"Your caches, one for each of {len(yours.caches)} layers, hold {held} tokens each.")

# %% [markdown] nbgrader={"grade_id": "extensions"}
# ## Further (not graded)
#
# Add cells below and try one. Each is the subject of another lab.
#
# - **Shared prefix.** Two requests begin with the same 100 tokens. Let the second start with a copy of the first one's
#   rows, and count what `generate_cached` still has to feed. What must you recompute if *all* of the prompt is already
#   cached? (Lab 06.)
# - **Blocks.** Replace the one buffer by blocks of 16 tokens and a list of block numbers, with the same `append` and
#   `view`. Your checks above still hold. How much memory does a short request reserve now? (Lab 04.)
# - **Temperature and top-p.** Replace `argmax` by a draw. When is the output still the same with and without a cache?
#   (Lab 01.)
# - **A draft model.** Let a small model guess four tokens and feed them in one call at `start`. What must the model
#   return, and what must be removed from the cache when a guess is wrong? (Lab 08.)
