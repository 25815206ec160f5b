# %% [markdown] nbgrader={"grade_id": "intro"}
# # Lab 12: one model on several ranks
#
# Five ranks each hold a tensor of 1 MB and all need the sum. If each sends its tensor to the four others, a rank sends
# 4 MB. How little can a rank send, so that all still have the whole sum? Write the number down; part 2 counts it.
#
# You build, in this order: who holds which part of a model, the sum over all ranks, the choice between two ways to
# take it, an MLP whose weights are cut, an embedding and an argmax over a cut vocabulary, a schedule of pipeline
# stages, the dispatch of tokens to experts and back, and attention whose keys travel around a ring. At the end two
# ranks of the engine write a text with your sum and your parts.
#
# - A function of yours runs on every rank at the same time, each in a process of its own when it is graded.
# - Hidden checks test the same properties. What is drawn here, they draw from the same functions, with other numbers.
# - An int that you return may be an int of Python, of NumPy or of torch; a list may be a tuple. Arguments belong to
#   the caller: do not modify them. The checks notice.
# - Your own cells may use `torch`, `numpy` and the standard library. Nothing else is available when they are graded.
#
# 20 points.

# %% nbgrader={"grade_id": "imports"} inferlab={"where": "both"}
import math
import numpy as np
import torch


def attend(q, k, v, sees):
    """Given, also to your cells. Attention to some of the keys: (o [queries, heads, head_dim], lse [queries, heads]),
    both float64. q [queries, heads, head_dim]; k, v [keys, heads, head_dim]; sees [queries, keys], bool. lse is the log
    of the sum of exp(score) over the keys that a query sees. Where it sees none, o is 0 and lse is -inf."""
    scores = torch.einsum("qhd,khd->qhk", q.double(), k.double()) / math.sqrt(q.shape[2])
    scores = scores.masked_fill(~sees[:, None, :], -math.inf)
    lse = scores.logsumexp(2)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return torch.einsum("qhk,khd->qhd", weights, v.double()), lse


# %% nbgrader={"grade_id": "tools"}
# Given: helpers of the checks. You may read them, but do not change them.
import operator

from grader.channel import Network
from grader.checks import rng, roles, together, unchanging

SIZES = (1, 2, 3, 5)
WIDE, HALF = torch.float64, torch.float16


class Group:
    """What a rank has of the examiner's network, which counts. Only tensors travel."""

    LEARNER_SEES = ("rank", "size", "send", "recv", "exchange")

    def __init__(self, port):
        self.port, self.rank, self.size = port, port.rank, port.num_ranks

    def send(self, x, to):
        self.port.send(to, only_tensor(x))

    def recv(self, source):
        return self.port.recv(source)

    def exchange(self, messages, sources):
        right = isinstance(messages, dict) and isinstance(sources, list | tuple | range)
        assert right, (
            f"exchange: expected a dict of tensors by rank and a list of ranks, saw {messages!r:.80}, {sources!r:.80}"
        )
        return self.port.exchange({to: only_tensor(x) for to, x in messages.items()}, list(sources))


class Summing(Group):
    """A group that also has a right all_reduce, which is counted."""

    LEARNER_SEES = (*Group.LEARNER_SEES, "all_reduce")

    def __init__(self, port):
        super().__init__(port)
        self.num_sums = 0

    def all_reduce(self, x):
        self.num_sums += 1
        others = [rank for rank in range(self.size) if rank != self.rank]
        found = self.port.exchange({to: only_tensor(x) for to in others}, others)
        found[self.rank] = x
        return sum(found[rank].double() for rank in range(self.size)).to(x.dtype)


def only_tensor(x):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"only tensors travel: expected one, got {x!r:.80}, a {type(x).__name__}")
    return x


def name_of(function):
    """The name under which each rank has this function."""
    return next(name for name, value in globals().items() if value is function)


def on_ranks(ranks, function, arguments, what, network=None, kind=Group):
    """(function(group, *arguments[r]) of each rank r, the network, the groups). Without a network, on one where a send
    waits for its receiver; three ranks also on one where it does not, so that messages come early."""
    if network is None and len(arguments) == 3:
        on_ranks(ranks, function, arguments, what, Network(3), kind)
    network = network or Network(len(arguments), sends_wait=True)
    groups = [kind(port) for port in network.ports]
    calls = [
        lambda r=r: unchanging(getattr(ranks[r], name_of(function)))(groups[r], *arguments[r])
        for r in range(len(arguments))
    ]
    results = together(calls)
    assert not network.num_unread, f"{what}: {network.num_unread} messages were sent and never received"
    return results, network, groups


def drawn(check, *given, cases):
    """The check with each of the cases; what it prints is shown only for one that fails."""
    cases = list(cases)
    for case in cases:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                check(*given, *case)
        except BaseException:
            print(said.getvalue(), end="")
            raise
    print(f"... and {len(cases)} that were drawn")


def int_of(what, value):
    """An int from an int, also of NumPy, or from a tensor with a single int."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    assert whole, f"{what}: expected an int, saw {value!r:.100}, a {type(value).__name__}"
    return int(operator.index(value))


def ints_of(what, seen, count):
    """So many ints, from a list, tuple, tensor or array of them."""
    if isinstance(seen, torch.Tensor | np.ndarray):
        seen = seen.tolist()
    right = isinstance(seen, list | tuple) and len(seen) == count
    assert right, f"{what}: expected {count} ints, saw {seen!r:.100}"
    return [int_of(what, value) for value in seen]


def tensor_of(what, seen, like):
    """A tensor of the shape of `like`, in float64."""
    assert isinstance(seen, torch.Tensor), f"{what}: expected a tensor, saw {seen!r:.80}, a {type(seen).__name__}"
    right = list(seen.shape) == list(like.shape)
    assert right, f"{what}: expected shape {list(like.shape)}, saw {list(seen.shape)}"
    return seen.double()


def check_close(what, seen, expected, scale, dtype):
    """Numbers that are off by no more than rounding a few sums of `scale` in this dtype gives."""
    seen = tensor_of(what, seen, expected)
    off = torch.nan_to_num((seen - expected).abs() / (scale + 1e-30), nan=math.inf).flatten()
    if len(off):
        at = int(off.argmax())
        right = off[at] <= (1e-11 if dtype == WIDE else 1e-2)
        saw = f"expected {float(expected.flatten()[at]):.6g}, saw {float(seen.flatten()[at]):.6g}"
        assert right, f"{what}, element {at} of {len(off)}: {saw}"


def check_alike(what, results):
    """The same bits on all ranks."""
    for rank, result in enumerate(results):
        tensor_of(f"{what}, rank {rank}", result, results[0])
        right = torch.equal(result, results[0]) and result.dtype == results[0].dtype
        assert right, f"{what}: ranks 0 and {rank} have different bits"


def check_sent(what, network, most):
    """No rank sends more than so many bytes, and 64 for each other rank: room for counts, or for empty tensors."""
    room = 64 * (len(network.ports) - 1)
    for rank in range(len(network.ports)):
        limit, seen = (most[rank] if isinstance(most, list) else most) + room, network.bytes_sent_by(rank)
        assert seen <= limit, f"{what}: expected at most {limit} bytes sent by rank {rank}, saw {seen}"


# %% nbgrader={"grade_id": "inputs"}
# Given: inputs that are drawn, for your checks and for hidden ones, which draw with other numbers.
import contextlib
import io
import itertools


def random_int(low, high, generator):
    """An integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def normal(shape, dtype, generator):
    return torch.randn(shape, dtype=WIDE, generator=generator).to(dtype)


def cut(n, size, generator, empty=False):
    """[(start, end)] of `size` consecutive parts of n, of any lengths; empty: one of them has nothing."""
    ends = sorted(random_int(0, n, generator) for _ in range(size - 1))
    if empty and size > 1:
        place = random_int(0, size - 2, generator)
        ends[place] = ends[place - 1] if place else 0
    return list(itertools.pairwise([0, *ends, n]))


def sums(generator):
    """(tensors of the ranks): counts below, at and off multiples of the ranks, of any shape, in both dtypes."""
    for n, dtype in itertools.product(SIZES, (WIDE, HALF)):
        for shape in (
            ((n,), (2 * n + 3, 7))
            if dtype == HALF
            else ((1,), (n + 1,), (random_int(1, 4, generator), random_int(1, 9, generator)))
        ):
            yield ([normal(shape, dtype, generator) for _ in range(n)],)


def layers(generator):
    """(dtype, x [tokens, inputs], up, up's bias, down, down's bias, parts of the columns)."""
    for n, dtype in itertools.product(SIZES, (WIDE, HALF)):
        hidden, columns = random_int(1, 6, generator), random_int(n, 3 * n + 2, generator)
        x = normal((random_int(1, 4, generator), hidden), dtype, generator)
        up, up_bias = normal((columns, hidden), dtype, generator), normal((columns,), dtype, generator)
        down, down_bias = normal((hidden, columns), dtype, generator), normal((hidden,), dtype, generator)
        yield dtype, x, up, up_bias, down, down_bias, cut(columns, n, generator, empty=dtype == HALF)


def vocabularies(generator):
    """(dtype, table [tokens, hidden], ids, parts): rows that are not asked for hold NaN."""
    for n, dtype in itertools.product(SIZES, (WIDE, HALF)):
        vocab, hidden = random_int(n, 20, generator), random_int(1, 5, generator)
        ids = torch.randint(0, vocab, (random_int(1, 7, generator),), generator=generator)
        table = torch.full((vocab, hidden), math.nan, dtype=dtype)
        table[ids] = normal((len(ids), hidden), dtype, generator)
        yield dtype, table, ids, cut(vocab, n, generator, empty=dtype == HALF)


def logits_with_ties(generator):
    """(logits [rows, vocab], the first token's id, parts): few different values, so that many are largest."""
    for n, dtype in itertools.product(SIZES, (WIDE, HALF)):
        for vocab, low in ((random_int(n, 12, generator), 0), (300, 2**24 + 1 if dtype == WIDE else 70_001)):
            logits = torch.randint(-3, 0, (random_int(1, 5, generator), vocab), generator=generator).to(dtype)
            yield logits, low, cut(vocab, n, generator, empty=dtype == HALF)
        yield normal((3, vocab), dtype, generator), low, cut(vocab, n, generator)


def passes_of_requests(generator):
    """(stages, passes of each request)."""
    for stages in (1, 2, 3, 5):
        for count in (1, stages - 1, stages, stages + 2, 9):
            yield stages, [random_int(1, 6, generator) for _ in range(count)]
        yield stages, [*[1] * random_int(1, 6, generator), 7]  # one long one, given last
        yield stages, [3] * stages + [2, 2]


def routes(generator):
    """(dtype, x of each rank, ranks of the chosen experts): a token may choose two on one rank; a rank may be without
    tokens, and one that no token chooses."""
    for n, dtype in itertools.product(SIZES, (WIDE, HALF)):
        hidden, k, last = 40 + random_int(1, 9, generator), random_int(1, 3, generator), max(0, n - 1 - (dtype == HALF))
        counts = [random_int(1, 6, generator) for _ in range(n)]
        counts[random_int(0, n - 1, generator)] = 0
        yield (
            dtype,
            [normal((count, hidden), dtype, generator) for count in counts],
            [torch.randint(0, last + 1, (count, k), generator=generator) for count in counts],
        )


def prompts(generator):
    """(dtype, q, k, v [tokens, heads, head_dim] of a whole prompt, positions of each rank's tokens)."""
    for n, dtype in itertools.product(SIZES, (WIDE, HALF)):
        tokens, heads, dim = (
            random_int(2 * n, 3 * n + 5, generator),
            random_int(1, 2, generator),
            random_int(20, 24, generator),
        )
        q, k, v = (normal((tokens, heads, dim), dtype, generator) for _ in range(3))
        order = torch.arange(tokens) if dtype == WIDE else torch.randperm(tokens, generator=generator)
        yield dtype, 30 * q, k, v, [order[a:b] for a, b in cut(tokens, n, generator, empty=True)]
        zigzag = [torch.arange(tokens).tensor_split(2 * n)[i] for i in range(2 * n)]
        yield dtype, q, k, v, [torch.cat((zigzag[r], zigzag[-1 - r])) for r in range(n)]


# %% [markdown] nbgrader={"grade_id": "text_shard"}
# ## 1. Who holds what
#
# A matrix, a vocabulary or a set of heads is cut into consecutive parts, one for each rank.
#
# **Build** `shard(n, size, rank)`: the pair (start, end) of this rank's part of n things among `size` ranks, end not
# included. Lengths differ by at most one: the first ranks have one more than the others. n may be less than `size`;
# then some parts are empty, and start = end.
#
# **Build** `heads(num_heads, num_kv_heads, size, rank)`: four ints, (first query head, end, first KV head, end), of
# this rank. `num_kv_heads` divides `num_heads`; each KV head has a *group* of `num_heads / num_kv_heads` query heads
# in a row.
#
# - Up to as many ranks as KV heads: the KV heads are cut as `shard` says, and a rank has the groups of its KV heads.
# - More ranks than KV heads: each KV head is kept by `size / num_kv_heads` ranks in a row, which cut its group as
#   `shard` says. Where that is no whole number, or larger than the group, return `None`.
#
# **Trap (group):** query head h reads KV head h // group. A rank with query heads 2 and 3 of eight over four KV heads
# keeps KV head 1.


# %% nbgrader={"grade_id": "shard", "solution": true}
def shard(n, size, rank):
    """(start, end) of this rank's part of n things."""
    ### BEGIN SOLUTION
    each, more = divmod(n, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)
    ### END SOLUTION


# %% nbgrader={"grade_id": "heads", "solution": true}
def heads(num_heads, num_kv_heads, size, rank):
    """(first query head, end, first KV head, end) of this rank, or None where the heads cannot be divided."""
    ### BEGIN SOLUTION
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        start, end = shard(num_kv_heads, size, rank)
        return group * start, group * end, start, end
    copies, rest = divmod(size, num_kv_heads)
    if rest or copies > group:
        return None
    kv, place = divmod(rank, copies)
    start, end = shard(group, copies, place)
    return group * kv + start, group * kv + end, kv, kv + 1
    ### END SOLUTION


# %% nbgrader={"grade_id": "part_tools"}
# Given: what is right about parts.
def right_length(n, size, rank):
    """How many of n things a rank has."""
    return len(range(rank, n, size))  # as many as it would get if they were dealt out in turn, from the first rank on


def check_parts(what, n, size, parts):
    """Parts follow one another, hold all n things, and have the right lengths."""
    at = 0
    for rank, (start, end) in enumerate(parts):
        length = right_length(n, size, rank)
        right = (start, end) == (at, at + length)
        assert right, f"{what}: expected {at} to {at + length} on rank {rank} of {size}, saw {start} to {end}"
        at = end


# %% nbgrader={"grade_id": "check_shard", "grade": true, "points": 1}
# property: the parts of all ranks follow one another, hold everything, and the first ranks have one more.
# question: 7 things on 3 ranks: how many does each rank have, and where does rank 1 begin?
# hint: a part begins where the lengths of the parts before it end; divmod(n, size) says what all have, and what is left.
# explanation: 12 things on 4 ranks: each has 3, and rank 2 has 6 to 9, since two parts of 3 come before. Of 13 things one
#   is left over, and the text says which ranks such things go to; all parts behind begin later by it. With 0 things
#   every part is empty, and start = end.
def check_shards(n, size):
    what = f"{n} things"
    parts = [ints_of(what, unchanging(shard)(n, size, rank), 2) for rank in range(size)]
    print(f"{what} on {size} ranks: {parts}")
    check_parts(what, n, size, parts)


for n, size in ((7, 3), (6, 3), (2, 3), (0, 2), (5, 1), (9, 5)):
    check_shards(n, size)
numbers = rng("shards")
drawn(check_shards, cases=[(random_int(0, 200, numbers), random_int(1, 9, numbers)) for _ in range(12)])
### BEGIN HIDDEN TESTS
numbers = rng("check_shard")
for size in (1, 2, 3, 5, 8):
    for n in (0, 1, size - 1, size, size + 1, 3 * size - 1, random_int(20, 10**6, numbers)):
        check_shards(n, size)
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_heads", "grade": true, "points": 1}
# property: each query head is on one rank together with its KV head; KV heads repeat only where ranks are more; None
#   where the heads cannot be divided.
# question: 8 query heads over 2 KV heads on 4 ranks: which KV head does rank 2 keep, and which query heads?
# hint: up to num_kv_heads ranks cut KV heads; beyond, divmod(rank, copies) says which KV head, and which of its
#   copies.
# explanation: 8 query heads over 4 KV heads on 2 ranks: rank 0 has KV heads 0 and 1 with query heads 0 to 4. On 8 ranks
#   each KV head is kept twice, and each rank has one query head; rank 5 has KV head 2 and query head 5. On 6 ranks a KV
#   head would be kept 6/4 times: None.
def check_divided(num_heads, num_kv_heads, size):
    what, group = f"{num_heads} query heads over {num_kv_heads} KV heads on {size} ranks", num_heads // num_kv_heads
    seen = [unchanging(heads)(num_heads, num_kv_heads, size, rank) for rank in range(size)]
    print(f"{what}: {seen}")
    if size > num_kv_heads and (size % num_kv_heads or size > num_heads):
        assert all(one is None for one in seen), f"{what}: expected None on every rank, saw {seen}"
        return
    seen = [ints_of(what, one, 4) for one in seen]
    if size <= num_kv_heads:
        check_parts(f"{what}, KV heads", num_kv_heads, size, [one[2:] for one in seen])
        for rank, (start, end, kv, kv_end) in enumerate(seen):
            right = (start, end) == (group * kv, group * kv_end)
            own = f"query heads {group * kv} to {group * kv_end}"
            assert right, f"{what}: KV heads {kv} to {kv_end} have {own}, rank {rank} has {start} to {end}"
        return
    copies = size // num_kv_heads
    for kv in range(num_kv_heads):
        own = seen[kv * copies : (kv + 1) * copies]
        assert all(one[2:] == [kv, kv + 1] for one in own), (
            f"{what}: expected KV head {kv} alone on ranks {kv * copies} to {kv * copies + copies - 1}, saw {own}"
        )
        check_parts(
            f"{what}, query heads of KV head {kv}",
            group,
            copies,
            [(a - group * kv, b - group * kv) for a, b, *_ in own],
        )


for case in ((8, 4, 2), (8, 2, 4), (6, 3, 2), (6, 3, 4), (6, 2, 8), (32, 8, 8), (4, 4, 1), (10, 2, 4)):
    check_divided(*case)
### BEGIN HIDDEN TESTS
for kv, group, size in itertools.product((1, 2, 3, 8), (1, 2, 5), (1, 2, 3, 4, 5, 6)):
    check_divided(kv * group, kv, size)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_group"}
# ## 2. The sum over all ranks
#
# A function of a rank gets a `group`:
#
# - `group.rank`, from 0 on, and `group.size`, how many ranks there are.
# - `group.send(x, to)` sends a copy of a tensor to another rank, `group.recv(source)` waits for the next one from a
#   rank.
# - `group.exchange(messages, sources)` does several at once: `messages` is a dict, {rank: tensor to send to it};
#   `sources` is a list of ranks; it returns a dict, {source: tensor}. Either may be empty.
#
# Only tensors travel. What is sent has to be received. Your functions run on two networks: on one a `send` returns
# when its message was received, as in gloo and MPI. There, ranks that all send first wait for each other without end;
# the message of the check then says which rank waits for which. An `exchange` sends and receives at the same time.
#
# The network counts bytes and time. A message takes α seconds to arrive after its last byte has left, and each byte
# takes β seconds to leave; the messages of a rank leave one after another. Computing takes no time.
#
# **Build** `all_reduce(group, x)`: a new tensor, the sum of all ranks' x, on every rank. x has the same shape and
# dtype on all ranks, any shape, float64 or float16; the result has them, too.
#
# - Every rank gets the same bits. Rounding depends on the order in which numbers are added, so each number's sum is
#   taken on one rank, or in the same order on all.
# - A rank sends no more than 2 (n − 1) parts of ⌈N / n⌉ numbers, with N numbers in x and n ranks.
# - It takes at most 2 (n − 1) messages one after another.
#
# **Hint:** flatten x and cut it in n parts. In a ring, each rank sends to the next one: n − 1 times a part to which
# the next one adds its own, and n − 1 times a part that is finished.
#
# **Trap (remainder):** N need not be a multiple of n, and can be smaller.


# %% nbgrader={"grade_id": "all_reduce", "solution": true}
def all_reduce(group, x):
    """The sum of all ranks' x, on every rank."""
    ### BEGIN SOLUTION
    n, rank = group.size, group.rank
    parts, after, before = list(x.flatten().tensor_split(n)), (rank + 1) % n, (rank - 1) % n
    for turn in range(n - 1):  # a part is added to on its way
        got = group.exchange({after: parts[(rank - turn) % n]}, [before])
        parts[(before - turn) % n] = parts[(before - turn) % n] + got[before]
    for turn in range(n - 1):  # a finished part is handed on
        got = group.exchange({after: parts[(after - turn) % n]}, [before])
        parts[(rank - turn) % n] = got[before]
    return torch.cat(parts).view(x.shape)
    ### END SOLUTION


# %% nbgrader={"grade_id": "sum_tools"}
# Given: a sum over ranks, and what is right about it.
def check_sum_of(ranks, function, tensors):
    """Values and bits of all_reduce or one_shot."""
    x = tensors[0]
    what = f"{len(tensors)} ranks, x {list(x.shape)} {str(x.dtype)[6:]}"
    results, network, _ = on_ranks(ranks, function, [(x,) for x in tensors], what)
    print(f"{what}: {network.num_messages} messages")
    wide = torch.stack([x.double() for x in tensors])
    for rank, result in enumerate(results):
        check_close(f"{what}, rank {rank}", result, wide.sum(0), wide.abs().sum(0), x.dtype)
        assert result.dtype == x.dtype, f"{what}, rank {rank}: expected {x.dtype}, saw {result.dtype}"


def check_bits_of(ranks, function, tensors):
    what = f"{len(tensors)} ranks, x {list(tensors[0].shape)} {str(tensors[0].dtype)[6:]}"
    results, _, _ = on_ranks(ranks, function, [(x,) for x in tensors], what)
    check_alike(what, results)
    wide = torch.stack([x.double() for x in tensors])
    check_close(what, results[0], wide.sum(0), wide.abs().sum(0), tensors[0].dtype)


def uneven(n, count, dtype, generator):
    """Tensors [count] of n ranks whose sum depends on the order in which they are added."""
    return [normal((count,), dtype, generator) * 10.0 ** random_int(-2, 2, generator) for _ in range(n)]


# %% nbgrader={"grade_id": "check_sum", "grade": true, "points": 1}
# property: every rank has the sum of all, for any shape and any number of ranks.
# question: After the first n - 1 turns of the ring, which part is finished on rank r?
# hint: tensor_split cuts any number of elements, also fewer than ranks; view the result in the shape of x.
# explanation: Three ranks with 1 2 3, 10 20 30 and 100 200 300. In the first turn rank 0 sends its part 0, and rank 1
#   has 11 there; in the second it sends that on, and rank 2 has 111: part 0 is finished on rank 2. Then 111 goes
#   round.
with roles(5) as ranks:
    check_sum_of(ranks, all_reduce, [torch.tensor([1.0, 2, 3]) * 10**r for r in range(3)])
    for n in SIZES:
        check_sum_of(ranks, all_reduce, [torch.arange(6, dtype=WIDE).view(2, 3) + r for r in range(n)])
    drawn(check_sum_of, ranks, all_reduce, cases=sums(rng("sums")))
### BEGIN HIDDEN TESTS
numbers = rng("check_sum")
with roles(7) as ranks:
    drawn(check_sum_of, ranks, all_reduce, cases=sums(numbers))
    for n in (4, 7):
        check_sum_of(ranks, all_reduce, [normal((11,), WIDE, numbers) for _ in range(n)])
    for n in (2, 3):  # no dimension, no element
        check_sum_of(ranks, all_reduce, [normal((), WIDE, numbers) for _ in range(n)])
        check_sum_of(ranks, all_reduce, [normal((0, 3), WIDE, numbers) for _ in range(n)])
        check_sum_of(ranks, all_reduce, [normal((3, 5), HALF, numbers).t() for _ in range(n)])
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "check_bits", "grade": true, "points": 1}
# property: the sum of all has the same bits on every rank.
# question: In which order does rank 0 add the numbers of element 0, and in which order does rank 2?
# hint: let one rank finish a part, and hand the finished part on without adding to it.
# explanation: In float16, (1 + 1000) + -1000 is 1, and 0.1 + 1000 rounds to 1000, so (0.1 + 1000) - 1000 is 0 and 0.1
#   + (1000 - 1000) is 0.1. Ranks that add in their own order may then choose different tokens, and their texts part.
numbers = rng("bits")
with roles(5) as ranks:
    drawn(check_bits_of, ranks, all_reduce, cases=[(uneven(n, c, HALF, numbers),) for n in SIZES for c in (7, 200)])
### BEGIN HIDDEN TESTS
numbers = rng("check_bits")
with roles(5) as ranks:
    for n, dtype in itertools.product(SIZES, (HALF, WIDE)):
        check_bits_of(ranks, all_reduce, uneven(n, random_int(300, 400, numbers), dtype, numbers))
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_bytes", "grade": true, "points": 1}
# property: for the sum a rank sends at most 2 (n - 1) parts of N / n numbers, in at most 2 (n - 1) messages one after
#   another.
# question: How many numbers does one message of yours hold, and how many messages does a rank send?
# hint: send a part and never the whole tensor; a part that is on its way is in one rank's hands at a time.
# explanation: Five ranks, 500 numbers of 8 bytes: a part is 100 numbers, 800 bytes. Eight messages of a part are 6,400
#   bytes, 1.6 times the tensor. Sending the tensor to the four others would be 16,000, and through a tree the root
#   sends more than others.
def check_cost(ranks, n, count, dtype):
    what, size = f"{n} ranks, {count} numbers of {dtype.itemsize} bytes", math.ceil(count / n) * dtype.itemsize
    tensors = [torch.ones(count, dtype=dtype) for _ in range(n)]
    network = Network(n, sends_wait=True, alpha=1.0)
    results, _, _ = on_ranks(ranks, all_reduce, [(x,) for x in tensors], what, network)
    whole, turns = torch.full((count,), float(n), dtype=WIDE), max(network.times)
    for rank, result in enumerate(results):
        check_close(f"{what}, rank {rank}", result, whole, whole, dtype)
    print(f"{what}: a rank sends at most {max(map(network.bytes_sent_by, range(n)))} bytes, {turns:.0f} turns")
    check_sent(what, network, 2 * (n - 1) * size)
    limit = 2 * (n - 1)
    assert turns <= limit, f"{what}: expected at most {limit} messages one after another, saw {turns:.0f}"
    network = Network(n, alpha=1.0, beta=1.0)
    on_ranks(ranks, all_reduce, [(x,) for x in tensors], what, network)
    limit = 2 * (n - 1) * (1 + size)
    assert max(network.times) <= limit, (
        f"{what}: expected {limit:.0f} s at most with α = β = 1 s, saw {max(network.times):.0f}"
    )


with roles(5) as ranks:
    for n in SIZES:
        check_cost(ranks, n, 600, WIDE)
### BEGIN HIDDEN TESTS
numbers = rng("check_bytes")
with roles(5) as ranks:
    for n, dtype in itertools.product(SIZES, (WIDE, HALF)):
        check_cost(ranks, n, n * random_int(300, 500, numbers) + 1, dtype)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_one_shot"}
# ## 3. Two ways to take a sum
#
# The ring is made for large tensors. A decoding step sums small ones, and there what counts is how many messages
# follow one another.
#
# **Build** `one_shot(group, x)`: the same sum, as `all_reduce`, but every rank sends its whole x to all others in one
# exchange, and adds what it has. It takes α + (n − 1) N β seconds, with N the bytes of x. Same bits on all ranks.
#
# **Build** `choose(num_bytes, n, alpha, beta)`: `"one_shot"` or `"ring"`, whichever is faster. The ring of part 2
# takes 2 (n − 1) turns of α + (N / n) β. `num_bytes` is N; where both take the same time, either will do.
#
# **Trap (own order):** each rank has its own x first and the others' later. Add in the order of ranks.


# %% nbgrader={"grade_id": "one_shot", "solution": true}
def one_shot(group, x):
    """The sum of all ranks' x, on every rank, after one exchange."""
    ### BEGIN SOLUTION
    others = [rank for rank in range(group.size) if rank != group.rank]
    found = group.exchange(dict.fromkeys(others, x), others)
    total = torch.zeros_like(x)
    for rank in range(group.size):
        total = total + found.get(rank, x)
    return total
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_one_shot", "grade": true, "points": 1}
# property: the sum of all, with the same bits on every rank, in one exchange: alpha + (n - 1) N beta seconds.
# question: In which order does each rank add, and how many exchanges are there?
# hint: one exchange with all others; then a loop over ranks from 0, with your own x in its place.
# explanation: Three ranks, x of 80 bytes, α = 1000 s, β = 1 s: a rank's two messages have left after 160 s, and the
#   last has arrived after 1160 s. Three exchanges one after another would take more than 2000 s.
def check_in_one(ranks, tensors):
    x, n = tensors[0], len(tensors)
    check_sum_of(ranks, one_shot, tensors)
    check_bits_of(ranks, one_shot, tensors)
    network, limit = Network(n, sends_wait=True, alpha=1e6, beta=1.0), (n > 1) * 1e6 + (n - 1) * x.numel() * x.itemsize
    on_ranks(ranks, one_shot, [(x,) for x in tensors], f"{n} ranks", network)
    seen = max(network.times)
    right = seen <= limit + 64 * n
    assert right, f"{n} ranks, x {list(x.shape)}: expected {limit:.0f} s with α = 10⁶ s and β = 1 s, saw {seen:.0f}"


numbers = rng("one shot")
with roles(5) as ranks:
    drawn(
        check_in_one,
        ranks,
        cases=[(uneven(n, c, dtype, numbers),) for n in SIZES for c in (1, 90) for dtype in (HALF, WIDE)],
    )
### BEGIN HIDDEN TESTS
numbers = rng("check_one_shot")
with roles(5) as ranks:
    for n, dtype in itertools.product(SIZES, (HALF, WIDE)):
        check_in_one(ranks, uneven(n, random_int(90, 200, numbers), dtype, numbers))
        check_in_one(ranks, [normal((2, 3), dtype, numbers) for _ in range(n)])
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "choose", "solution": true}
def choose(num_bytes, n, alpha, beta):
    """ "one_shot" or "ring": the faster sum of num_bytes over n ranks."""
    ### BEGIN SOLUTION
    at_once = alpha + (n - 1) * num_bytes * beta
    ring = 2 * (n - 1) * (alpha + num_bytes / n * beta)
    return "one_shot" if at_once <= ring else "ring"
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_choose", "grade": true, "points": 1}
# property: what is chosen takes, on the examiner's network, as long as the faster of both.
# question: For how many bytes do both take the same time, with 8 ranks?
# hint: compute both times by the formulas of the text, and compare; with two ranks one of them always wins.
# explanation: 8 ranks, α = 2 µs, β = 1 s / 450 GB: one-shot takes 2 µs + 7 N β, the ring 28 µs + 1.75 N β. They are
#   equal at N = 26 µs / (5.25 β), 2.2 MB. Below that one-shot is faster. With two ranks both send N bytes, and the
#   ring has one message more.
def seconds_of(way, num_bytes, n, alpha, beta):
    """What the network says: bare messages of the sizes that each way has, without any sum."""
    network = Network(n, alpha=alpha, beta=beta)
    part = torch.zeros(num_bytes if way == "one_shot" else math.ceil(num_bytes / n), dtype=torch.uint8)
    hops = [list(range(1, n))] if way == "one_shot" else [[1]] * (2 * (n - 1))
    for turn in hops:
        for rank, hop in itertools.product(range(n), turn):
            network.ports[rank].send((rank + hop) % n, part)
        for rank, hop in itertools.product(range(n), turn):
            network.ports[rank].recv((rank - hop) % n)
    return max(network.times)


def check_chosen(num_bytes, n, alpha, beta):
    what = f"{num_bytes} bytes, {n} ranks, α {alpha:.3g} s, β {beta:.3g} s"
    times = {way: seconds_of(way, num_bytes, n, alpha, beta) for way in ("one_shot", "ring")}
    seen = unchanging(choose)(num_bytes, n, alpha, beta)
    print(f"{what}: {seen}")
    assert seen in ("one_shot", "ring"), f"{what}: expected 'one_shot' or 'ring', saw {seen!r:.80}"
    took = ", ".join(f"{way} {seconds:.4g} s" for way, seconds in times.items())
    assert times[seen] <= 1.001 * min(times.values()), f"{what}: the network says {took}; chosen was {seen}"


def sizes_around(generator):
    """Messages below, near and above the size at which both take the same time."""
    for n in (2, 3, 5, 8):
        alpha = 10.0 ** random_int(-6, -4, generator)
        for share in (0.01, 0.8, 0.95, 1.05, 1.3, 50):
            size = 40 * n * random_int(2, 9, generator)
            yield size, n, alpha, share * alpha * (2 * n - 3) / (size * (n - 1) * max(1 - 2 / n, 0.1))


for case in ((800, 8, 2e-6, 1e-12), (8000, 8, 2e-6, 1e-8), (4000, 2, 1e-6, 1.0), (100, 1, 1e-6, 1e-9)):
    check_chosen(*case)
drawn(check_chosen, cases=sizes_around(rng("sizes")))
### BEGIN HIDDEN TESTS
drawn(check_chosen, cases=sizes_around(rng("check_choose")))
check_chosen(9000, 5, 0.0, 1e-9)
check_chosen(9000, 5, 1e-6, 0.0)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_mlp"}
# ## 4. A matrix on several ranks
#
# A linear layer is y = x Wᵀ + b, with x `[tokens, inputs]`, W `[outputs, inputs]`, b `[outputs]`. Its W can be cut in
# two ways. From here on `group` has a right `all_reduce`, too: `group.all_reduce(x)`.
#
# **Build** `column_parallel(x, w, b)`: a rank has some *outputs*, w `[own outputs, inputs]` and b `[own outputs]`, and
# the whole x. Return its columns of y, `[tokens, own outputs]`. No message is needed: outputs of ranks are
# concatenated.
#
# **Build** `row_parallel(group, x, w, b)`: a rank has some *inputs*, x `[tokens, own inputs]`, w `[outputs, own
# inputs]`, and the whole b, which every rank holds. Return the whole y on every rank. Outputs of ranks are partial
# sums.
#
# **Build** `mlp(group, x, up, up_bias, down, down_bias)`: relu(x upᵀ + up_bias) downᵀ + down_bias, with the whole x on
# every rank; `up` and `up_bias` are cut by outputs, `down` by inputs at the same places, `down_bias` is whole. One
# `all_reduce` in all. A rank may have no column.
#
# **Trap (bias):** what every rank adds is added n times.


# %% nbgrader={"grade_id": "column_parallel", "solution": true}
def column_parallel(x, w, b):
    """This rank's columns of x W^T + b."""
    ### BEGIN SOLUTION
    return x @ w.T + b
    ### END SOLUTION


# %% nbgrader={"grade_id": "row_parallel", "solution": true}
def row_parallel(group, x, w, b):
    """x W^T + b, whole, from this rank's inputs and the others'."""
    ### BEGIN SOLUTION
    return group.all_reduce(x @ w.T) + b
    ### END SOLUTION


# %% nbgrader={"grade_id": "mlp", "solution": true}
def mlp(group, x, up, up_bias, down, down_bias):
    """relu(x up^T + up_bias) down^T + down_bias with one all_reduce."""
    ### BEGIN SOLUTION
    return row_parallel(group, column_parallel(x, up, up_bias).relu(), down, down_bias)
    ### END SOLUTION


# %% nbgrader={"grade_id": "layer_tools"}
# Given: a layer on several ranks.
def one_sum(what, groups):
    seen = [group.num_sums for group in groups]
    assert set(seen) == {1}, f"{what}: expected one all_reduce on each rank, saw {seen}"


def about(dtype, x, parts):
    return f"{len(parts)} ranks with {[b - a for a, b in parts]} columns, x {list(x.shape)} {str(dtype)[6:]}"


# %% nbgrader={"grade_id": "check_layers", "grade": true, "points": 1}
# property: outputs by columns are concatenated, outputs by rows are summed, and the bias is in them once.
# question: With three ranks, how often is b in the sum of your partial outputs?
# hint: column_parallel adds its part of b; row_parallel adds the whole b once, after the all_reduce.
# explanation: W = [1 2] on two ranks by inputs, x = [3 4], b = 10: rank 0 has 3, rank 1 has 8, the sum is 11, and y is
#   21. With b on each rank before the sum it would be 31. Cut by outputs, y's columns each have their own entry of b.
def check_both(ranks, dtype, x, up, up_bias, down, down_bias, parts):
    what = about(dtype, x, parts)
    expected = x.double() @ up.double().T + up_bias.double()
    scale = x.double().abs() @ up.double().abs().T + up_bias.double().abs()
    for rank, (a, b) in enumerate(parts):
        seen = unchanging(column_parallel)(x.clone(), up[a:b].clone(), up_bias[a:b].clone())
        check_close(f"{what}, column_parallel, rank {rank}", seen, expected[:, a:b], scale[:, a:b], dtype)
    wide = normal((len(x), up.shape[0]), dtype, torch.Generator().manual_seed(len(parts)))
    expected = wide.double() @ down.double().T + down_bias.double()
    scale = wide.double().abs() @ down.double().abs().T + down_bias.double().abs()
    given = [(wide[:, a:b].clone(), down[:, a:b].clone(), down_bias.clone()) for a, b in parts]
    results, _, groups = on_ranks(ranks, row_parallel, given, what, kind=Summing)
    print(f"{what}: row_parallel gives {list(results[0].shape)}")
    for rank, seen in enumerate(results):
        check_close(f"{what}, row_parallel, rank {rank}", seen, expected, scale, dtype)
    one_sum(f"{what}, row_parallel", groups)


with roles(5) as ranks:
    drawn(check_both, ranks, cases=layers(rng("layers")))
### BEGIN HIDDEN TESTS
with roles(5) as ranks:
    drawn(check_both, ranks, cases=layers(rng("check_layers")))
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_mlp", "grade": true, "points": 1}
# property: the MLP of all ranks is that of one, with one all_reduce.
# question: What would an all_reduce between up and down be for?
# hint: a rank's columns of up's output are complete, so relu may follow at once, and they are the inputs of its down.
# explanation: Rank 0 has hidden columns 0 and 1, rank 1 has 2 and 3. Each column is a whole dot product of x with a
#   row of up, so relu of it is right where it is. down cut at the same places turns them into partial sums of y.
def check_whole(ranks, dtype, x, up, up_bias, down, down_bias, parts):
    what = about(dtype, x, parts)
    hidden = (x.double() @ up.double().T + up_bias.double()).relu()
    expected, scale = hidden @ down.double().T + down_bias.double(), hidden @ down.double().abs().T + 5
    given = [
        (x.clone(), up[a:b].clone(), up_bias[a:b].clone(), down[:, a:b].clone(), down_bias.clone()) for a, b in parts
    ]
    results, _, groups = on_ranks(ranks, mlp, given, what, kind=Summing)
    print(f"{what}: {[group.num_sums for group in groups]} all-reduces")
    for rank, seen in enumerate(results):
        check_close(f"{what}, rank {rank}", seen, expected, scale, dtype)
    one_sum(what, groups)


with roles(5) as ranks:
    drawn(check_whole, ranks, cases=layers(rng("an mlp")))
### BEGIN HIDDEN TESTS
with roles(5) as ranks:
    drawn(check_whole, ranks, cases=layers(rng("check_mlp")))
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_vocabulary"}
# ## 5. A cut vocabulary
#
# The embedding and the lm_head have a row for each token. A rank has the rows of some tokens in a row, from the token
# id `start` on; it may have none.
#
# **Build** `embed(group, ids, table, start)`: ids `[n]`, int64, the same on all ranks; table `[own tokens, hidden]`.
# Return the rows of all ids, `[n, hidden]`, on every rank: each id is in one rank's table. One `group.all_reduce`.
# Rows that are not asked for may hold NaN.
#
# **Build** `argmax(group, logits, start)`: logits `[rows, own tokens]`, of the tokens from `start` on. Return the id
# of the largest logit over all ranks for each row, int64 `[rows]`, the same on every rank. Of equal ones it is the
# lowest id. A rank sends each other rank at most 16 bytes for each row, however large the vocabulary is. Use
# `exchange`; an id may be larger than float16 and float32 can tell apart.
#
# **Hint:** each rank finds its own best logit and that one's id, and sends both.
#
# **Trap (zero times):** NaN · 0 is NaN. What is not this rank's is set to 0, and not multiplied by it.
#
# **Trap (nothing here):** a table of no rows cannot be indexed, and logits of no columns have no maximum.


# %% nbgrader={"grade_id": "embed", "solution": true}
def embed(group, ids, table, start):
    """The rows of all ids, [n, hidden], from the tables of all ranks."""
    ### BEGIN SOLUTION
    mine = (ids >= start) & (ids < start + len(table))
    found = torch.zeros(len(ids), table.shape[1], dtype=table.dtype)
    found[mine] = table[ids[mine] - start]
    return group.all_reduce(found)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_embed", "grade": true, "points": 1}
# property: every id has its row on every rank, whoever holds it, with one all_reduce; rows not asked for are not used.
# question: Which place in a table does token 7 have on a rank whose tokens begin at 5?
# hint: start from zeros, write the rows that are yours at their places, and sum.
# explanation: Tokens 0 to 4 on rank 0, 4 to 8 on rank 1; ids 6, 1. Rank 0 has [0, row 1], rank 1 has [its row 2, 0].
#   Their sum is both rows, exactly: adding 0 rounds nothing.
def check_rows(ranks, dtype, table, ids, parts):
    what = f"{len(parts)} ranks with {[b - a for a, b in parts]} tokens, ids {ids.tolist()}, {str(dtype)[6:]}"
    given = [(ids.clone(), table[a:b].clone(), a) for a, b in parts]
    results, _, groups = on_ranks(ranks, embed, given, what, kind=Summing)
    print(f"{what}: {list(results[0].shape)}")
    for rank, seen in enumerate(results):
        right = torch.equal(tensor_of(f"{what}, rank {rank}", seen, table[ids]), table[ids].double())
        assert right, f"{what}, rank {rank}: expected {table[ids].tolist()}, saw {seen.tolist()}"
    seen = [group.num_sums for group in groups]
    assert set(seen) == {1}, f"{what}: expected one all_reduce on each rank, saw {seen}"


with roles(5) as ranks:
    drawn(check_rows, ranks, cases=vocabularies(rng("rows")))
### BEGIN HIDDEN TESTS
with roles(5) as ranks:
    drawn(check_rows, ranks, cases=vocabularies(rng("check_embed")))
    table = torch.arange(12.0).view(6, 2)
    check_rows(ranks, torch.float32, table, torch.tensor([5, 0, 5, 2, 3]), [(0, 3), (3, 6)])
    check_rows(ranks, torch.float32, table, torch.tensor([5, 0]), [(0, 0), (0, 6), (6, 6)])
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "argmax", "solution": true}
def argmax(group, logits, start):
    """The id of the largest logit over all ranks for each row, int64 [rows]."""
    ### BEGIN SOLUTION
    best = torch.full((2, len(logits)), -math.inf, dtype=torch.float64)  # logits, ids
    if logits.shape[1]:
        best[0], best[1] = logits.max(1).values.double(), (logits.argmax(1) + start).double()
    others = [rank for rank in range(group.size) if rank != group.rank]
    found = group.exchange(dict.fromkeys(others, best), others)
    for theirs in found.values():
        lower = (theirs[0] == best[0]) & (theirs[1] < best[1])
        best = torch.where((theirs[0] > best[0]) | lower, theirs, best)
    return best[1].long()
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_argmax", "grade": true, "points": 1}
# property: every rank has the id of the largest logit over the whole vocabulary; of equal ones the lowest.
# question: Ranks 0 and 2 both have a largest logit of -1: whose id is it?
# hint: send the best logit and its id; compare logits first and ids where these are equal.
# explanation: Rank 0 has tokens 0 to 3 with logits -2, -1, -1, rank 1 has tokens 3 to 5 with -1, -3. The best of rank
#   0 is id 1, that of rank 1 is id 3, both with -1; the lowest is 1. A rank without tokens has a best of minus
#   infinity, and never 0.
def check_ids(ranks, logits, low, parts):
    what = f"{len(parts)} ranks with {[b - a for a, b in parts]} tokens from {low} on, {str(logits.dtype)[6:]}"
    given = [(logits[:, a:b].clone(), low + a) for a, b in parts]
    results, _, _ = on_ranks(ranks, argmax, given, what)
    print(f"{what}: {results[0].tolist()}")
    top = (logits == logits.amax(1, keepdim=True)).double()
    expected = (top * torch.arange(logits.shape[1], 0, -1)).argmax(1) + low  # the first of the largest
    for rank, seen in enumerate(results):
        seen = ints_of(f"{what}, rank {rank}", seen, len(logits))
        right = seen == expected.tolist()
        assert right, f"{what}, rank {rank}: expected ids {expected.tolist()}, saw {seen}"


with roles(5) as ranks:
    check_ids(ranks, torch.tensor([[-2.0, -1.0, -1.0, -1.0, -3.0]]), 0, [(0, 3), (3, 5)])
    check_ids(ranks, torch.tensor([[1.0, 0.0, 1 + 1e-12]], dtype=WIDE), 0, [(0, 2), (2, 3)])  # nearly equal
    drawn(check_ids, ranks, cases=logits_with_ties(rng("ties")))
### BEGIN HIDDEN TESTS
with roles(5) as ranks:
    drawn(check_ids, ranks, cases=logits_with_ties(rng("check_argmax")))
    for n, logit in itertools.product(SIZES, (0.0, -60.0)):
        parts = [(0, 10 if n == 1 else 4), *[(4, 4)] * max(0, n - 2), *[(4, 10)] * (n > 1)]
        check_ids(ranks, torch.full((2, 10), logit), 0, parts)
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_argmax_bytes", "grade": true, "points": 1}
# property: for an argmax a rank sends each other rank at most 16 bytes for each row, whatever the vocabulary's size.
# question: How many of a row's logits does another rank need?
# hint: the best one and its id: two numbers of 8 bytes.
# explanation: 128,000 tokens in float16 on eight ranks: gathered logits are 32,000 bytes a row and rank, a logit and
#   an id are 16.
def check_ids_bytes(ranks, n, rows, tokens, dtype):
    what, numbers = f"{n} ranks, {rows} rows, {tokens} tokens each", rng(f"bytes {n} {rows}")
    network = Network(n, sends_wait=True)
    given = [(normal((rows, tokens), dtype, numbers), tokens * rank) for rank in range(n)]
    whole = torch.cat([logits for logits, _ in given], 1)
    results, _, _ = on_ranks(ranks, argmax, given, what, network)
    print(f"{what}: a rank sends at most {max(map(network.bytes_sent_by, range(n)))} bytes")
    check_sent(what, network, (n - 1) * rows * 16)
    for seen in results:
        at = torch.tensor(ints_of(what, seen, rows)).clamp(0, whole.shape[1] - 1)
        right = torch.equal(whole.gather(1, at[:, None])[:, 0], whole.amax(1))
        assert right, f"{what}: expected ids of largest logits, saw {at.tolist()!r:.100}"


with roles(5) as ranks:
    for n in SIZES:
        check_ids_bytes(ranks, n, 40, 30, WIDE)
### BEGIN HIDDEN TESTS
with roles(5) as ranks:
    for n, dtype in itertools.product(SIZES, (WIDE, HALF)):
        check_ids_bytes(ranks, n, 33, 50, dtype)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_pipeline"}
# ## 6. Stages
#
# The layers of a model are cut into stages, each on a rank of its own. A *pass* computes one token of a request: one
# step in each stage, from the first stage to the last, in steps that follow one another. A stage has one request in a
# step. The next pass of a request needs the token of the one before, so it begins after that has left the last stage.
#
# **Build** `pipeline(stages, passes)`: `passes[i]` is how many passes request i needs, at least one. Return a schedule
# as a list of steps; a step is a list of `stages` entries, the request that each stage has in this step, or `None`. It
# ends with the last step in which something is computed, and no schedule may be shorter. No requests: no steps.
#
# **Hint:** in each step, which requests may begin a pass? Of these, the one with the most passes left must not wait.
#
# **Trap (two stages):** a request that is in stage 0 at step t comes back to stage 0 at step t + stages at the
# earliest.


# %% nbgrader={"grade_id": "pipeline", "solution": true}
def pipeline(stages, passes):
    """A shortest schedule: for each step the request in each stage, or None."""
    ### BEGIN SOLUTION
    left, begins = list(passes), []  # begins: the request whose pass begins in each step
    while any(left):
        recent = begins[max(0, len(begins) - stages + 1) :]
        ready = [i for i in range(len(left)) if left[i] and i not in recent]
        begins.append(max(ready, key=lambda i: left[i]) if ready else None)
        if ready:
            left[begins[-1]] -= 1
    padded = [None] * (stages - 1) + begins + [None] * (stages - 1)
    return [padded[step : step + stages][::-1] for step in range(len(padded) - stages + 1)] if begins else []
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_pipeline", "grade": true, "points": 1}
# property: every pass goes through all stages in steps that follow one another, no request is in two stages, and no
#   schedule is shorter.
# question: Two requests of two passes each on three stages: when does the second pass of request 0 begin?
# hint: begin one pass in each step, of the request with most passes left that is in no stage; then shift by stage.
# explanation: Three stages, passes 3, 1, 1. Request 0 begins at steps 0, 3 and 6, the others at 1 and 2: the last pass
#   ends after step 8, nine steps. With the short ones first it would begin at 2, 5 and 8, and eleven steps would pass.
def check_schedule(stages, passes):
    what = f"{stages} stages, passes {passes}"
    steps = unchanging(pipeline)(stages, list(passes))
    assert isinstance(steps, list | tuple), f"{what}: expected a list of steps, saw {steps!r:.80}"
    begun, last = [0] * len(passes), [-stages] * len(passes)
    for t, step in enumerate(steps):
        right = isinstance(step, list | tuple) and len(step) == stages
        assert right, f"{what}, step {t}: expected {stages} entries, saw {step!r:.80}"
        entries = [None if entry is None else int_of(f"{what}, step {t}", entry) for entry in step]
        assert all(e is None or 0 <= e < len(passes) for e in entries), (
            f"{what}, step {t}: no such request in {entries}"
        )
        first = entries[0]
        if first is not None:
            assert t >= last[first] + stages, (
                f"{what}, step {t}: request {first} begins a pass, and one of step {last[first]} is still in a stage"
            )
            begun[first], last[first] = begun[first] + 1, t
        for stage in range(1, stages):
            before = steps[t - 1][stage - 1] if t else None
            saw = f"expected {before}, which was in the stage before, saw {entries[stage]}"
            assert entries[stage] == before, f"{what}, step {t}, stage {stage}: {saw}"
    gone = not steps or all(entry is None for entry in steps[-1][:-1])
    assert gone, f"{what}: the last step {steps[-1]} leaves a pass before the last stage"
    assert begun == list(passes), f"{what}: expected so many passes, saw {begun}"
    # The busiest requests alone need (most - 1) rounds of all stages; stage 0 alone needs a step for each pass.
    most = max(passes, default=0)
    least = max(sum(passes), (most - 1) * stages + passes.count(most)) + stages - 1 if passes else 0
    print(f"{what}: {len(steps)} steps")
    assert len(steps) == least, f"{what}: expected {least} steps, saw {len(steps)}"


for case in ((3, [3, 1, 1]), (2, [1]), (1, [2, 2]), (3, [2, 2]), (4, []), (2, [1, 1, 1, 1])):
    check_schedule(*case)
drawn(check_schedule, cases=passes_of_requests(rng("passes")))
### BEGIN HIDDEN TESTS
drawn(check_schedule, cases=passes_of_requests(rng("check_pipeline")))
for case in ((5, [1, 1, 9]), (3, [4, 4, 4, 1]), (8, [2] * 3), (2, [1, 2, 3, 4, 5]), (3, [1] * 7 + [4])):
    check_schedule(*case)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_experts"}
# ## 7. Tokens to experts, and back
#
# The experts of a layer are divided among ranks. Each rank has some tokens, and each token has chosen some experts.
# Two exchanges: tokens to the ranks of their experts, and results back.
#
# **Build** `dispatch(group, x, ranks)`: x `[tokens, hidden]` of this rank; ranks `[tokens, k]`, int64, the rank of
# each chosen expert. Return a list by rank: entry r holds the tokens of rank r that chose an expert of *this* rank,
# `[some, hidden]`, in rank r's order. A token that chose two experts on one rank goes there once. This rank's own
# entry is in the list, too, and needs no message.
#
# **Build** `combine(group, outputs, ranks)`: outputs is such a list, with what this rank's experts made of each token,
# weighted and added over this rank's experts. Return `[tokens, hidden]`: for each of this rank's own tokens, the sum
# of what came back from the ranks that it went to, in the dtype of the outputs. `ranks` is the same as before.
#
# A rank does not know how many tokens others have for it, so every rank sends to every other, even nothing: a tensor
# `[0, hidden]`. A rank may have no tokens at all.
#
# **Trap (leaves):** a rank without tokens still has experts, and others have tokens for them.
#
# **Trap (twice):** with `ranks` [[1, 1]] the token is in rank 1's list once, and its output comes back once.


# %% nbgrader={"grade_id": "dispatch", "solution": true}
def dispatch(group, x, ranks):
    """By rank: its tokens that chose an expert of this rank, in its order."""
    ### BEGIN SOLUTION
    parts = [x[(ranks == rank).any(1)] for rank in range(group.size)]
    others = [rank for rank in range(group.size) if rank != group.rank]
    found = group.exchange({rank: parts[rank] for rank in others}, others)
    return [found.get(rank, parts[rank]) for rank in range(group.size)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "route_tools"}
# Given: what goes where.
def rows_for(rank, x, route):
    """The rows of x that chose an expert of this rank."""
    places = [place for place, own in enumerate(route.tolist()) if rank in own]
    return x[torch.tensor(places, dtype=torch.int64)]


# %% nbgrader={"grade_id": "check_dispatch", "grade": true, "points": 1}
# property: each rank gets, once, every token that chose one of its experts, and no other; a rank without tokens takes
#   part.
# question: Which rows of `ranks` contain rank 1?
# hint: (ranks == r).any(1) says which tokens go to rank r; send to all others, also where none do.
# explanation: ranks = [[0, 1], [1, 1], [2, 0]]: tokens 0 and 2 go to rank 0, tokens 0 and 1 to rank 1, token 2 to rank
#   2. Five rows travel or stay, and not six: token 1 chose two experts on one rank.
def check_dispatched(ranks, dtype, xs, routes):
    n, what = len(xs), f"{len(xs)} ranks with {[len(x) for x in xs]} tokens, {str(dtype)[6:]}"
    given = list(zip([x.clone() for x in xs], routes, strict=True))
    results, network, _ = on_ranks(ranks, dispatch, given, what)
    print(f"{what}: {network.num_bytes} bytes sent")
    for here, received in enumerate(results):
        right = isinstance(received, list | tuple) and len(received) == n
        assert right, f"{what}, rank {here}: expected a list of {n} tensors, saw {received!r:.80}"
        for source, rows in enumerate(received):
            expected = rows_for(here, xs[source], routes[source])
            seen = tensor_of(f"{what}, from rank {source} on rank {here}", rows, expected)
            right = torch.equal(seen, expected.double())
            assert right, f"{what}, from rank {source} on rank {here}: the tokens are not those that chose it, in order"
    size = xs[0].shape[1] * dtype.itemsize
    most = [size * sum(len(rows_for(to, xs[rank], routes[rank])) for to in range(n) if to != rank) for rank in range(n)]
    check_sent(what, network, most)


with roles(5) as ranks:
    drawn(check_dispatched, ranks, cases=routes(rng("routes")))
### BEGIN HIDDEN TESTS
with roles(5) as ranks:
    drawn(check_dispatched, ranks, cases=routes(rng("check_dispatch")))
    for n in (2, 5):  # one rank has all tokens, and one all experts
        x, to = normal((30, 64), WIDE, rng("one")), torch.full((30, 2), n - 1)
        check_dispatched(ranks, WIDE, [x, *[x[:0]] * (n - 1)], [to, *[to[:0]] * (n - 1)])
        check_dispatched(ranks, WIDE, [*[x[:0]] * (n - 1), x], [*[to[:0]] * (n - 1), 0 * to])
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "combine", "solution": true}
def combine(group, outputs, ranks):
    """For each of this rank's tokens the sum of what its experts' ranks made of it, [tokens, hidden]."""
    ### BEGIN SOLUTION
    others = [rank for rank in range(group.size) if rank != group.rank]
    found = group.exchange({rank: outputs[rank] for rank in others}, others)
    total = torch.zeros(len(ranks), outputs[0].shape[1], dtype=outputs[0].dtype)
    for rank in range(group.size):
        total[(ranks == rank).any(1)] += found.get(rank, outputs[rank])
    return total
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_combine", "grade": true, "points": 1}
# property: each token's result is the sum of what the ranks of its experts made of it, on the rank that has the token.
# question: Which tokens does the third row that comes back from rank 1 belong to?
# hint: (ranks == r).any(1) again says which tokens went to rank r, in order; add what came back at these places.
# explanation: ranks = [[0, 1], [1, 1], [2, 0]]. From rank 1 two rows come back, for tokens 0 and 1. Token 1 has that
#   one output, which is the sum of both experts there; token 0 has it and the one of rank 0.
def check_combined(ranks, dtype, xs, routes):
    n, what = len(xs), f"{len(xs)} ranks with {[len(x) for x in xs]} tokens, {str(dtype)[6:]}"
    # Rank e's experts make (e + 2) times the token, plus e.
    outputs = [[((e + 2) * rows_for(e, xs[r].double(), routes[r]) + e).to(dtype) for r in range(n)] for e in range(n)]
    results, network, _ = on_ranks(ranks, combine, list(zip(outputs, routes, strict=True)), what)
    print(f"{what}: {network.num_bytes} bytes sent")
    for rank, seen in enumerate(results):
        expected, x = torch.zeros(xs[rank].shape, dtype=WIDE), xs[rank].double()
        for token, own in enumerate(routes[rank].tolist()):
            for e in set(own):
                expected[token] += (e + 2) * x[token] + e
        check_close(f"{what}, rank {rank}", seen, expected, 30 * (x.abs() + 1), dtype)
        assert seen.dtype == dtype, f"{what}, rank {rank}: expected {dtype}, saw {seen.dtype}"


with roles(5) as ranks:
    drawn(check_combined, ranks, cases=routes(rng("back")))
### BEGIN HIDDEN TESTS
with roles(5) as ranks:
    drawn(check_combined, ranks, cases=routes(rng("check_combine")))
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_ring"}
# ## 8. Attention around a ring
#
# The tokens of a long prompt are divided among ranks. Each rank has the queries of its own tokens; keys and values
# travel around the ring, a block at a time, and what was found with each block is merged. `attend(q, k, v, sees)`,
# given in the first, folded cell, does one block, and returns its outputs and their lse.
#
# **Build** `merge(o1, lse1, o2, lse2)`: what attention to both sets of keys gives, as the pair (o, lse), from what it
# gave for each: o `[queries, heads, head_dim]`, lse `[queries, heads]`, float64. With lse = log(exp(lse1) +
# exp(lse2)), o is o1 · exp(lse1 − lse) + o2 · exp(lse2 − lse). An lse may be 10,000 or −10,000. Where a query saw
# nothing in either set, o is 0 and lse is −inf.
#
# **Build** `ring_attention(group, q, k, v, positions)`: causal attention of this rank's tokens over those of all
# ranks, `[own tokens, heads, head_dim]` in q's dtype. q, k, v `[own tokens, heads, head_dim]`; `positions` is a list
# by rank of each rank's token positions, int64, in any order: a query sees the keys whose position is not greater than
# its own. A rank may have no tokens. A rank sends n − 1 blocks of keys and values in all, in the dtype that they have.
#
# **Hint:** the keys that arrive in turn t were those of rank (rank − t) % n. Stack k and v, so that they are one
# message.
#
# **Trap (minus infinity):** −inf − −inf is NaN.
#
# **Trap (a hop short):** n − 1 hops bring n − 1 other blocks; the rank's own block is one more.


# %% nbgrader={"grade_id": "merge", "solution": true}
def merge(o1, lse1, o2, lse2):
    """(o, lse) of attention to both sets of keys."""
    ### BEGIN SOLUTION
    lse = torch.logaddexp(lse1, lse2)
    at = lse.masked_fill(lse == -math.inf, 0)
    return o1 * (lse1 - at).exp()[..., None] + o2 * (lse2 - at).exp()[..., None], lse
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_merge", "grade": true, "points": 1}
# property: what was found with two sets of keys, merged, is what both together give; with large scores, and where a
#   query saw nothing.
# question: Which of lse1, lse2 and lse may be -inf, and what is lse1 - lse then?
# hint: torch.logaddexp does not overflow; where lse is -inf, subtract 0 in its place.
# explanation: Weights 1 and 3 with outputs 8 and 4: lse1 = log 1, lse2 = log 3, lse = log 4, o = 8/4 + 4 · 3/4 = 5. If
#   lse1 is -inf, its weight is 0, and o is o2. If both are, there is nothing to divide by, and o stays 0.
def check_merged(what, q, k, v, first, second):
    """first, second: what each query sees, [queries, keys]; never the same key."""
    given = [*attend(q, k, v, first), *attend(q, k, v, second)]
    o, lse = attend(q, k, v, first | second)
    seen = unchanging(merge)(*[x.clone() for x in given])
    pair = isinstance(seen, list | tuple) and len(seen) == 2
    assert pair, f"{what}: expected a pair (o, lse), saw {seen!r:.80}"
    print(f"{what}: lse {seen[1].flatten()[:3].tolist()}")
    check_close(f"{what}, o", seen[0], o, torch.ones_like(o), WIDE)
    found = tensor_of(f"{what}, lse", seen[1], lse)
    same = (found == lse) | (lse.isfinite() & ((found - lse).abs() <= 1e-9 * (1 + lse.abs())))
    assert bool(same.all()), (
        f"{what}: expected lse {lse.flatten().tolist()!r:.100}, saw {found.flatten().tolist()!r:.100}"
    )


def check_merges(scale, queries, keys, heads, numbers):
    q, k, v = (normal((m, heads, 4), WIDE, numbers) for m in (queries, keys, keys))
    side = torch.randint(0, 3, (queries, keys), generator=numbers)  # of the first set, of the second, of neither
    side[0], side[-1] = 2, 1  # the first query sees nothing, the last one keys of the first set alone
    side[1] = 0
    check_merged(f"{queries} queries, {keys} keys, scores times {scale:g}", scale * q, k, v, side == 1, side == 0)


numbers = rng("merges")
for scale in (1.0, 3000.0):
    check_merges(scale, 4, 5, 1, numbers)
    check_merges(scale, 7, 12, 2, numbers)
### BEGIN HIDDEN TESTS
numbers = rng("check_merge")
for scale, num_heads in itertools.product((1.0, 30.0, 1e4), (1, 2, 3)):
    check_merges(scale, random_int(3, 9, numbers), random_int(2, 20, numbers), num_heads, numbers)
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "ring_attention", "solution": true}
def ring_attention(group, q, k, v, positions):
    """Causal attention of this rank's tokens over those of all ranks."""
    ### BEGIN SOLUTION
    n, rank, block = group.size, group.rank, torch.stack((k, v))
    found = None
    for turn in range(n):
        theirs = positions[(rank - turn) % n]
        one = attend(q, block[0], block[1], positions[rank][:, None] >= theirs)
        found = one if found is None else merge(*found, *one)
        if turn < n - 1:
            block = group.exchange({(rank + 1) % n: block}, [(rank - 1) % n])[(rank - 1) % n]
    return found[0].to(q.dtype)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_ring", "grade": true, "points": 2}
# property: each query's output is that of attention over the whole prompt; a rank sends n - 1 blocks of keys and
#   values.
# question: Whose keys are in a rank's hands in turn 2, and which positions do they have?
# hint: attend to the own block first, then send, receive and attend n - 1 times; merge after each.
# explanation: Three ranks, two tokens each. Rank 0 holds blocks 0, 2, 1 in its three turns. Its queries at positions 0
#   and 1 see nothing of blocks 2 and 1: their lse is -inf there, and merging changes nothing.
def check_around(ranks, dtype, q, k, v, positions):
    n, what = len(positions), f"{len(positions)} ranks with {[len(p) for p in positions]} tokens, {str(dtype)[6:]}"
    given = [(q[p], k[p], v[p], [each.clone() for each in positions]) for p in positions]
    results, network, _ = on_ranks(ranks, ring_attention, given, what)
    at = torch.arange(len(q))
    whole, _ = attend(q, k, v, at[:, None] >= at)
    print(f"{what}: {network.num_bytes} bytes sent")
    for rank, seen in enumerate(results):
        own = positions[rank]
        check_close(f"{what}, rank {rank}", seen, whole[own], 1 + whole[own].abs(), dtype)
        assert seen.dtype == dtype, f"{what}, rank {rank}: expected {dtype}, saw {seen.dtype}"
    size, counts = 2 * k[0].numel() * dtype.itemsize, [len(p) for p in positions]
    # Its own block to all others, or, around a ring, every block but that of the neighbour to which it sends.
    most = [
        size * max((n - 1) * counts[r], sum(counts) - min(counts[r - 1], counts[(r + 1) % n]) if n > 1 else 0)
        for r in range(n)
    ]
    check_sent(what, network, most)


with roles(5) as ranks:
    drawn(check_around, ranks, cases=prompts(rng("prompts")))
### BEGIN HIDDEN TESTS
with roles(5) as ranks:
    drawn(check_around, ranks, cases=prompts(rng("check_ring")))
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_engine"}
# ## 9. Two ranks write a text
#
# Two ranks of the engine divide a small model of the course. Your `heads` and `shard` say which heads, which columns
# of each MLP and which tokens of the vocabulary a rank loads, and your `all_reduce` adds what they have: once for the
# embedding, and twice for each layer. Both ranks must write the text that one process writes, token for token.
#
# There is nothing to build in this part. If the check fails, mend the function that the message names in its own part.


# %% nbgrader={"grade_id": "engine_parts"}
from reference_impl.assembly.lab_parts import LabEngine, course_llm
from reference_impl.assembly.lab_parts.ranks import RankLabEngine, sizes_to_divide

encode = course_llm("draft").encode  # loads the model, once for all the cells below


def your_parts(size, name):
    """By rank what your functions say for a course model: its heads, the columns of each MLP, its tokens."""
    num_heads, num_kv_heads, columns, vocab = sizes_to_divide(name)
    parts = []
    for rank in range(size):
        what = f"heads({num_heads}, {num_kv_heads}, {size}, {rank})"
        own = ints_of(what, unchanging(heads)(num_heads, num_kv_heads, size, rank), 4)
        cuts = [ints_of(f"shard({n}, {size}, {rank})", unchanging(shard)(n, size, rank), 2) for n in (columns, vocab)]
        whole = [num_heads, num_kv_heads, columns, vocab]
        for (start, end), n, of in zip(
            (own[:2], own[2:], *cuts), whole, ("heads", "heads", "shard", "shard"), strict=True
        ):
            assert 0 <= start < end <= n, f"{of}: rank {rank} of {size} has {start} to {end} of {n}"
        parts.append((own, *cuts))
    return parts


def write(engine, text, num_tokens):
    """The engine, after it has generated so many tokens, greedily."""
    engine.add(encode(text), num_tokens)
    engine.run()
    return engine


def write_on_ranks(ranks, size, text, num_tokens, name="draft"):
    """The engine of each rank, which has generated after a text with your parts and your sums, and how many sums each
    rank took."""
    parts, counts = your_parts(size, name), [0] * size
    meetings, network = Network(size), Network(size, sends_wait=True)
    groups = [Group(port) for port in network.ports]

    def your_sum(rank, x, expected):
        counts[rank] += 1
        seen = unchanging(getattr(ranks[rank], name_of(all_reduce)))(groups[rank], x)
        what = f"all_reduce {counts[rank]} of rank {rank}, x {list(x.shape)}"
        check_close(what, seen, expected.double(), 10 * (expected.double().abs() + 1), HALF)
        return seen.to(x.dtype)

    calls = [
        lambda r=r: write(
            RankLabEngine(meetings.ports[r], lambda x, own: your_sum(r, x, own), parts, name), text, num_tokens
        )
        for r in range(size)
    ]
    engines = together(calls)
    assert not network.num_unread, f"{network.num_unread} messages were sent and never received"
    return engines, counts


# %% nbgrader={"grade_id": "check_engine", "grade": true, "points": 2}
# property: two ranks with your parts and your all_reduce write the text that one process writes.
# question: Which function does the message name?
# hint: make the checks of parts 1 and 2 pass first; nothing else of yours is used here.
# explanation: A rank computes attention with its own heads and an MLP with its own columns. Both are partial sums of
#   what one process computes, so that five sums a step, with two layers, make every rank's hidden state the whole
#   model's.
def check_text(ranks, text, num_tokens):
    expected = write(LabEngine(course_llm("draft"), {"num_blocks": 16}), text, num_tokens).outputs["0"]
    engines, counts = write_on_ranks(ranks, 2, text, num_tokens)
    print(f"{num_tokens} tokens on 2 ranks, {counts[0]} sums: {expected}")
    for rank, engine in enumerate(engines):
        seen = engine.outputs["0"]
        assert seen == expected, f"rank {rank} writes {seen}, one process writes {expected}"
    assert len(set(counts)) == 1, f"sums of the ranks: {counts}"


with roles(2) as ranks:
    check_text(ranks, "def add(a, b):\n    return ", 5)
### BEGIN HIDDEN TESTS
with roles(2) as ranks:
    texts = "for item in items:\n    ", "class Stack:\n    def push(self, item):\n", "import os\n\ndef is_even(n"
    check_text(ranks, texts[random_int(0, 2, rng("check_engine"))], 5)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_milestone"}
# ## 10. A text from two ranks
#
# With all checks passed, `inferlab lab check` shows this, too. This model has eight layers: a step takes 17 sums, one
# for the embedding and two for each layer. Both ranks have the whole text; the one of rank 0 is shown.

# %% nbgrader={"grade_id": "milestone"} inferlab={"where": "milestone"}
from reference_impl.assembly.lab_parts import show_served

# These are `RankLabEngine(...)`s, one on each rank, with your all_reduce and your parts.
with roles(2) as ranks:
    engines, counts = write_on_ranks(ranks, 2, "def open_file(file):\n", 24, "target")
show_served("Two ranks with your all_reduce and your parts just served this text", engines[0], course_llm())
print(f"{counts[0]} sums over both ranks.")

# %% [markdown] nbgrader={"grade_id": "extensions"}
# ## Further (not graded)
#
# Add cells below and try one.
#
# - **Two-shot.** An `all_reduce` that sends parts straight to their ranks and back sends as many bytes as the ring, in
#   two exchanges. Write it, and let a network with an α count both. When does the ring win?
# - **Zig-zag.** With contiguous parts, the last rank of `ring_attention` computes in every turn, the first in one
#   only. Count the pairs of query and key that each rank computes, for contiguous parts and for an early and a late
#   one each.
# - **Stages that differ.** Let one stage take two steps. What is the shortest schedule then?
