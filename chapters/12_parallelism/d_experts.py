# %% [markdown] name="title"
# # 12d · Experts and long prompts
#
# About 45 minutes. You need `c_stages`, and chapter 05's idea of a softmax in pieces. Two more things can be divided among
# ranks: the experts of a mixture (sections 3 to 5), and the tokens of one long prompt (the second half of section 5). Chapters
# 10 and 11 will have a notebook for what is a page here.
#
# **Required:** sections 1 to 5 without what is marked *(more)*, E10.6 in section 7, and the card. The rest may wait.

# %% name="setup"
import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    RED,
    figure,
    show,
    tidy,
)
from matplotlib.patches import Rectangle
from reference_impl import Engine, EngineConfig, SamplingParams
from reference_impl.assembly.model import load_model
from reference_impl.assembly.ranks import ranked_engine
from reference_impl.bench.parallel import make_model
from reference_impl.features.parallel.experts import DispatchedExperts
from reference_impl.features.parallel.ring_attention import (
    attend,
    contiguous,
    merge,
    pairs,
    ring_attention,
    zigzag,
)
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.interfaces.collectives import CollectiveError
from reference_impl.theory import experts, kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.links import link
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.roofline import gemm_intensity
from reference_impl.theory.units import GB, MB, format_bytes, format_seconds

torch.set_num_threads(1)
h100, v3, l70 = device("H100"), shape_of("deepseek-v3"), shape_of("llama-3-70b")
NIC, NVLINK = (link(n).per_direction for n in ("InfiniBand NDR 400G", "NVLink 4"))
MOE = {  # a mixture of the course's own, with random weights
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 512,
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def together(ranks, work):
    """What each rank's thread returns."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def serve(engine, prompts):
    requests = [engine.add(prompt, GREEDY, f"r{i}") for i, prompt in enumerate(prompts)]
    while engine.has_work():
        engine.step()
    return [request.output_tokens for request in requests]


def random_loads(skew, tokens, num=256, k=8, seed=0):
    """(token, expert) pairs of each expert; the r-th most popular in proportion to
    r^-skew, and k different experts for each token."""
    generator = np.random.default_rng(seed)
    popular = generator.permutation(np.arange(1, num + 1) ** -float(skew))
    keys = np.log(popular) + generator.gumbel(
        size=(tokens, num)
    )  # k without repetition
    return np.bincount(np.argsort(-keys, axis=1)[:, :k].ravel(), minlength=num)


# %% [markdown] name="question"
# ## 1. A question with a number
#
# A layer has 256 experts, and each token goes to 8 of them. 32 GPUs have 8 experts each. A step has 8 tokens on each GPU,
# 256 in all, and **all experts are equally popular**: the router draws them by lot. A step waits for its busiest GPU.
# **How many times the mean does the busiest GPU compute?**

# %% name="predict"
widgets.predict(
    "12d-fair", "Busiest GPU over the mean, all experts equally popular?", "times"
)

# %% name="question-answer"
own = [list(range(8 * rank, 8 * rank + 8)) for rank in range(32)]  # each rank's experts


def by_lot(tokens):  # mean of twenty draws
    draws = [random_loads(0, tokens, seed=seed).tolist() for seed in range(20)]
    return np.mean([experts.imbalance(experts.rank_loads(load, own)) for load in draws])


widgets.reveal("12d-fair", by_lot(256))
rows = [[f"{tokens:,}", f"{by_lot(tokens):.2f}"] for tokens in (32, 256, 2048)]
widgets.table(rows, ["tokens in the step", "busiest GPU over the mean"])

# %% [markdown] name="idea"
# ## 2. The idea
#
# A hospital has many specialists, and each patient sees a few of them. If every town had every specialist, each of them
# would sit idle most of the day. So specialists are gathered, one kind per town, and patients travel: there in the morning,
# back at night. A day ends when the last patient is back, and the town of the most wanted specialist decides when.
#
# - A **mixture of experts** has many MLPs in a layer, and a *router* that sends each token to k of them.
# - **Expert parallelism** (EP): each rank has some experts, whole. Two **all-to-alls** a layer: *dispatch* sends each
#   (token, expert) row to the rank with the expert, *combine* sends the results back.
# - Attention is another matter: it can be cut by heads (TP), or each rank has its own requests (data-parallel attention).
# - **Context parallelism** (CP): one prompt's tokens are divided. Only attention needs the tokens of others; keys and values
#   travel round a ring.

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# A mixture in one cell. Nothing is ever full and nothing is dropped: what a token gets depends on no other token.


# %% name="scratch-mixture"
def route(x, router, k):
    """The k likeliest experts of each token, and their weights: both [tokens, k]."""
    weights, chosen = (x @ router).softmax(-1).topk(k)
    return weights / weights.sum(-1, keepdim=True), chosen


def mixture(x, router, mlps, k):
    weights, chosen = route(x, router, k)
    out = torch.zeros_like(x)
    for number, mlp in enumerate(mlps):
        token, place = (chosen == number).nonzero(as_tuple=True)
        out.index_add_(0, token, weights[token, place, None] * mlp(x[token]))
    return out


torch.manual_seed(0)
x, router = torch.randn(10, 16).double(), torch.randn(16, 8).double()
matrices = torch.randn(8, 16, 16).double()
mlps = [lambda rows, w=w: (rows @ w).relu() for w in matrices]
whole = mixture(x, router, mlps, k=2)
print(
    "tokens of each expert:",
    route(x, router, 2)[1].flatten().bincount(minlength=8).tolist(),
)

# %% [markdown] name="scratch-ranks-text"
# Now four ranks with two experts each, and 10 tokens of which the last rank has none: 4, 4, 2, 0. *Count the all-to-alls.
# Can the last rank leave them out, since it has nothing to send?*


# %% name="scratch-ranks"
def expert_parallel(rank, x, k=2):
    """This rank's tokens through the experts of all ranks (two each)."""
    weights, chosen = route(x, router, k)
    order = chosen.flatten().argsort(stable=True)  # rows by expert, and so by rank
    numbers = chosen.flatten()[order]
    sizes = (numbers // 2).bincount(minlength=rank.size).tolist()
    rows = rank.all_to_all(list(x[order // k].split(sizes)))  # dispatch
    wanted = rank.all_to_all(list(numbers.split(sizes)))  # which expert a row is for
    done = [torch.empty_like(part) for part in rows]
    for part, number, out in zip(rows, wanted, done, strict=True):
        for own in range(2 * rank.rank, 2 * rank.rank + 2):
            out[number == own] = mlps[own](part[number == own])
    back = torch.cat(rank.all_to_all(done))  # combine: each row to where it came from
    by_token = torch.empty_like(back).index_copy_(0, order, back)
    return (by_token.view(len(x), k, x.shape[1]) * weights[:, :, None]).sum(1)


parts, group = x.split([4, 4, 2, 0]), ThreadGroup(4)
ranks = [group.rank(i) for i in range(4)]
found = together(ranks, lambda rank: expert_parallel(rank, parts[rank.rank]))
assert torch.allclose(torch.cat(found), whole)
print("four ranks compute what one does; without tokens:", tuple(found[3].shape))

# %% [markdown] name="scratch-leaves-text"
# The last rank has no token, but *others'* tokens want its experts. And a collective waits for all. What happens if it
# leaves it out:


# %% name="scratch-leaves"
def hurried(rank):
    if len(parts[rank.rank]) == 0:
        return "nothing to do"
    try:
        return expert_parallel(rank, parts[rank.rank])
    except CollectiveError as error:
        return str(error)


group = ThreadGroup(4, seconds=0.5)  # how long a rank waits
for answer in together([group.rank(i) for i in range(4)], hurried):
    print(answer)

# %% [markdown] name="scratch-leaves-reading"
# So **idle ranks take part**. Where each rank has its own requests, a rank without any runs a step with a dummy batch as
# long as others have work, in every layer. That is the second way in which replicas are coupled (E12.10).

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# `enable_expert_parallel=True` beside `tensor_parallel_size`: attention is cut by heads, experts are whole. All ranks have
# all tokens after attention, so each *routes a part of them*. The part that sends:

# %% name="engine-source"
print(inspect.getsource(DispatchedExperts.forward))

# %% [markdown] name="engine-run-text"
# The course has no trained mixture, so this one has random weights: 4 layers, 8 experts, 2 for each token. Three prompts of
# 20 tokens, 8 tokens for each, greedy, two ranks (threads, on the CPU); then one of them alone.

# %% name="engine-run"
CONFIG = {"num_blocks": 64, "prefix_cache": "off"}
divided = EngineConfig(**CONFIG, tensor_parallel_size=2, enable_expert_parallel=True)
with TemporaryDirectory() as name:
    make_model(Path(name), **MOE)
    one = Engine(load_model(Path(name), torch.float32), EngineConfig(**CONFIG))
    two = ranked_engine(Path(name), divided, ranks="threads")
ranks = [rank.collectives for rank in two.executor.executors]
sent = {rank.rank: [] for rank in ranks}  # by rank: rows to each, of every all-to-all
for rank in ranks:

    def counted(parts, call=rank.all_to_all, log=sent[rank.rank]):
        log.append((parts[0].dim(), [len(part) for part in parts]))
        return call(parts)

    rank.all_to_all = counted
prompts = [list(range(5 + i, 25 + i)) for i in range(3)]
for asked in (prompts, prompts[:1]):  # three requests, then one alone
    assert serve(one, asked) == serve(two, asked)
steps = two.trace.steps()
tokens = sum(row.num_tokens for step in steps for row in step.rows)
print(f"the same tokens; {len(steps)} steps of 4 layers, {tokens} tokens computed")

# %% [markdown] name="engine-count-text"
# *How many all-to-alls of rows does a layer make on each rank, and does a decode step with a single token make fewer?*

# %% name="engine-count-predict"
widgets.predict(
    "12d-calls", "All-to-alls of hidden vectors, per layer and step?", "all-to-alls"
)

# %% name="engine-count"
rows, layers = [], 4 * len(steps)
for rank in ranks:
    big = [sizes for dim, sizes in sent[rank.rank] if dim == 2]
    small = len(sent[rank.rank]) - len(big)
    empty = sum(not any(sizes) for sizes in big[::2])
    rows.append(
        [rank.rank, len(big) / layers, small / layers, rank.num_expert_rows, empty]
    )
assert sum(rank.num_expert_rows for rank in ranks) == tokens * 2 * 4  # k, layers
widgets.reveal("12d-calls", rows[0][1])
load = [rank.num_expert_rows for rank in ranks]
print(f"busiest rank over the mean, whole run: {experts.imbalance(load):.2f}")
headers = [
    "rank",
    "of rows, a layer",
    "of counts, a layer",
    "pairs computed",
    "nothing to send",
]
widgets.table(rows, headers)

# %% [markdown] name="engine-reading"
# Two for rows, and a small one before them with how many rows come for each expert. A rank that had nothing to send (the last
# column) has made as many. Nothing is dropped: pairs computed are tokens times k times layers.

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# ### The busiest rank
#
# Real routers have favourites, which change with the text. Let the r-th most popular of 256 experts be chosen in proportion to
# $1/r^s$: s = 0 is by lot, s = 0.5 a mild skew. Cures: **replicas** of hot experts (*redundant experts*), and a **placement**
# that puts heavy beside light ones. Both need measured loads, and are renewed as these change. *With s = 0.5, 64 tokens on
# each of 32 GPUs, experts in order: how many times the mean is the busiest?*

# %% name="measure-skew-predict"
widgets.predict(
    "12d-skew", "Busiest GPU over the mean at a skew of 0.5, experts in order?", "times"
)

# %% name="measure-skew"
SKEWS = (0, 0.25, 0.5, 0.75, 1.0)
WAYS = {
    "in order": None,
    "placed by load": 0,
    "32 replicas, placed": 32,
    "128 replicas, placed": 128,
}
curves = {way: [] for way in WAYS}
for skew in SKEWS:
    seen = random_loads(skew, 20_000, seed=1)  # what the placement knows
    now = random_loads(skew, 22_048, seed=1) - seen  # the next step, of 2,048 tokens
    for way, more in WAYS.items():
        placement = own if more is None else experts.placed(seen.tolist(), 32, more)
        work = experts.rank_loads(now.tolist(), placement)
        curves[way].append(experts.imbalance(work))
widgets.reveal("12d-skew", curves["in order"][SKEWS.index(0.5)])
rows = [[way, *(f"{value:.2f}" for value in curve)] for way, curve in curves.items()]
widgets.table(rows, ["experts", *(f"s = {skew}" for skew in SKEWS)])

# %% name="measure-skew-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 2.8)
ax = fig.subplots()
for (way, curve), colour, style in zip(
    curves.items(), (RED, ORANGE, BLUE, GREEN), ("-", "--", "-.", ":"), strict=True
):
    ax.plot(SKEWS, curve, style, color=colour, marker="o", markersize=3, label=way)
ax.set_yscale("log", base=2)
ax.set_yticks((1, 2, 4, 8), (1, 2, 4, 8))
ax.minorticks_off()
tidy(ax, "skew s of the experts' popularity", "busiest GPU over mean")
ax.legend(fontsize=8, frameon=False)
said = "; ".join(
    f"{way} {curve[0]:.2f} to {curve[-1]:.1f}" for way, curve in curves.items()
)
show(fig, f"Busiest of 32 GPUs over the mean, from no skew to s = 1: {said}.")

# %% [markdown] name="measure-skew-reading"
# In order, a skew makes every GPU wait for one. Placement helps while the hottest expert, with seven of the coldest beside it,
# is no more than a GPU's share; beyond that only replicas do, since an expert is on one GPU at least. What is left with replicas is the chance of a
# single step, as in section 1: it shrinks with more tokens in a step. A *capacity* that drops what is too much is a training
# device; here it would make a user's answer depend on its neighbours in the batch.

# %% [markdown] name="measure-dispatch-text"
# ### Dispatch for latency and for throughput *(more)*
#
# 32 GPUs in 4 nodes. Between nodes each GPU has a NIC of 50 GB/s, inside NVLink. A token's 8 experts lie on several GPUs of
# the same remote node. **Direct**: a copy to every GPU that is wanted, at once, nothing agreed on before (buffers have room
# for the worst case). **By node**: sizes are exchanged first, one copy goes to each *node*, and NVLink spreads it there. *At how
# many tokens per GPU does the second become the faster one?*
# <!-- stands: reference_impl/theory/links.py -->

# %% name="measure-dispatch-predict"
widgets.predict(
    "12d-dispatch", "Tokens per GPU from which dispatch by node is faster?", "tokens"
)


# %% name="measure-dispatch"
def wanted(places, k=8):  # different places among those of k experts, by lot
    return places * (1 - (1 - 1 / places) ** k)


def direct(tokens, hidden=7168, alpha=5e-6):  # FP8: a byte a value
    return alpha + tokens * wanted(32) * 24 / 32 * hidden / NIC


def by_node(tokens, hidden=7168, alpha=5e-6, inside=2e-6):
    between = tokens * wanted(4) * 3 / 4 * hidden / NIC
    return 2 * alpha + between + inside + tokens * wanted(32) * hidden / NVLINK


crossing = next(t for t in range(1, 10_000) if by_node(t) < direct(t))
widgets.reveal("12d-dispatch", crossing)
rows = [
    [f"{t:,}", format_seconds(direct(t)), format_seconds(by_node(t))]
    for t in (1, 8, crossing, 128, 4096)
]  # fmt: skip
leave = wanted(32) * 24 / 32, wanted(4) * 3 / 4
print(f"copies of a token that leave: {leave[0]:.1f} directly, {leave[1]:.1f} by node")
widgets.table(rows, ["tokens per GPU", "direct", "by node"])

# %% [markdown] name="measure-dispatch-reading"
# Decode steps are small, so engines dispatch directly there: fewest rounds, shapes that do not change, so that it fits into a
# CUDA graph. Prompts have thousands of tokens per GPU, where bytes count.

# %% [markdown] name="overlap-text"
# ### Two batches at once *(more)*
#
# While rows travel, the GPU of that batch waits. **Two-batch overlap**: cut the batch in two, and let one compute while the
# other's rows are on their way. *The course's engine does not do it*; here is the timeline that a cost formula gives, for a layer
# of DeepSeek-V3 on 32 H100s in FP8 (half the peaks, 80 % of the bandwidth, balanced experts). What a half costs is the point:
# it has half the arithmetic and half the rows, but **reads the same weights**. *At 8 tokens per GPU and a context of 4,000: how
# many times as fast is a decode step with two halves?*


# %% name="overlap-cost"
def layer(tokens, context=4000, prompt=False):
    """Seconds of (attention, dispatch, experts, combine) of one layer, tokens a GPU."""
    weights = 7168 * (1536 + 576 + 128 * 128) + 1536 * 128 * 192 + 512 * 128 * 256
    pair = 2 * 128 * ((192 + 128) / 2 if prompt else 576 + 512)  # causal, or absorbed
    cache = 576 * 2 * context * (1 if prompt else tokens)

    def bound(flops, num_bytes):
        return max(flops / (0.5 * h100.peak("fp8")), num_bytes / (0.8 * h100.bandwidth))

    attention = bound(tokens * (2 * weights + pair * context), weights + cache)
    touched = 8 * (1 - (1 - 1 / 8) ** (8 * tokens))  # of a GPU's eight experts
    expert = 3 * 7168 * 2048
    computed = bound(2 * tokens * 8 * expert, touched * expert)
    dispatch = min(direct(tokens), by_node(tokens))
    return attention, dispatch, computed, 2 * dispatch  # back in 16 bits


rows = [
    [f"{t:,}", *map(format_seconds, layer(t, prompt=t > 999))]
    for t in (4, 8, 64, 128, 4096)
]
widgets.table(rows, ["tokens per GPU", "attention", "dispatch", "experts", "combine"])


# %% name="overlap-timeline"
def timeline(parts, layers, batches):
    """(batch, part, start, end): attention and experts take the GPU, the others the
    network. Whichever batch can go on first does."""
    free, ready, done = {"gpu": 0.0, "net": 0.0}, [0.0] * batches, [0] * batches
    work = []
    while min(done) < 4 * layers:
        begin = {b: max(ready[b], free["net" if done[b] % 2 else "gpu"])
                 for b in range(batches) if done[b] < 4 * layers}  # fmt: skip
        batch = min(begin, key=lambda b: (begin[b], done[b], b))
        part = done[batch] % 4
        end = begin[batch] + parts[part]
        work.append((batch, part, begin[batch], end))
        free["net" if part % 2 else "gpu"] = ready[batch] = end
        done[batch] += 1
    return work


# %% name="overlap-predict"
widgets.predict(
    "12d-overlap",
    "Two halves of 8 tokens a GPU against one batch: times as fast?",
    "times",
)


# %% name="overlap"
def faster(tokens, prompt=False):
    """Twenty layers with one batch, over the same with two halves."""
    ends = []
    for halves in (1, 2):
        work = timeline(layer(tokens / halves, prompt=prompt), 20, halves)
        ends.append(max(end for *_, end in work))
    return ends[0] / ends[1]


widgets.reveal("12d-overlap", faster(8))
rows = [["decode", f"{t:,}", f"{faster(t):.2f}"] for t in (8, 32, 64, 128, 256)]
for t in (1024, 4096, 16384):
    rows.append(["prompt", f"{t:,}", f"{faster(t, prompt=True):.2f}"])
widgets.table(rows, ["step", "tokens per GPU", "times as fast with two halves"])

# %% name="overlap-figure" jupyter={"source_hidden": true}
NAMES = ("attention", "dispatch", "experts", "combine")
LOOKS = ((BLUE, ""), (ORANGE, "//"), (GREEN, ".."), (GREY, "xx"))
fig = figure(7.6, 3.0)
axes = fig.subplots(2, 1, sharex=True)
for ax, halves in zip(axes, (1, 2), strict=True):
    work = timeline(layer(256 / halves), 3, halves)
    for batch, part, start, end in work:
        y = 1 - part % 2
        colour, hatch = LOOKS[part]
        box = ((start * 1e6, y - 0.38), (end - start) * 1e6, 0.76)
        ax.add_patch(Rectangle(*box, facecolor=colour, hatch=hatch, edgecolor="white"))
        if end - start > 3e-5:
            white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            place = {"ha": "center", "va": "center", "fontsize": 8, "bbox": white}
            ax.text((start + end) * 5e5, y, "ab"[batch], **place)
    ax.set_yticks((0, 1), ("network", "GPU"))
    ax.set_ylim(-0.5, 1.5)
    ax.set_xlim(0, max(end for *_, end in timeline(layer(256), 3, 1)) * 1e6)
    tidy(
        ax,
        "microseconds" if halves == 2 else "",
        "",
        f"{halves} batch{'es' * (halves > 1)}, 256 tokens in all",
    )
handles = [
    Rectangle((0, 0), 1, 1, facecolor=c, hatch=h, edgecolor=INK, linewidth=0.3)
    for c, h in LOOKS
]
fig.legend(
    handles, NAMES, loc="outside upper center", ncols=4, fontsize=8, frameon=False
)
show(
    fig,
    "Three layers by formula, 256 decoding tokens a GPU. With one batch GPU and network "
    "take turns; with two halves one computes while the other's rows travel, and the "
    f"step is {faster(256):.2f} times as fast.",
)

# %% [markdown] name="overlap-reading"
# With few tokens a half costs as much as the whole, since weights are read again: overlap loses. It pays where rows travel for
# as long as the GPU computes, and a half is really cheaper: large decode batches and prompts.

# %% [markdown] name="ring-text"
# ### A prompt divided: ring attention
#
# Each rank has a part of the prompt's tokens, with their queries, keys and values. In each turn a rank attends to the keys that
# it holds and hands them on. Partial results are merged by their log-sum-exp, as in chapter 05: exact.

# %% name="ring-source"
print(inspect.getsource(merge))
print(inspect.getsource(ring_attention).split('"""')[2])

# %% name="ring-run"
torch.manual_seed(0)
q, k, v = (torch.randn(512, heads, 32) for heads in (4, 2, 2))
expected = torch.nn.functional.scaled_dot_product_attention(
    *(t.transpose(0, 1) for t in (q, k, v)), is_causal=True, enable_gqa=True
).transpose(0, 1)
for order in (contiguous, zigzag):
    own, group = order(512, 4), ThreadGroup(4)
    ranks = [group.rank(i) for i in range(4)]

    def one_rank(rank, own=own):
        at = own[rank.rank]
        return ring_attention(rank, q[at], k[at], v[at], at, 32**-0.5)

    outs = torch.cat(together(ranks, one_rank))
    found = torch.empty_like(q).index_copy_(0, torch.cat(own), outs)
    off = float((found - expected).abs().max())
    assert off < 1e-5
    print(
        f"{order.__name__}: off by {off:.0e}, sent {ranks[0].num_bytes:,} bytes a rank"
    )
none = attend(q[:4], k[:8], v[:8], 1.0, torch.zeros(4, 8, dtype=torch.bool))
print("rows that see no key:", float(none[0].abs().max()), float(none[1].max()))

# %% [markdown] name="ring-order-text"
# Attention is causal, so the first tokens see few keys and the last ones many. All ranks wait for each other in each turn. With
# 8 ranks and parts in order, *how many times as long does the ring take as with work spread evenly?*

# %% name="ring-order-predict"
widgets.predict(
    "12d-zigzag", "Ring of 8 ranks, parts in order: times the even share?", "times"
)

# %% name="ring-order"
rows = []
for size in (2, 4, 8, 16):
    even = 4096 * 4097 / 2 / size
    in_order, alternating = (
        int(pairs(order(4096, size)).amax(1).sum()) / even
        for order in (contiguous, zigzag)
    )
    rows.append([size, f"{in_order:.2f}", f"{alternating:.2f}"])
    if size == 8:
        widgets.reveal("12d-zigzag", in_order)
widgets.table(rows, ["ranks", "in order, over even", "zig-zag, over even"])

# %% name="ring-order-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 2.6)
axes = fig.subplots(1, 2)
for ax, order in zip(axes, (contiguous, zigzag), strict=True):
    work = pairs(order(4096, 4)).double()
    image = ax.imshow(work / 1e6, cmap="cividis", vmin=0, vmax=1.1)
    for turn in range(4):
        for rank in range(4):
            value = float(work[turn, rank]) / 1e6
            ax.text(rank, turn, f"{value:.2f}", ha="center", va="center", fontsize=9,
                    color="white" if value < 0.6 else "black")  # fmt: skip
    ax.set_xticks(range(4), [f"rank {i}" for i in range(4)])
    ax.set_yticks(range(4), [f"turn {i}" for i in range(4)])
    ax.set_title(
        "in order" if order is contiguous else "zig-zag", fontsize=10, loc="left"
    )
show(
    fig,
    "Millions of (query, key) pairs that each of four ranks computes in each turn, for "
    "4,096 tokens. In order, the first rank has work in its first turn only and the last "
    "one in all turns. Zig-zag, all ranks have nearly as much in every turn.",
)

# %% [markdown] name="ring-pays-text"
# **Zig-zag**: cut the prompt into twice as many parts as ranks, and give rank r the r-th from the start and the r-th from the
# end. All do as much in each turn.
#
# When does a ring pay? In a turn a rank computes while keys and values travel. Both grow with its tokens n, but arithmetic as
# n², so there is an n from which the ring is hidden. *For a layer of a 70B at half an H100's peak, over a NIC of 50 GB/s: how many
# tokens per rank?*
# <!-- stands: reference_impl/theory/links.py -->

# %% name="ring-pays-predict"
widgets.predict(
    "12d-hidden",
    "Tokens per rank from which a ring over 50 GB/s is hidden (70B)?",
    "tokens",
)

# %% name="ring-pays"
kv_bytes = l70.kv_values_per_layer * 2  # of one token and layer
per_pair = 4 * l70.num_heads * l70.head_dim / 2  # causal: half of the pairs
rows = []
for name, rate in (("NVLink 4", NVLINK), ("a NIC of 400 Gbit/s", NIC)):
    hidden = kv_bytes / rate * 0.5 * h100.peak() / per_pair
    rows.append(
        [name, f"{hidden:,.0f}", *(f"{n / hidden:.1f}" for n in (512, 4096, 32768))]
    )
widgets.reveal("12d-hidden", hidden)
headers = ["link", "hidden from", "compute over sending: 512 a rank", "4,096", "32,768"]
widgets.table(rows, headers)

# %% name="ring-ttft"
rows = []
for prompt in (2_000, 32_000, 1_000_000):
    flops = latency.prefill_flops(l70, prompt)
    seconds = [flops / (n * 0.5 * h100.peak()) for n in (8, 32)]
    per_rank = prompt / 4
    rows.append([f"{prompt:,}", *map(format_seconds, seconds), f"{per_rank:,.0f}",
                 format_bytes(kv_cache.cache_bytes(l70, prompt))])  # fmt: skip
headers = [
    "prompt",
    "8 GPUs (TP)",
    "32 GPUs (TP 8, ring of 4)",
    "tokens per node",
    "keys and values",
]
widgets.table(rows, headers)

# %% [markdown] name="ring-pays-reading"
# (Arithmetic at half the peak, all communication hidden.) So it pays for **one long prompt whose TTFT matters**, when a node is
# full of it. It gives no throughput: four nodes with four prompts do as much. For short prompts, parts are too small to hide the
# ring. In decoding there is one query, and nothing to hide behind: there the *cache* is divided, each rank attends to its keys,
# and only outputs and log-sum-exps are merged.

# %% [markdown] name="explore"
# ## 6. Explore
#
# 64 experts on ranks, the most popular first, by the formulas of section 5. *At a skew of 1: does placement alone help, and do
# replicas alone? And why does it get harder with more ranks?*

# %% name="explore-widget"
widgets.expert_load()

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"Sequence parallelism shards the quadratic memory of attention."** (E10.6) There is no such memory with fused attention
# (chapter 05): what a million tokens of a 70B overflow is the *cache*. And the name is used for four things. What each divides and
# exchanges, 8 ranks, bytes that a rank sends per layer:

# %% name="errata-sequence"
million, n, wide, kv = 1_000_000, 8, l70.hidden_size * 2, kv_bytes
part = million / n * (n - 1) / n  # tokens that leave a rank in an all-to-all
rows = [
    ["Megatron SP", "norms, residuals in a TP group", "reduce-scatter, all-gather, 2x",
     format_bytes(4 * (n - 1) / n * million * wide)],
    ["Ulysses", "tokens; in attention, heads", "all-to-all of q, k, v and of outputs",
     format_bytes(part * (2 * wide + kv))],
    ["ring (CP)", "tokens, also in attention", "keys and values, n - 1 times",
     format_bytes((n - 1) * million / n * kv)],
    ["decode CP", "the cache", "one query's outputs and log-sum-exps",
     format_bytes((n - 1) * (wide + 4 * l70.num_heads))],
]  # fmt: skip
memory = kv_cache.plan_memory(l70, 80 * GB, million, chunk_tokens=8192)
print(f"scores kept: {memory.scores}; keys and values: {format_bytes(memory.cache)}")
widgets.table(rows, ["name", "divides", "exchanges", "sent per layer"])

# %% [markdown] name="errata-sequence-reading"
# **"Experts are too large for tensor parallelism, hence EP."** (E11.3) One expert of DeepSeek-V3 is small, and cutting experts by
# columns works (TensorRT-LLM does it, the course's engine without `enable_expert_parallel`). But slices are thin, and every rank
# then reads a slice of *every* expert for few tokens each:

# %% name="errata-thin"
expert = 3 * 7168 * 2048  # bytes in FP8: gate, up, down
ridge = f"an H100's ridge is {h100.ridge():.0f} operations per byte"
print(f"one expert: {expert / MB:.0f} MB; {ridge}")
rows = []
for name, columns, count in (("whole, EP 8", 2048, 32), ("an eighth, TP 8", 256, 256)):
    at_most, few = (gemm_intensity(n, 7168, columns) for n in (1e9, 32))
    num_bytes = format_bytes(count * expert * columns / 2048)
    rows.append([name, f"{at_most:,.0f}", f"{few:.0f}", count, num_bytes])
headers = [
    "expert",
    "operations/byte, at most",
    "with 32 tokens",
    "matrices",
    "bytes read",
]
widgets.table(rows, headers)

# %% [markdown] name="errata-thin-reading"
# (Per layer of 256 experts, 8 ranks, 16-bit products.) The bytes are equal; thin slices reach less of the arithmetic, and are
# eight times as many small products.
#
# **"DeepSeek-R1 runs on eight GPUs with TP 2 and EP 4."** (E11.5) The layout says nothing before the bytes fit:

# %% name="errata-fits"
weights = kv_cache.weight_bytes(shape_of("deepseek-r1"), 8)
rows = []
for name in ("H100", "H200", "MI300X", "B200"):
    chip = device(name)
    try:
        latency.require_fit(weights, chip, 8)
        left = format_bytes(0.9 * 8 * chip.capacity - weights)
    except ValueError:
        left = "does not fit"
    rows.append(
        [f"8 x {name}", format_bytes(weights / 8), format_bytes(chip.capacity), left]
    )
widgets.table(
    rows, ["GPUs", "FP8 weights on each", "memory of each", "left for caches at 90 %"]
)

# %% [markdown] name="errata-fits-reading"
# And "TP 2 splits attention and FFN *within each expert*" mixes two choices: experts have no attention. That is divided
# separately, by heads or by requests.
#
# **"100B and more need TP, EP and PP together."** (E11.6) The layout follows bytes, batch and links, not a count of parameters:

# %% name="errata-count"
bits = kv_cache.bits_per_weight(4, 32, scale_bits=8)  # MXFP4
rows = []
models = (
    ("gpt-oss-120b, MXFP4", 117e9, bits),
    ("Mixtral 8x22B, BF16", 141e9, 16),
    ("DeepSeek-V3, FP8", v3.num_params, 8),
)
for name, params, width in models:
    size = params * width / 8
    least = int(np.ceil(size / (0.9 * h100.capacity)))
    rows.append([name, f"{params / 1e9:.0f} billion", format_bytes(size), least])
widgets.table(rows, ["model", "parameters", "weights", "H100s at least"])

# %% [markdown] name="errata-count-reading"
# One, four and ten GPUs: none, a part of a node, and more than a node. The second needs one kind of parallelism, the last one
# experts over nodes; none of them needs all three.
# <!-- printed: errata-count -->

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026.
#
# **DeepSeek** published how it serves V3 and R1: prompts on 4 nodes (EP 32), decoding on 18 (EP 144), each with redundant experts,
# attention by requests, two-batch overlap in both; DeepEP (its dispatch, with one set of kernels for latency and one for
# throughput) and EPLB (its placement) are open source. **SGLang** has two-batch overlap, DeepEP and EPLB as options; **vLLM** has
# `--enable-expert-parallel` with data-parallel attention, dual-batch overlap and EPLB. **TensorRT-LLM** cuts experts by columns
# by default, with EP and mixed layouts as options.
#
# Ring attention and Ulysses come from training; for serving, vLLM and SGLang divide the cache of long contexts in decoding, and
# prompts among ranks in prefill. Names differ from engine to engine: ask what is divided and what is exchanged.

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

two.close()
widgets.quiz(load_quiz("12_parallelism").draw(seed=1, tag="experts"))

# %% [markdown] name="card"
# ## 10. Card
#
# - EP: experts whole, two all-to-alls a layer (dispatch, combine) and a small one with counts. Nothing is dropped. A rank without
#   tokens takes part.
# - A step waits for the busiest rank: max over mean. By lot it is above 1 already; a skew is cured by replicas of hot experts and
#   by placement.
# - Dispatch: direct for few tokens (rounds count), by node for many (bytes count).
# - Two-batch overlap pays if messages take as long as computing and a half batch costs half. Small batches read weights twice.
# - Ring: keys and values travel, results merge by log-sum-exp. Zig-zag spreads causal work. Hidden from some thousand tokens per
#   rank over a NIC. For the TTFT of one long prompt, not for throughput.
# - "Sequence parallelism" is four things: ask what is divided and what is exchanged.
# - First bytes per GPU, then the layout.
