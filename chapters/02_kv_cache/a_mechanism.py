# %% [markdown] name="title"
# # 02a · The KV cache: what it keeps and what it saves
#
# About 40 minutes. You need chapter 01 (prefill and decode). Two more notebooks follow: `b_memory` (bytes) and
# `c_requests` (many requests at once). The lab of this chapter is
# [Build a KV cache](../../labs/02_kv_cache/kv_cache.ipynb).

# %% name="setup"
import inspect
import json
import time

import numpy as np
import torch
import torch.nn.functional as F
from IPython.display import display
from torch.overrides import TorchFunctionMode

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, figure, show, tidy
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.features.baselines.contiguous_cache import (
    ContiguousAttention,
    ContiguousKVCache,
    generate_contiguous_cache,
)
from reference_impl.features.baselines.no_cache import generate_no_cache
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.kernels import reference
from reference_impl.core.linear import Linear
from reference_impl.theory import latency, model_shapes
from reference_impl.theory.hardware import device
from reference_impl.theory.units import format_flops, format_seconds

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
folder = course_model("target")
# The prefix cache is off, so that a prompt asked twice is computed twice; chapter 06 turns it on.
llm = LLM(folder, dtype="float32", kv_cache_bytes=32 * 2**20, prefix_cache="off")
model = llm.engine.model
shape = model_shapes.from_config(json.loads((folder / "config.json").read_text()), "course model")
on_gpu = model.device.type == "cuda"
print(
    f"{shape.name}: {shape.layers} layers, {shape.num_heads} query heads, {shape.num_kv_heads} KV heads on {model.device}"
)

# %% [markdown] name="question"
# ## 1. A question with a number
#
# A prompt has 200 tokens. The model generates 500 more, one after the other. In each layer and head, attention compares
# queries with keys; call one such comparison a *pair*.
#
# You can keep what you computed (with a cache), or run the whole text through the model again for every new token
# (without). **How many times more pairs does it take without a cache?** Guess before you read on.

# %% name="predict"
widgets.predict("02a-pairs", "How many times more query-key pairs without a cache, for 200 + 500 tokens?", "times")

# %% [markdown] name="idea"
# ## 2. The idea
#
# Picture a wall of drawers. Each word of the text, when it is read, fills one drawer: the **label** on the front says
# what can be found inside (its *key*), and inside is what it has to say (its *value*). Then the next word comes with a
# **question** (its *query*). It holds the question against all labels, opens the drawers in proportion to how well they
# fit, and mixes what it finds. Then it fills a drawer of its own.
#
# Three things follow from the picture.
#
# - **Drawers stay as they are.** A word only looks at words before it. A later word cannot change an earlier drawer. So
#   you can fill each drawer once and keep it. That is the KV cache.
# - **Questions are not kept.** A question is asked once, when its word arrives, and never needed again. So keys and
#   values are cached, and queries never are.
# - **Every newcomer still walks along the whole wall.** The cache saves filling the old drawers again. It does not save
#   reading them.
#
# The real wall is larger: one in every layer, with a drawer per KV head. A drawer takes memory for as long as the
# request lives. That cost is the subject of `b_memory`.

# %% name="idea-figure" jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

prompt_len, passes = 3, 3
fig = figure(7.6, 4.2)
grid = fig.subplots(2, passes)
for row, cached in enumerate((False, True)):
    for i in range(passes):
        ax, n = grid[row][i], prompt_len + i
        for q in range(n):
            for k in range(q + 1):
                fresh = not cached or i == 0 or q == n - 1
                looks = (
                    {"facecolor": ORANGE, "edgecolor": INK, "hatch": "//"}
                    if fresh
                    else {"facecolor": "white", "edgecolor": GREY}
                )
                ax.add_patch(Rectangle((k, q), 0.9, 0.9, linewidth=0.6, **looks))
        for k in range(n):
            fresh = not cached or i == 0 or k == n - 1
            looks = {"facecolor": ORANGE, "hatch": "//"} if fresh else {"facecolor": BLUE}
            ax.add_patch(Rectangle((k, n + 0.35), 0.9, 0.9, linewidth=0.6, edgecolor=INK, **looks))
        ax.set_xlim(-0.2, prompt_len + passes)
        ax.set_ylim(prompt_len + passes + 0.6, -0.2)
        ax.set_aspect("equal")
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        if i == 0:
            ax.set_ylabel("with a cache" if cached else "without a cache")
        ax.set_title(f"pass {i + 1}: {n} tokens", fontsize=10)
fig.supxlabel(
    "triangle: query-key pairs, one row per query. lower row: keys and values.\n"
    "orange, hatched = computed in this pass; blue = taken from the cache; white = not needed again",
    fontsize=9,
)
show(
    fig,
    "Six grids: three passes over 3, 4 and 5 tokens, without and with a cache. Without a cache every pass computes the "
    "whole triangle of query-key pairs and all keys and values. With a cache the second and third pass compute only "
    "the last row of the triangle and one new key and value; the others are taken from the cache.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# First the question, by counting: a pass without a cache has a query for every token, a pass with one only for the
# tokens that are new. The query at position `p` meets `p + 1` keys, its own included.


# %% name="scratch-count"
def pairs(prompt, new, cached):
    """Query-key pairs of one head, over all passes that generate `new` tokens."""
    total = 0
    for known in range(prompt, prompt + new):  # tokens that a pass starts with; it adds one
        first = known - 1 if cached and known > prompt else 0  # with a cache only the newest token has a query
        total += sum(position + 1 for position in range(first, known))
    return total


counts = {cached: pairs(200, 500, cached) for cached in (False, True)}
print(f"pairs without a cache {counts[False]:,}, with one {counts[True]:,}")
widgets.reveal("02a-pairs", counts[False] / counts[True])

# %% [markdown] name="scratch-text-2"
# Now the computation. One attention head, in as few lines as possible. `step_without_cache` recomputes the keys and
# values of all tokens, `step_with_cache` computes only those of the newest. Both count the keys and values they compute.

# %% name="scratch"
torch.manual_seed(0)
d = 8
W_q, W_k, W_v = torch.randn(3, d, d) / d**0.5


def attend(q, keys, values):  # one query [d] over n keys and values [n, d]
    weights = (keys @ q / d**0.5).softmax(dim=0)  # [n]: how well each label fits
    return weights @ values


def step_without_cache(text):  # text [n, d]: all tokens so far
    keys, values = text @ W_k, text @ W_v  # n of each, recomputed
    return attend(text[-1] @ W_q, keys, values), len(text)


def step_with_cache(newest, keys, values):  # newest [d]; keys and values: lists that outlive the step
    keys.append(newest @ W_k)
    values.append(newest @ W_v)
    return attend(newest @ W_q, torch.stack(keys), torch.stack(values)), 1


# %% [markdown] name="scratch-same-text"
# Six tokens, one after the other, both ways. The outputs must agree; the work must not.

# %% name="scratch-same"
text, keys, values = torch.randn(6, d), [], []
made_without = made_with = 0
for n in range(1, len(text) + 1):
    slow, made = step_without_cache(text[:n])
    made_without += made
    fast, made = step_with_cache(text[n - 1], keys, values)
    made_with += made
    torch.testing.assert_close(fast, slow)
print(f"same outputs; keys and values made: {made_without} without a cache, {made_with} with one")

# %% [markdown] name="why-valid-text"
# Two things here are too simple. Stacking a growing list copies it in every step, so engines reserve a buffer and track
# how much of it is filled. And this model has one layer. Why may the keys of *deeper* layers be kept? They are computed
# from the outputs of the layers below, and those depend only on tokens up to their own position. Look at the course
# model: run five tokens, run the same five and one more, and compare the keys and values of the five in every layer.


# %% name="why-valid"
def cache_after(tokens):
    """Keys and values of all layers, [layers, 2, tokens, kv_heads, head_dim], after one pass over `tokens`."""
    cache = ContiguousKVCache(model, rows=1, max_len=len(tokens))
    with torch.inference_mode():
        model(
            ragged_batch([(tokens, 0)], len(tokens), model.device),
            cache,
            ContiguousAttention(model.config.head_dim**-0.5),
        )
    return cache.data[:, :, 0]


six = llm.encode("for key, value in sorted(items):")[:6]
difference = (cache_after(six)[:, :, :5] - cache_after(six[:5])).abs().max().item()
print(f"largest difference over {shape.layers} layers: {difference:.1e} (float32 rounding)")
assert difference < 1e-4

# %% [markdown] name="why-valid-rope"
# The condition is *causal* attention. In a model where each token also looks ahead (BERT, for example), a new token
# changes all drawers, and nothing can be kept. A second condition concerns the position: this model rotates each key by
# an angle that depends on its position (RoPE) *before* it is cached. A cached key is valid only at its own position.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The engine has no separate code for prefill and decode. A request has tokens, and a count of how many of them are
# computed. Each step computes some of the remaining ones. Here is a prompt of three tokens, and two generated ones. The
# last column does not rely on any counter: it inspects the memory of layer 0 and counts the slots that were written.


# %% name="worked-trace"
def spell(tokens):
    return [llm.tokenizer.decode([t]) for t in tokens]


engine = Engine(model, EngineConfig(num_blocks=2, block_size=16, prefix_cache="off"))
prompt = llm.encode("return the value")[:3]
request = engine.add(prompt, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), request_id="worked")
lengths = []
for step in (1, 2):
    fed = request.tokens[request.num_computed_tokens :]
    result = engine.step()
    written = int((engine.kv_cache.data[0, 0].flatten(0, 1).abs().sum(dim=(1, 2)) > 0).sum())
    lengths.append((request.num_computed_tokens, written))
    print(f"pass {step}: in {spell(fed)}, out {spell(result.tokens['worked'])}, slots written in layer 0: {written}")
    assert written == request.num_computed_tokens == len(prompt) + step - 1
print(f"{len(prompt)} prompt tokens + {len(request.output_tokens)} outputs, {lengths[-1][1]} of them in the cache")

# %% name="worked-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.3)
ax = fig.subplots()
words = spell(request.tokens)
for row, (filled, known) in enumerate(((lengths[0][0], 4), (lengths[1][0], 5))):
    for i, word in enumerate(words[:known]):
        inside = i < filled
        ax.text(
            i, -row, word.strip() or "␣", ha="center", va="center", color="white" if inside else INK, fontsize=10,
            bbox={"boxstyle": "square,pad=0.5", "facecolor": BLUE if inside else "white", "edgecolor": BLUE if inside else ORANGE,
                  "linestyle": "-" if inside else "--"},
        )  # fmt: skip
ax.set_xlim(-0.7, 4.7)
ax.set_ylim(-1.6, 0.6)
ax.set_yticks([0, -1], ["after pass 1", "after pass 2"])
ax.set_xticks(range(5), ["prompt", "prompt", "prompt", "output 1", "output 2"])
ax.spines[:].set_visible(False)
ax.tick_params(length=0)
ax.set_title("filled: keys and values in the cache; dashed: known, not in the cache yet", fontsize=10, loc="left")
show(
    fig,
    "Cache contents of the worked trace. After pass 1 the three prompt tokens are in the cache and output 1 is known "
    "but not cached. After pass 2 the prompt and output 1 are in the cache; output 2 is known and not cached.",
)

# %% [markdown] name="worked-reading"
# Read it twice. The pass over the **prompt** already gives the first output. The second pass takes that output *in*,
# stores its key and value, and gives the next. The last output is never cached, because no later token needs its key
# and value. So after `n` outputs the cache holds `prompt + n - 1` tokens.
#
# Where are keys and values stored? Here is the simplest real cache of the repository: a buffer that is allocated in
# full, and a length per row. The buffer does not grow; only the lengths do.

# %% name="cache-source"
print(inspect.getsource(ContiguousKVCache))

# %% [markdown] name="layout-text"
# The engine itself divides the buffer into blocks of 16 tokens, so that a request need not own one contiguous piece
# (chapter 04 builds that). The order of the dimensions stays the same: layer, key or value, block, offset in the block,
# KV head, element of the head. Positions come before heads. The field calls this order NHD; HND swaps the two. With NHD
# one token is written as one contiguous run. Which order is better depends on the kernel that reads it.

# %% name="layout"
data = llm.engine.kv_cache.data
print("engine:    ", tuple(data.shape), "= layers, K or V, blocks, block size, KV heads, head dim")
print(
    "contiguous:",
    tuple(ContiguousKVCache(model, 2, 64).data.shape),
    "= layers, K or V, rows, max length, KV heads, head dim",
)
nhd = data[0, 0].flatten(0, 1)  # [slots, kv_heads, head_dim]
hnd = nhd.transpose(0, 1).contiguous()  # [kv_heads, slots, head_dim]
print("one token's keys lie in", 1 if nhd[5].is_contiguous() else shape.num_kv_heads, "run in NHD,",
      1 if hnd[:, 5].is_contiguous() else shape.num_kv_heads, "runs in HND")  # fmt: skip

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# Three ways to generate the same text with the course model: no cache, a contiguous cache, and the engine. First the
# outputs. The three add the same numbers in another order, so their logits agree up to rounding. In float32 that rarely
# tips a choice; the cell checks that it does not here. (In 16 bit two logits that are nearly equal may change places;
# with `batch_invariant=True` an engine's logits have the same bits, whatever else is computed with them.)

# %% name="identical"
prompt = (llm.encode("def read(path):\n    with open(path) as file:\n        return ") * 4)[:16]
greedy = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
by_engine = llm.generate([prompt], greedy)[0].token_ids
assert generate_no_cache(model, prompt, 32) == generate_contiguous_cache(model, [prompt], 32)[0] == by_engine
print("three ways, the same 32 tokens")

# %% [markdown] name="count-text"
# Now the work. We do not rely on formulas; we count where it happens. `Counter`, in the folded cell, hooks every matrix
# of every layer (rows times weights) and every call of `scaled_dot_product_attention` (unmasked pairs).


# %% name="counter-hooks" jupyter={"source_hidden": true}
class Counter(TorchFunctionMode):
    """Counts multiplications in the layers' matrices, and unmasked query-key scores."""

    def __init__(self):
        super().__init__()
        self.products = self.scores = 0

    def saw_matrix(self, module, inputs, output):
        self.products += inputs[0].numel() * output.shape[-1]  # rows x in x out

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            queries, n = (
                args[0].shape[:-1],
                args[1].shape[-2],
            )  # every axis but head_dim: heads x queries, however grouped
            if kwargs.get("is_causal"):
                self.scores += queries[:-1].numel() * n * (n + 1) // 2
            elif kwargs.get("attn_mask") is not None:
                self.scores += int(kwargs["attn_mask"].expand(*queries, n).sum())
            else:
                self.scores += queries.numel() * n
        return func(*args, **kwargs)


def counted(generate):
    """(tokens through all matrices, query-key pairs per layer and head) of one generation."""
    with Counter() as counter:
        hooks = [m.register_forward_hook(counter.saw_matrix) for m in model.modules() if isinstance(m, Linear)]
        generate()
    for hook in hooks:
        hook.remove()
    return counter.products / (shape.layers * shape.layer_params), counter.scores / (shape.layers * shape.num_heads)


# %% [markdown] name="counter-text"
# Each generation is counted twice, without a cache and with one. The assertions compare with closed forms, which follow
# below the cell.

# %% name="counter"
lengths = (8, 16, 32, 64) + ((128, 256, 512) if on_gpu else ())
S = len(prompt)
without = [counted(lambda T=T: generate_no_cache(model, prompt, T)) for T in lengths]
cached = [counted(lambda T=T: generate_contiguous_cache(model, [prompt], T)) for T in lengths]
rows = []
for T, slow, fast in zip(lengths, without, cached, strict=True):
    assert slow == (latency.uncached_linear_tokens(S, T), latency.uncached_attention_pairs(S, T))
    assert fast == (latency.cached_linear_tokens(S, T), latency.cached_attention_pairs(S, T))
    rows.append([T, *(x for a, b in zip(slow, fast, strict=True) for x in (int(a), int(b), f"{a / b:.1f}x"))])
widgets.table(rows, ["new tokens", "tokens, no cache", "with one", "ratio", "pairs, no cache", "with one", "ratio"])

# %% [markdown] name="count-reading"
# The counts match the closed forms of `reference_impl.theory.latency` exactly. With a prompt of `S` and `T` new tokens:
#
# | | without a cache | with a cache |
# |---|---|---|
# | tokens through the matrices | `T·(2S + T − 1)/2` | `S + T − 1` |
# | query-key pairs | sum of `n(n+1)/2` for `n = S … S+T−1` | `(S+T−1)(S+T)/2` |
#
# (The output projection to the vocabulary runs once per pass either way, so it is left out.)

# %% name="count-figure" jupyter={"source_hidden": true}
T = np.unique(np.logspace(0, 4, 60).astype(int))
fig = figure(7.6, 3.3)
left, right = fig.subplots(1, 2)
curves = (
    (left, "tokens through the matrices", latency.uncached_linear_tokens, latency.cached_linear_tokens, 0),
    (right, "query-key pairs", latency.uncached_attention_pairs, latency.cached_attention_pairs, 1),
)
for ax, title, slow, fast, which in curves:
    ax.loglog(T, slow(S, T), color=ORANGE, linestyle="--", label="no cache, formula")
    ax.loglog(T, fast(S, T), color=BLUE, label="cache, formula")
    ax.loglog(lengths, [c[which] for c in without], "s", color=ORANGE, label="no cache, counted")
    ax.loglog(lengths, [c[which] for c in cached], "o", color=BLUE, label="cache, counted")
    tidy(ax, "new tokens", "over the whole generation", title)
left.legend(fontsize=8, frameon=False)
show(
    fig,
    "Two log-log plots over the number of new tokens, prompt of 16. Tokens through the matrices grow quadratically "
    "without a cache and linearly with one; query-key pairs grow cubically without and quadratically with a cache. "
    "The counted points lie on the formulas.",
)

# %% [markdown] name="time-text"
# And the time? Times are shown here and never checked, because they depend on your machine and its other load. For a
# prompt of 16 and 128 new tokens the matrices do `T·(2S + T − 1)/2` against `S + T − 1` tokens' worth of operations.
# **How many times faster is the run with the contiguous cache, in seconds?**

# %% name="time-predict"
widgets.predict("02a-time", "A prompt of 16, 128 new tokens: how many times faster with a contiguous cache?", "times")


# %% name="time"
def seconds(generate):
    started = time.perf_counter()
    generate()
    return time.perf_counter() - started


timed = (8, 32, 128) + ((512, 1024) if on_gpu else ())
time_without = [seconds(lambda T=T: generate_no_cache(model, prompt, T)) for T in timed]
time_cached = [seconds(lambda T=T: generate_contiguous_cache(model, [prompt], T)) for T in timed]
time_engine = [
    seconds(lambda T=T: llm.generate([prompt], SamplingParams(max_tokens=T, temperature=0, ignore_eos=True)))
    for T in timed
]
# Two costs. A pass of one token: from the cached runs. Each further token in a pass: from the others.
T = np.array(timed)
slow, fast = latency.uncached_linear_tokens(S, T), latency.cached_linear_tokens(S, T)
per_pass = sum(time_cached) / T.sum()
per_token = max(sum(time_without) - sum(time_cached), 0) / (slow - fast).sum()
print(f"a pass of one token: {format_seconds(per_pass)}; each further token in it: {format_seconds(per_token)}")
times = [[n, f"{a:.2f} s", f"{b:.2f} s", f"{c:.2f} s", f"{a / b:.1f}x", f"{ratio:.1f}x"] for n, a, b, c, ratio
         in zip(timed, time_without, time_cached, time_engine, slow / fast, strict=True)]  # fmt: skip
headers = ["new tokens", "no cache", "contiguous", "engine", "time ratio", "ratio of operations in the matrices"]
display(widgets.table(times, headers))
widgets.reveal("02a-time", time_without[timed.index(128)] / time_cached[timed.index(128)])

# %% name="time-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 3.2)
ax = fig.subplots()
T = np.unique(np.logspace(np.log10(8), np.log10(timed[-1]), 40).astype(int))
slow, fast = latency.uncached_linear_tokens(S, T), latency.cached_linear_tokens(S, T)
ax.plot(T, slow / fast, color=INK, linestyle="--", label="operations in the matrices (exact)")
priced = (per_pass * T + per_token * (slow - T)) / (per_pass * T + per_token * (fast - T))
ax.plot(T, priced, color=BLUE, label="the same, with a cost per pass")
ax.plot(timed, np.array(time_without) / np.array(time_cached), "o", color=ORANGE, label="measured, contiguous cache")
ax.plot(timed, np.array(time_without) / np.array(time_engine), "^", color=GREEN, label="measured, engine")
ax.set_xscale("log", base=2)
ax.set_yscale("log", base=2)
ax.yaxis.set_major_formatter("{x:g}")
ax.set_xticks(timed, [str(n) for n in timed])
tidy(ax, "new tokens after a prompt of 16", "times faster with a cache")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Speed-up of the cache over the number of new tokens. The dashed line is the exact ratio of operations in the "
    "matrices; below it a line that adds a cost per pass to the operations. Measured with the contiguous cache: "
    + ", ".join(f"{a / b:.1f} at {n}" for n, a, b in zip(timed, time_without, time_cached, strict=True))
    + ".",
)

# %% [markdown] name="time-reading"
# If nothing disturbs the measurement, the measured ratio is below that of the operations. Both runs make the same
# number of **passes**, and a pass has a fixed cost: Python, the kernel launches, and reading all weights from memory
# once. The cached run pays that cost for one token, so it is nearly all that the run pays. The blue line includes it,
# with the two costs printed above, taken from the runs themselves.
#
# On a GPU with a model this small the fixed cost of a pass can be nearly everything, and for short texts the ratio
# close to 1. It can even be below 1: maintaining a cache also costs something. With a larger model or a longer text the
# work per token dominates, and the ratio grows.

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# The same counts for well-known models, with a lower bound on the time on one device: operations at its peak, or bytes
# at its bandwidth, whichever takes longer. Try a prompt of 1 and many new tokens. Then a long prompt and one new token:
# the ratio is 1, because the first token needs the whole prompt in any case.

# %% name="explore"
widgets.savings("llama-3-8b", prompt=1024, new=256)

# %% [markdown] name="errata-cost"
# ## 7. What the cheat sheets get wrong
#
# **"Without a cache, attention costs O(S × T) in total."** (E02.1) With a cache `S·T` is one term of `S²/2 + S·T +
# T²/2`. Step `t` without a cache compares `(S+t)²/2` pairs, so the sum is on the order of `T·(S+T)²`. Here is the
# question from the top again, by the closed forms, and beside it the tokens that pass through the matrices.

# %% name="errata-cost-cell"
S, T = 200, 500
pairs_without, pairs_cached = latency.uncached_attention_pairs(S, T), latency.cached_attention_pairs(S, T)
tokens_without, tokens_cached = latency.uncached_linear_tokens(S, T), latency.cached_linear_tokens(S, T)
print(f"S x T                      {S * T:>12,}")
print(f"pairs with a cache         {pairs_cached:>12,}")
print(f"pairs without a cache      {pairs_without:>12,}   {pairs_without / pairs_cached:.0f} times more")
print(
    f"tokens through the matrices {tokens_without:,} and {tokens_cached:,}: {tokens_without / tokens_cached:.0f} times more"
)
assert (pairs_without, pairs_cached) == (counts[False], counts[True])

# %% [markdown] name="errata-order"
# **"The cache turns O(n²) into O(n)."** (E02.2) Say whether per step or in total, and for attention or for the
# matrices. The cell below doubles `T` and shows by what factor each count grows; the exponent is its base-2 logarithm.
# In total, for outputs much longer than the prompt, attention goes from cubic to quadratic, the matrices from quadratic
# to linear. And the *number of passes* is the same: N tokens take N passes, with or without a cache. Each pass gets
# cheaper.

# %% name="errata-order-cell"
for name, count in (
    ("attention, no cache", latency.uncached_attention_pairs), ("attention, cache", latency.cached_attention_pairs),
    ("matrices, no cache", latency.uncached_linear_tokens), ("matrices, cache", latency.cached_linear_tokens),
):  # fmt: skip
    total = np.log2(count(1, 2**17) / count(1, 2**16))
    step = np.log2((count(1, 2**17) - count(1, 2**17 - 1)) / max(1, count(1, 2**16) - count(1, 2**16 - 1)))
    print(f"{name:20s} total grows like n^{total:.1f}, one step like n^{step:.1f}")

# %% [markdown] name="errata-100k"
# What does it mean at 100,000 tokens? An 8B model on one H100, at the limits of the hardware:

# %% name="errata-100k-cell"
llama, h100 = model_shapes.model("llama-3-8b"), device("H100")
for cached_run in (False, True):
    cost = latency.generation_cost(llama, 100_000, 1000, h100, cached=cached_run)
    print(f"{'with' if cached_run else 'without'} a cache: {cost.forward_passes} passes, {cost.attention_pairs:.3g} pairs, "
          f"{format_flops(cost.flops)}, at least {format_seconds(cost.seconds)}")  # fmt: skip
print(f"one more token: {format_seconds(latency.prefill_seconds(llama, 100_000, h100))} without, "
      f"{format_seconds(latency.decode_seconds(llama, 100_000, h100))} with a cache")  # fmt: skip

# %% [markdown] name="errata-attention"
# **"The cache avoids recomputing attention."** (E02.13) It avoids recomputing the *keys and values* of earlier
# positions, and with them the outputs of all layers there. The new query is still compared with every key. One step,
# counted:

# %% name="errata-attention-cell"
widgets.table(
    [[n, n, 1, latency.causal_pairs(n), latency.causal_pairs(1, n - 1)] for n in (16, 64, 256, 1024)],
    ["context of the step", "tokens projected, no cache", "with one", "pairs, no cache", "with one"],
)

# %% [markdown] name="errata-trace"
# **"Prefill three words; then step 2 generates the fourth by computing its Q, K and V."** (E01.12) You cannot compute
# the key of a word that is not known yet. Prefill already gives the fourth word; the next pass takes it in. The worked
# trace above shows it. Here it is again for longer outputs: the cache is always one token behind the text.

# %% name="errata-trace-cell"
request = engine.add(prompt[:5], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), request_id="behind")
while "behind" in engine.requests:
    engine.step()
    in_cache, generated = request.num_computed_tokens, len(request.output_tokens)
    assert in_cache == 5 + generated - 1
print(f"{generated} outputs, {in_cache} tokens in the cache")

# %% [markdown] name="errata-speedup"
# **"A cache makes it 40 to 50 times faster."** (E02.10) The number comes from a model of 6 layers, width 384, 256 new
# tokens on an RTX 4090: 3000 ms against 80 ms. Compute how long the card needs for the *uncached* run.

# %% name="errata-speedup-cell"
S, T = 16, 256
print(
    f"3000 / 80 = {3000 / 80:.1f}; operations would allow {latency.uncached_linear_tokens(S, T) / latency.cached_linear_tokens(S, T):.1f}"
)
layers = latency.linear_flops(latency.gpt_layer_params(6, 384), latency.uncached_linear_tokens(S, T))
attention = latency.attention_flops(latency.uncached_attention_pairs(S, T), 6, 6, 64)
head = latency.linear_flops(50_257 * 384, latency.uncached_linear_tokens(S, T))  # with logits everywhere
card = device("RTX4090")
print(
    f"uncached run: {format_flops(layers + attention)} in the layers, {format_flops(layers + attention + head)} with a "
    f"large output matrix at every position: {format_seconds((layers + attention + head) / card.peak('fp32'))} at the fp32 peak"
)
print(f"stated: 3000 ms, {3000 / T:.1f} ms per step; cached 80 ms, {80 / T:.2f} ms per step")  # fmt: skip

# %% [markdown] name="errata-speedup-reading"
# So almost none of the 3000 ms is arithmetic. It is the fixed cost of the passes: launches and Python. The cached run
# makes as many passes and launches as many kernels, so such a large ratio cannot come from the cache alone. Report two
# numbers instead: the ratio of operations, which is exact, and the ratio you measured, with the machine.

# %% [markdown] name="errata-mask"
# **"Prefill has T > 1, decode has T = 1, and the mask takes care of itself."** (E02.11, E02.12) There is a third case:
# several new tokens *and* a cache that holds some already. It occurs when a long prompt is prefilled in chunks, after a
# prefix cache hit, and when drafts are verified. Then the triangle has to be shifted. Query `i` of the new ones is at
# position `past + i` and may attend up to it. Here is the shifted mask, and PyTorch's `is_causal=True`, which is not
# shifted. (`window` is for layers that attend only to the last tokens; without it the mask is the triangle.)

# %% name="errata-mask-cell"
print(inspect.getsource(reference.causal_mask))
print("3 new queries after 2 cached tokens, right:\n", reference.causal_mask(3, 5, torch.device("cpu")).int().numpy())
print("what is_causal=True means for the same shapes:\n", torch.ones(3, 5).tril().int().numpy())

# %% [markdown] name="errata-chunks"
# Does it matter? Prefill a prompt in chunks of 1, 7 and 64, with the shifted mask and with the naive one, and compare
# the logits with those of a single pass.


# %% name="errata-chunks-cell"
class NaiveCausal(ContiguousAttention):
    """The mistake: is_causal=True regardless of the cached tokens."""

    def forward(self, q, k, v, layer, kv_cache, batch):
        kv_cache.write(layer, k, v, batch)
        keys, values = (t[0, : batch.context_lens[0]].transpose(0, 1)[None] for t in kv_cache.layer(layer))
        heads = q.transpose(0, 1)[None]
        several = q.shape[0] > 1
        out = F.scaled_dot_product_attention(heads, keys, values, is_causal=several, scale=self.scale, enable_gqa=True)
        return out[0].transpose(0, 1)


@torch.inference_mode()
def last_logits(tokens, chunk, attention_class):
    cache, attention = ContiguousKVCache(model, 1, len(tokens)), attention_class(model.config.head_dim**-0.5)
    for past in range(0, len(tokens), chunk):
        logits = model(ragged_batch([(tokens[past : past + chunk], past)], len(tokens), model.device), cache, attention)
    return logits[0]


# %% [markdown] name="errata-chunks-run-text"
# Now the same 100 tokens in chunks. The logits of the last position are compared; those of the right mask differ from a
# single pass by rounding only.

# %% name="errata-chunks-run"
long_prompt = (llm.encode(inspect.getsource(Engine)) * 2)[:100]
at_once = last_logits(long_prompt, 100, ContiguousAttention)
for chunk in (1, 7, 64):
    right = (last_logits(long_prompt, chunk, ContiguousAttention) - at_once).abs().max().item()
    naive = (last_logits(long_prompt, chunk, NaiveCausal) - at_once).abs().max().item()
    print(f"chunks of {chunk:2d}: shifted mask differs by {right:.1e}, naive by {naive:.1e}")
    assert right < 1e-3 * at_once.abs().max()

# %% [markdown] name="errata-chunks-reading"
# With chunks of 1 the naive version is right: one query may see everything, so decode needs no mask at all. That is why
# the mistake survives most tests. (FlashAttention has aligned its causal mask to the other corner since version 2.1, so
# the same call means two things in two libraries.) The lab asks you for one function that is right for every
# combination of `new tokens` and `past tokens`.

# %% [markdown] name="production"
# ## 8. In production
#
# As of 2026. Names of options change; look them up in the version you run.
#
# **vLLM** has no prefill and decode phases in its scheduler since its V1 engine (2025). A request has a number of
# computed tokens, and each step brings it closer to the number of tokens it has. The engine of this course follows
# that idea.
#
# **SGLang** keeps a pool of single-token slots (page size 1 by default) and a table from request and position to slot.
# When a request ends, its slots stay cached in a radix tree until memory is short (chapter 06).
#
# **TensorRT-LLM** stores the cache in blocks, 32 tokens each by default (`tokens_per_block` of `KvCacheConfig`), and
# keeps the layers of a block together.
#
# **Hugging Face transformers** shows both simple ways: `DynamicCache` grows by concatenation in every step, as in our
# section 3; `StaticCache` reserves a buffer, so that shapes stay fixed and the step can be compiled.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Each wrong option stands for a particular mistake, and the feedback names it. Change the seed for other numbers. Then
# build the cache yourself: [lab 02](../../labs/02_kv_cache/kv_cache.ipynb).

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("02_kv_cache").draw(seed=1, tag="mechanism"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Keep keys and values, never queries: a query is used in its own step only. Valid because attention is causal.
# - After `n` outputs the cache holds `prompt + n − 1` tokens. The last output is never fed back.
# - `N` tokens take `N` passes, with or without a cache. Each pass gets cheaper.
# - Matrices: `T(2S+T−1)/2` tokens without a cache, `S+T−1` with one. Per step `n` → 1.
# - Attention: on the order of `T(S+T)²` pairs without a cache, `(S+T)²/2` with one. Per step `n²/2` → `n`.
# - Several new tokens on a filled cache: shift the causal mask by the cached length. One query needs no mask.
# - Report two ratios: operations (exact) and time (with the machine). Both runs pay the fixed cost of each pass.
