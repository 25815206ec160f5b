# %% [markdown] name="title"
# # 12a · A matrix on two ranks
#
# About 40 minutes. You need chapters 00 (the roofline) and 02 (the KV cache). A **rank** is one of several processes that
# compute one model together, most often one for each GPU. This notebook is about *tensor parallelism*: each rank has a
# part of every matrix. What the messages between ranks cost is the next notebook.
#
# **Required:** sections 1 to 5 and the card. Sections 6 to 8 are exploration, errors of others, and where to look in
# production engines; they may wait.

# %% name="setup"
import inspect
import os
import signal
import statistics
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle
from safetensors.torch import load_file

from chapters import widgets
from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, figure, show, tidy
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.parallel.model import RankLookup, Summed
from reference_impl.features.parallel.shares import head_shares
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.features.process.worker import WorkerError, how_it_ended
from reference_impl.interfaces.collectives import CollectiveError
from reference_impl.theory import collectives, kv_cache
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.units import format_bytes, format_seconds

torch.set_num_threads(1)
torch.manual_seed(0)
weights = {
    name: weight.float()
    for name, weight in load_file(course_model() / "model.safetensors").items()
}
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_bytes": 8 * 2**20,
    "prefix_cache": "off",
}
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
FEW = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PROMPT = "def add(a, b):\n    return"


def start(worker="here"):
    """The course model on two ranks."""
    return LLM(course_model(), tensor_parallel_size=2, worker=worker, **OPTIONS)


def bytes_shown(llm):
    """Of each rank: bytes that it has shown to the other since it began."""
    ranks = llm.engine.executor
    if hasattr(ranks, "reports"):
        return [report.num_bytes for report in ranks.reports()]
    return [rank.collectives.num_bytes for rank in ranks.executors]


def write(llm, prompts, sampling=GREEDY):
    """-> output tokens, and of each step seconds, bytes of each rank, the trace."""
    engine, steps = llm.engine, []
    name = time.perf_counter_ns()
    requests = [
        engine.add(llm.encode(p), sampling, f"{name + i}")
        for i, p in enumerate(prompts)
    ]
    while engine.has_work():
        before = [0] if llm is one else bytes_shown(llm)
        began = time.perf_counter()
        engine.step()
        took = time.perf_counter() - began
        after = [0] if llm is one else bytes_shown(llm)
        moved = [b - a for a, b in zip(before, after, strict=True)]
        steps.append((took, moved, list(engine.trace.steps())[-1]))
    return [list(request.output_tokens) for request in requests], steps


one = LLM(course_model(), **OPTIONS)

# %% [markdown] name="question"
# ## 1. A question with a number
#
# The course model has 8 layers, a hidden size of 256, an MLP of 768 columns, 4 query heads, 2 KV heads and a vocabulary of
# 4,096. Two ranks divide every one of its matrices, in numbers of 32 bits, and write one token. **How many bytes does
# each rank have to show to the other for that token?**
# <!-- stands: datasets/course_model/target/config.json -->

# %% name="predict"
widgets.predict(
    "12a-bytes", "Bytes that a rank shows the other for one token?", "bytes"
)

# %% [markdown] name="question-run-text"
# Count them. Each rank is a process of its own on your cores, and this notebook's process plans the steps:

# %% name="question-run"
gpus = torch.cuda.device_count()
print(f"{gpus} GPUs here, 2 ranks: the live cells pass device='cpu'")
began = time.perf_counter()
try:
    two, how = start(), "processes"
except (OSError, WorkerError):
    two, how = start("threads"), "threads of this process: no other can be started"
print(f"2 ranks, {how}; started in {format_seconds(time.perf_counter() - began)}")
_, steps = write(two, [PROMPT])
[moved, its] = steps[-1][1]
print(f"for the last token: {moved:,} bytes of rank 0, {its:,} of rank 1")
widgets.reveal("12a-bytes", moved)

# %% [markdown] name="question-reading"
# (The engine has no transport between GPUs, so these cells stay on the CPU where there are several, too.) The number does
# not depend on the machine. Section 3 takes it apart, down to the byte.

# %% [markdown] name="idea"
# ## 2. The idea
#
# A shop prices six hampers, each made of four goods. The price list is a matrix: hampers down, goods across. Two clerks
# share the work. Either each takes **some hampers**: both need all prices of goods, and the finished prices are put side by
# side. Or each takes **some goods**: each knows only those prices, and gets a *part of every* hamper's price; the parts
# have to be added.
#
# A linear layer is that list: $y = x W^T$, with $W$ as PyTorch stores it, `[outputs, inputs]`.
#
# | cut | each rank has | each rank computes | together |
# |---|---|---|---|
# | by **outputs** | some rows of $W$, all of $x$ | some numbers of $y$, finished | put side by side: *gather* |
# | by **inputs** | some columns of $W$, that part of $x$ | a summand of all of $y$ | add: *all-reduce* |
#
# Megatron-LM, from which these layouts come, writes $Y = XA$ with $A$ `[inputs, outputs]`, and so says **column-parallel**
# for the first and **row-parallel** for the second. The letters changed places, not the cut: say which dimension.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.8, 3.0)
fig.set_layout_engine("none")


def cells(ax, left, rows, columns, part_of):
    """A matrix as squares; part_of(row, column): rank 0, rank 1, or None for both."""
    for row in range(rows):
        for column in range(columns):
            part = part_of(row, column)
            look = {None: (GREY, None), 0: (BLUE, None), 1: (ORANGE, "//")}[part]
            ax.add_patch(
                Rectangle(
                    (left + column, -row),
                    0.92,
                    0.92,
                    fc=look[0],
                    hatch=look[1],
                    ec="white",
                )
            )


for at, title in enumerate(("cut by outputs: put side by side", "cut by inputs: add")):
    ax = fig.add_axes((0.01 + 0.5 * at, 0.02, 0.48, 0.84))
    ax.set_title(title, fontsize=10, loc="left")
    cells(ax, 0, 6, 4, lambda r, c, at=at: c // 2 if at else r // 3)
    cells(ax, 5, 4, 1, lambda r, c, at=at: r // 2 if at else None)
    if at == 0:
        cells(ax, 7.2, 6, 1, lambda r, c: r // 3)
    else:
        cells(ax, 7.2, 6, 1, lambda r, c: 0)
        cells(ax, 9.2, 6, 1, lambda r, c: 1)
    for x, y, said in (
        (4.45, -2, "·"),
        (6.5, -2, "="),
        *(((8.65, -2, "+"),) if at else ()),
    ):
        ax.text(x, y + 0.4, said, ha="center", va="center", fontsize=14, color=INK)
    for x, said in ((2, "W [6, 4]"), (5.5, "x"), (8.7 if at else 7.7, "y")):
        ax.text(x, -5.3, said, ha="center", va="top", fontsize=9, color=INK)
    ax.set_xlim(-0.2, 10.5)
    ax.set_ylim(-6.1, 1.1)
    ax.axis("off")
show(
    fig,
    "A matrix of six outputs and four inputs on two ranks, rank 1 hatched. Cut by "
    "outputs, each rank has three rows and all of x, and computes three finished "
    "numbers of y. Cut by inputs, each has two columns and half of x, and computes a "
    "summand of all six numbers.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# All ranks are here in one process, one after another in a loop; what they say to each other is counted.


# %% name="scratch-layouts"
W, x = torch.randn(6, 4), torch.randn(3, 4)  # [outputs, inputs], [tokens, inputs]
y = x @ W.T  # [tokens, outputs]

by_outputs = [x @ part.T for part in W.chunk(2, dim=0)]
by_inputs = [
    some @ part.T
    for some, part in zip(x.chunk(2, dim=1), W.chunk(2, dim=1), strict=True)
]
print("by outputs:", *(list(part.shape) for part in by_outputs), "of", list(y.shape))
print("by inputs: ", *(list(part.shape) for part in by_inputs), "of", list(y.shape))
torch.testing.assert_close(torch.cat(by_outputs, dim=1), y)
torch.testing.assert_close(by_inputs[0] + by_inputs[1], y)

# %% [markdown] name="scratch-bias-text"
# ### Bias
#
# A layer cut by outputs cuts its bias like its rows. A layer cut by **inputs** has one bias for a sum. *Four ranks divide
# such a layer, each adds the whole bias, 0.5 everywhere, to its summand. By how much is the sum too large?*

# %% name="scratch-bias-predict"
widgets.predict("12a-bias", "Four ranks add a bias of 0.5 each: error of the sum?", "")

# %% name="scratch-bias"
bias = torch.full((6,), 0.5)
summands = [
    some @ part.T
    for some, part in zip(x.chunk(4, dim=1), W.chunk(4, dim=1), strict=True)
]
everywhere = sum(part + bias for part in summands)
once = sum(part + bias * (rank == 0) for rank, part in enumerate(summands))
torch.testing.assert_close(once, y + bias)
widgets.reveal("12a-bias", float((everywhere - (y + bias)).mean()))

# %% [markdown] name="scratch-mlp-text"
# ### An MLP: two matrices, one sum
#
# gate and up are cut by outputs, so each rank has some *columns* of the MLP, finished. SiLU and the product are
# elementwise: a rank's columns need nothing of another's. down takes these very columns as its inputs, so it is cut by
# inputs. One all-reduce at the end; each rank runs the MLP of one process, only narrower:


# %% name="scratch-mlp"
class Ranks:
    """What several ranks say to each other, counted. parts: of each rank."""

    def __init__(self, size):
        self.size, self.calls = size, Counter()

    def all_reduce(self, parts):
        self.calls["all-reduce"] += 1
        return sum(parts)  # which every rank then has


def mlp(x, gate, up, down):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def mlp_parts(ranks, gate, up, down):
    cuts = gate.chunk(ranks.size, 0), up.chunk(ranks.size, 0), down.chunk(ranks.size, 1)
    return list(zip(*cuts, strict=True))


# %% name="scratch-mlp-run"
layer = "model.layers.3."
three = [weights[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")]
hidden = torch.randn(9, 256)  # nine tokens
right = mlp(hidden, *three)
for size in (2, 3):
    ranks = Ranks(size)
    parts = [mlp(hidden, *mine) for mine in mlp_parts(ranks, *three)]
    torch.testing.assert_close(ranks.all_reduce(parts), right, atol=1e-5, rtol=1e-4)
    print(f"{size} ranks: the same output, {dict(ranks.calls)}")

# %% [markdown] name="scratch-without-text"
# **Now take that one away**: rank 0 goes on with its own summand. *How far is it from the right output, in percent of the
# output's length?*

# %% name="scratch-without-predict"
widgets.predict(
    "12a-without", "Error of one rank's summand of two, without the sum?", "%"
)

# %% name="scratch-without"
alone = mlp(hidden, *mlp_parts(Ranks(2), *three)[0])
error = float((alone - right).norm() / right.norm())
print(f"shape {list(alone.shape)}, as it should be: no error")
widgets.reveal("12a-without", 100 * error)

# %% [markdown] name="scratch-without-reading"
# The summand has the right shape and the wrong numbers; of two nearly independent halves, one is short by about the
# other's length, which is 71 % of the whole if both are equally long.
# <!-- tested: tests/claims/test_parallel_layouts.py::test_a_summand_of_two_independent_ones_is_off_by_71_percent -->
#
# ### Attention: by heads
#
# The same pair: Q, K and V cut by outputs, **whole heads** at a time, since the softmax of a head needs all of its
# numbers; O by inputs, the same heads. (The rotation and norm of queries and keys are left out: each rank does them for its
# own heads.)


# %% name="scratch-attention"
def attention(x, q, k, v, o):
    """Causal, heads of 64. q, k, v: rows of some heads; o: the columns of the same."""
    Q, K, V = ((x @ w.T).view(len(x), -1, 64).transpose(0, 1) for w in (q, k, v))
    group = len(Q) // len(K)
    K, V = K.repeat_interleave(group, 0), V.repeat_interleave(group, 0)
    out = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
    return out.transpose(0, 1).flatten(1) @ o.T


def heads(rank, size, num_heads=4, num_kv_heads=2):
    """The query heads of a rank, and the KV heads that these read."""
    each, group = num_heads // size, num_heads // num_kv_heads
    queries = range(each * rank, each * (rank + 1))
    return list(queries), sorted({head // group for head in queries})


def rows_of(heads):
    return torch.cat([torch.arange(64 * head, 64 * head + 64) for head in heads])


# %% name="scratch-attention-run"
q, k, v, o = (weights[f"{layer}self_attn.{name}_proj.weight"] for name in "qkvo")
right = attention(hidden, q, k, v, o)
for size in (2, 4):
    ranks, parts = Ranks(size), []
    for rank in range(size):
        queries, keys = heads(rank, size)
        print(f"rank {rank} of {size}: query heads {queries}, KV heads {keys}")
        mine, kv = rows_of(queries), rows_of(keys)
        parts.append(attention(hidden, q[mine], k[kv], v[kv], o[:, mine]))
    torch.testing.assert_close(ranks.all_reduce(parts), right, atol=1e-5, rtol=1e-4)

# %% [markdown] name="scratch-copies-text"
# With more ranks than KV heads, several ranks keep **the same KV head**, its weights and its cache. *A 70B has 64 query
# heads and 8 KV heads. Its cache on 16 ranks, all together: how many times that on 8?*

# %% name="scratch-copies-predict"
widgets.predict(
    "12a-copies", "Cache of all 16 ranks over that of all 8 ranks?", "times"
)

# %% name="scratch-copies"
L70 = shape_of("llama-3-70b")
per_head = kv_cache.bytes_per_token(L70) / L70.num_kv_heads
rows, kept = [], {}
for size in (1, 2, 4, 8, 16, 32):
    shares = head_shares(L70.num_heads, L70.num_kv_heads, size)  # the engine's own
    kept[size] = sum(keys.length for _, keys in shares)
    queries, keys = shares[0]
    total = format_bytes(kept[size] * per_head)
    rows.append([size, queries.length, keys.length, kept[size], total])
widgets.reveal("12a-copies", kept[16] / kept[8])
head = [
    "ranks",
    "query heads each",
    "KV heads each",
    "KV heads in all",
    "cache of a token, in all",
]
widgets.table(rows, head)

# %% [markdown] name="scratch-copies-reading"
# So more ranks than KV heads still divide the weights, and no longer the cache. (The other limit is the node: beyond the
# GPUs that share fast links, most often 8, each sum crosses a network; see `b_collectives`.) Sizes that divide neither way are
# refused: of the course model, with 4 query heads and 2 KV heads, three ranks cannot have whole groups.

# %% name="scratch-refused"
try:
    head_shares(4, 2, 3)
except ValueError as error:
    print(textwrap.fill(str(error), 88))

# %% [markdown] name="scratch-vocabulary-text"
# ### The vocabulary
#
# Embedding and lm_head are the largest matrices of a small model, and are cut by tokens. The lookup is a matrix product with
# a one in one place, cut by inputs: a rank that does not have the token adds zeros. The lm_head is cut by outputs: its
# logits are gathered.

# %% name="scratch-vocabulary"
embedding = weights[
    "model.embed_tokens.weight"
]  # [4096, 256], which is the lm_head, too
ids = torch.tensor([17, 3900, 2048])
found = []
for rank, part in enumerate(embedding.chunk(2, 0)):
    mine = ids - rank * len(part)
    others = (mine < 0) | (mine >= len(part))
    found.append(part[mine.masked_fill(others, 0)].masked_fill(others[:, None], 0))
assert torch.equal(sum(found), embedding[ids])

logits = [
    hidden[:1] @ part.T for part in embedding.chunk(2, 0)
]  # [1, 2048] of each rank
best = [
    (float(part.max()), -(2048 * r + int(part.argmax())))
    for r, part in enumerate(logits)
]
assert -max(best)[1] == int(torch.cat(logits, 1).argmax())
print(
    f"all logits: {logits[0].nbytes:,} bytes of a rank; greedy needs a number and an id"
)

# %% [markdown] name="scratch-count-text"
# Greedy decoding could gather one candidate a rank; a sampler with top-p, penalties or logprobs needs all logits, so the
# engine gathers them all.
#
# ### The bytes of a token
#
# Now the number of section 1, from its parts:

# %% name="scratch-count"
layers, hidden_size, vocabulary, number = 8, 256, 4096, 4
vector = hidden_size * number  # the hidden state of one token
sums = collectives.all_reduces_per_token(layers) + 1  # 2 a layer, and the embedding's
gathered = vocabulary // 2 * number
print(f"{sums} all-reduces of {vector:,} bytes, and {gathered:,} bytes of logits:")
print(f"{sums * vector + gathered:,} bytes; measured in section 1: {moved:,}")
print(f"a token stops {sums + 1} times for the other rank")
print("all weights:", format_bytes(sum(weight.nbytes for weight in weights.values())))
assert sums * vector + gathered == moved == its

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The engine's model is divided while it is loaded. The layers do not know of ranks: the sum is a hook behind `layer.o` and
# `layer.mlp`, and the embedding's lookup is replaced. These two do it:

# %% name="engine-source"
print(inspect.getsource(Summed))
print(inspect.getsource(RankLookup))

# %% [markdown] name="engine-texts-text"
# Two ranks write the text of one process, and each step of one row shows the same bytes:

# %% name="engine-texts"
[alone], _ = write(one, [PROMPT])
[output], steps = write(two, [PROMPT])
assert output == alone
rows = []
for _, moved_now, step in steps[:4]:
    tokens = sum(row.num_tokens for row in step.rows)
    rows.append([step.step_id, tokens, *moved_now])
assert {tuple(moved_now) for _, moved_now, _ in steps[1:]} == {(moved, moved)}
print(repr(one.tokenizer.decode(output)))
widgets.table(rows, ["step", "rows", "bytes of rank 0", "bytes of rank 1"])

# %% [markdown] name="engine-texts-reading"
# The first step has the prompt's nine rows: all-reduces grow with the rows, but logits are those of the last row alone.
# <!-- printed: engine-texts -->
#
# **Take one all-reduce away**, that of layer 3's MLP, on both ranks. (For this the ranks are threads of this process, where
# we can reach them.) *Of 24 tokens, how many are the same as before?*

# %% name="engine-without-predict"
widgets.predict(
    "12a-tokens", "Tokens of 24 that stay, without one of 16 sums?", "tokens"
)

# %% name="engine-without"
loose = start("threads")
ranks = loose.engine.executor.executors
outputs, calls = [], []
for _ in range(2):
    before = ranks[0].collectives.num_calls
    [output], steps = write(loose, [PROMPT])
    outputs.append(output)
    calls.append((ranks[0].collectives.num_calls - before) / len(steps))
    for rank in ranks:  # for the second turn
        rank.executor.model.layers[3].mlp._forward_hooks.clear()
print(f"collectives of a step: {calls[0]:g}, then {calls[1]:g}")
print(repr(loose.tokenizer.decode(outputs[1])))
same = [a == b for a, b in zip(*outputs, strict=True)]
widgets.reveal("12a-tokens", same.index(False) if False in same else len(same))
loose.engine.close()

# %% [markdown] name="engine-without-reading"
# What is counted are the tokens before the first wrong one. No error, no warning, a fluent text: a missing sum looks like a
# worse model. Tests compare the *numbers* of a divided model with those of the whole one for that reason.

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# A decode step is bound by reading weights (chapter 00). $n$ ranks read $1/n$ of them each, at the same time. What is added
# are the all-reduces, one after another, since each layer waits for the sum of the one before:
#
# $$t(n) = \frac{\text{bytes of weights}}{n \cdot \text{bandwidth}} + 2\,\text{layers} \cdot t_\text{all-reduce}$$
#
# By formula, on H100 with 10 µs for an all-reduce (an assumption: what it depends on is the next notebook). *From one GPU
# to eight, a model of 0.6B becomes how many times as fast?*

# %% name="measure-predict"
widgets.predict("12a-small", "A 0.6B on eight GPUs instead of one: speed-up?", "times")

# %% name="measure-formula"
h100 = device("H100")
MODELS = {"70B": (140e9, 80), "8B": (16e9, 32), "0.6B": (1.2e9, 28)}  # 16 bits, layers
floor = {
    name: [
        collectives.tensor_parallel_seconds(size, h100.bandwidth, n, layers, 10e-6)
        for n in (1, 2, 4, 8)
    ]
    for name, (size, layers) in MODELS.items()
}
widgets.reveal("12a-small", floor["0.6B"][0] / floor["0.6B"][3])
rows = [[name, *(f"{t * 1e3:.2f} ms" for t in times)] for name, times in floor.items()]
widgets.table(rows, ["weights in 16 bits", *(f"TP={n}" for n in (1, 2, 4, 8))])

# %% [markdown] name="measure-formula-reading"
# The 70B gains at every size, though less than $n$ times. The 0.6B has 56 all-reduces of 10 µs against 0.36 ms of reading:
# at TP=2 it is already slower than on one GPU.
# <!-- tested: tests/claims/test_parallel_layouts.py::test_a_model_of_0_6b_loses_by_a_second_gpu_and_a_70b_gains -->
#
# Now here, with all weights and caches in reach of one core or two. *A decode step on two ranks takes how many times as
# long as in one process, on this machine?*

# %% name="measure-time-predict"
widgets.predict("12a-time", "Decode step on two ranks over one process, here?", "times")

# %% name="measure-time"
LONG = PROMPT * 40
seconds, waited = {}, {}
for name, llm in (("one process", one), ("two ranks", two)):
    write(llm, [LONG], FEW)  # once before it counts
    _, steps = write(llm, [LONG])
    decode = [step for step in steps if step[2].rows[0].num_tokens == 1]
    prompt = steps[: -len(decode)]
    seconds[name, "prompt"] = sum(took for took, _, _ in prompt)
    seconds[name, "token"] = statistics.median(took for took, _, _ in decode)
    for what, some in (("prompt", prompt), ("token", decode)):
        shares = [sum(r.waited for r in s.ranks) / (2 * took) for took, _, s in some]
        waited[name, what] = statistics.median(shares)
widgets.reveal(
    "12a-time", seconds["two ranks", "token"] / seconds["one process", "token"]
)
rows = [
    [what, name, format_seconds(seconds[name, what]), f"{waited[name, what]:.0%}"]
    for what in ("prompt", "token")
    for name in ("one process", "two ranks")
]
widgets.table(rows, ["step", "where", "time", "of which ranks wait"])

# %% name="measure-figure" jupyter={"source_hidden": true}
fig = figure(7.8, 3.0)
left, right = fig.subplots(1, 2)
reading = [140e9 / n / h100.bandwidth * 1e3 for n in (1, 2, 4, 8)]
adding = [t * 1e3 - r for t, r in zip(floor["70B"], reading, strict=True)]
at = range(4)
left.bar(at, reading, color=BLUE, label="reading weights")
left.bar(
    at,
    adding,
    bottom=reading,
    color=ORANGE,
    hatch="//",
    ec="white",
    label="160 all-reduces",
)
left.set_xticks(at, ["1", "2", "4", "8"])
left.legend(fontsize=8, frameon=False)
tidy(left, "GPUs", "ms a token", "70B on H100, by formula")
names = [(w, n) for w in ("token", "prompt") for n in ("one process", "two ranks")]
scale = {w: seconds["one process", w] for w in ("token", "prompt")}
whole = [seconds[n, w] / scale[w] for w, n in names]
wait = [v * waited[n, w] for v, (w, n) in zip(whole, names, strict=True)]
work = [v - w for v, w in zip(whole, wait, strict=True)]
right.bar(at, work, color=BLUE, label="the rest")
right.bar(
    at,
    wait,
    bottom=work,
    color=ORANGE,
    hatch="//",
    ec="white",
    label="waiting for the other rank",
)
right.set_xticks(at, [f"{w},\n{n.split()[0]}" for w, n in names], fontsize=8)
right.axhline(1, color=INK, linewidth=0.8)
right.set_ylim(0, 1.35 * max(whole))
right.legend(fontsize=8, frameon=False)
tidy(right, "", "time, one process = 1", "course model, here")
said = ", ".join(
    f"{w} with {n} {v:.2f}" for (w, n), v in zip(names, whole, strict=True)
)
show(
    fig,
    "Left: a 70B by formula, 41.8 ms a token on one GPU, 22.5, 12.0 and 6.8 on two, "
    "four and eight, the all-reduces a constant 1.6 ms of it. Right: measured here, in "
    f"times of one process: {said}.",
)

# %% [markdown] name="measure-reading"
# These are times: yours differ, and where other programs use the second core, both rows of "two ranks" grow. What explains
# them: for a **token**, a rank reads half of the 29 MB, which saves a few milliseconds at most; against that it stops 18
# times for the other rank, and the plan and its answer cross a process boundary. For a **prompt** of hundreds of tokens the
# products are long and the stops as many, so there a second core can pay.
# <!-- printed: scratch-count -->
#
# Bytes do not depend on the machine. A step shows 17 vectors for each of its rows, and logits for each row that samples:

# %% name="measure-bytes"
rows = []
for batch in (1, 2, 4):
    _, steps = write(two, [PROMPT] * batch, FEW)
    [shown, _] = steps[-1][1]
    assert shown == batch * (17 * vector + gathered)
    rows.append([batch, shown, shown // batch])
widgets.table(rows, ["requests", "bytes of a rank and step", "per token"])

# %% [markdown] name="measure-end-text"
# ### A rank ends
#
# All ranks wait for each other in every layer, so none can go on without the others. We end one on purpose in the middle of
# an answer. First what a rank says that waits for another one; then the two processes, and the process that plans:


# %% name="measure-end-waits"
def rank_of(group, number):
    rank = group.rank(number)
    rank.step = 7
    try:
        if number == 0:
            rank.all_reduce(torch.ones(256))
        return "(ended before its all-reduce)"
    except CollectiveError as error:
        return str(error)


group = ThreadGroup(2, seconds=0.2)
with ThreadPoolExecutor(2) as pool:
    for number, said in enumerate(pool.map(lambda n: rank_of(group, n), range(2))):
        print(f"rank {number}: {said}")


# %% name="measure-end"
def broken(step):
    raise MemoryError("rank 1 has no memory left")


ranks = two.engine.executor
two.engine.add(two.encode(PROMPT), GREEDY, "the last")
two.engine.step()
if how == "processes":
    os.kill(ranks.ranks[1].pid, signal.SIGKILL)
else:  # a thread cannot be killed
    ranks.executors[1].submit = broken
for _ in range(2):
    try:
        two.engine.step()
    except (WorkerError, MemoryError) as error:
        print(textwrap.fill(f"planner: {type(error).__name__}: {error}", 88), "\n")
if how == "processes":
    for number, rank in enumerate(ranks.ranks):
        print(f"rank {number} (process {rank.pid}) {how_it_ended(rank._process)}")
two.engine.close()

# %% [markdown] name="measure-end-reading"
# The killed process says nothing. The planner says which process ended and how, and in which collective the others wait for
# it; then it ends rank 0 itself, with the same signal, since half a model is none. The second step is refused with the first
# reason. What can go on, with new ranks, is each request: its tokens so far are its new prompt.

# %% [markdown] name="explore"
# ## 6. Explore
#
# Which rank holds which slice, and what it shows for a step. *With llama-3-70b: between which two numbers of ranks does the
# rank's number of KV heads stop falling? For which model are the logits more than a tenth of the bytes of one row, and
# why?*

# %% name="explore-widget"
widgets.layout_explorer()

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"One all-reduce for each transformer block."** (E12.1) Two: attention and MLP each end in a sum. The engine above made
# 18 collectives a step: the embedding's, 2 for each of 8 layers, and the gather of logits. A block that computes attention
# and MLP side by side from the same input, as in PaLM, adds both summands first and needs one.
# <!-- printed: scratch-count -->

# %% name="errata-two"
print(f"engine: {calls[0]:g} collectives a step, {(calls[0] - 2) / 8:g} for each layer")
for name, parallel_block in (("llama-3-70b", False), ("palm-540b", True)):
    shape = shape_of(name)
    count = collectives.all_reduces_per_token(shape.layers, parallel_block)
    print(f"{name}: {shape.layers} layers, {count} all-reduces a token")

# %% [markdown] name="errata-between-text"
# **"Linear 1, all-reduce, activation, linear 2, all-reduce."** (E12.2) The first one is not only a waste. Ranks hold
# *different* columns of the MLP, so to add them is wrong:

# %% name="errata-between"
gate, up, down = three
right = mlp(hidden, *three)
halves = (
    [hidden @ part.T for part in gate.chunk(2, 0)],
    [hidden @ part.T for part in up.chunk(2, 0)],
)
added = [sum(parts) for parts in halves]  # the all-reduce in between
wrong = sum((F.silu(added[0]) * added[1]) @ part.T for part in down.chunk(2, 1))
off = (wrong - right).norm() / right.norm()
print(f"a sum in between: shape {list(wrong.shape)}, off by {off:.0%}")
ranks = Ranks(2)
good = ranks.all_reduce([mlp(hidden, *mine) for mine in mlp_parts(ranks, *three)])
off = (good - right).norm() / right.norm()
print(f"one sum at the end: off by {off:.0%}")

# %% [markdown] name="errata-between-reading"
# If linear 1 were cut by inputs, a sum would have to come before the activation, since SiLU of a sum is not the sum of
# SiLUs. That is why it is cut by outputs.
#
# **"Each GPU holds column slices of W; all-reduce the partial results."** (E12.3) It depends on whose columns. In $y = xA$ a
# slice of columns gives *finished* outputs, to be put side by side; in PyTorch's `[outputs, inputs]` it gives summands. A
# square matrix hides the difference, a matrix that is not square shows it at once:

# %% name="errata-columns"
for shape in ((6, 4), (4, 4)):
    W, x = torch.randn(shape), torch.randn(3, 4)
    slices = [x @ part.T for part in W.chunk(2, dim=0)]  # each rank: some outputs
    summed, right = slices[0] + slices[1], x @ W.T
    print(f"W {list(shape)}: sum of slices {list(summed.shape)}, y {list(right.shape)}")
    summands = [a @ b.T for a, b in zip(x.chunk(2, 1), W.chunk(2, 1), strict=True)]
    torch.testing.assert_close(summands[0] + summands[1], right)
    torch.testing.assert_close(torch.cat(slices, 1), right)

# %% [markdown] name="errata-columns-reading"
# The slices themselves tell: finished outputs are fewer than the layer has, summands are as many. What misleads is the
# *weight's* slice, whose shape, for a square matrix cut in two, is that of the transposed matrix cut the other way.
#
# **"A 4096 × 4096 matrix takes 64 MB, 16 on each of four GPUs."** (E12.4) In 32 bits, and in MiB. Say the format:

# %% name="errata-size"
rows = []
for name, width in (("fp32", 4), ("fp16, bf16", 2), ("fp8", 1)):
    size = 4096 * 4096 * width
    rows.append(
        [
            name,
            format_bytes(size),
            format_bytes(size, binary=True),
            format_bytes(size / 4, binary=True),
        ]
    )
widgets.table(rows, ["numbers", "matrix", "the same, binary", "on each of four ranks"])

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Names change; look them up in the version you run.
#
# The layouts are those of **Megatron-LM** (Shoeybi et al. 2019), where the paired column- and row-parallel layers and the
# cut vocabulary come from. **vLLM** and **SGLang** have layer classes of these names, load each rank's slice of a checkpoint,
# and repeat KV heads where there are more ranks than heads. vLLM starts one process a GPU, by multiprocessing on one node and
# Ray or its own launcher over several; sizes that do not divide the heads are refused at the start. **TensorRT-LLM** divides
# when the engine is built or loaded; **llama.cpp** can split by rows over GPUs, and by layers as its default. **JAX** and
# **torch.distributed.tensor** have the same cuts as annotations of tensors, from which the collectives follow.
#
# In all of these the ranks are lost together: a process that ends takes the group with it, and what is restarted is the
# whole group. Routers therefore retry requests on another replica.

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("12_parallelism").draw(seed=1, tag="matrix"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Cut by **outputs** (Megatron's column-parallel): finished numbers, gather, or keep them where they are. Cut by **inputs**
#   (row-parallel): summands, all-reduce. Bias: cut with the outputs; of a sum, on one rank.
# - Pair them: Q, K, V by outputs and O by inputs; gate and up by outputs and down by inputs. **Two all-reduces a layer**, of
#   rows × hidden size; none inside attention or MLP.
# - Whole heads on a rank. More ranks than KV heads: copies, so the cache is no longer divided.
# - Vocabulary: lookup with zeros and a sum; logits gathered, or one candidate a rank for greedy.
# - A missing sum has the right shape, raises nothing, and writes a worse text.
# - t(n) = weights / (n · bandwidth) + 2 · layers · t(all-reduce): a large model gains, a small one loses.
# - One rank ends, all end. State the dimension that is cut, and the format with every size.
