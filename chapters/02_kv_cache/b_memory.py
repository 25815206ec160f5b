# %% [markdown] name="title"
# # 02b · The KV cache: how many bytes
#
# About 45 minutes. You need `a_mechanism`. You will compute the size of any cache from a model's config, and find out
# how many tokens and users a machine can hold. The lab is [Build a KV cache](../../labs/02_kv_cache/kv_cache.ipynb).

# %% name="setup"
import inspect
import json
import time

import numpy as np
import torch
from IPython.display import display

from chapters import widgets
from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, figure, show, tidy
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.features.baselines.contiguous_cache import ContiguousAttention, ContiguousKVCache
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.interfaces import KVSpec
from reference_impl.theory import drills, kv_cache, model_shapes
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import MODELS
from reference_impl.theory.units import GB, GiB, format_bytes

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
folder = course_model("target")
# The prefix cache is off, so that a prompt asked twice is computed twice; chapter 06 turns it on.
llm = LLM(folder, dtype="float32", kv_cache_bytes=32 * 2**20, prefix_cache="off")
model = llm.engine.model
shape = model_shapes.from_config(json.loads((folder / "config.json").read_text()), "course model")
on_gpu = model.device.type == "cuda"

# %% [markdown] name="question"
# ## 1. A question with a number
#
# Llama-3-70B has 80 layers, 64 query heads, 8 KV heads, and 128 values per head. It serves one request of 8,192 tokens.
# **How many GB do its keys and values take in 16 bits?** GB means 10⁹ bytes here. Guess before you compute.

# %% name="predict"
widgets.predict("02b-gigabytes", "How many GB does the cache of 8,192 tokens take in Llama-3-70B, 16 bit?", "GB")

# %% [markdown] name="idea"
# ## 2. The idea
#
# In the picture of `a_mechanism`, each token fills drawers on a wall. How many drawers, and how large?
#
# One wall per layer. On each wall, one drawer per **KV head**. Each drawer has a label (the key) and contents (the
# value), both vectors of `head_dim` values. So one token takes
#
# `2 × layers × KV heads × head_dim × bytes per value`
#
# and a request takes that times its tokens. Nothing else matters: not the number of parameters, the width of the MLP or
# the vocabulary.
#
# The factor that surprises people is the number of KV heads. It is a choice of the model's designers:
#
# - **Multi-head attention (MHA):** each query head has a key and a value of its own.
# - **Grouped-query attention (GQA):** a group of query heads shares one key and one value.
# - **Multi-query attention (MQA):** all query heads share a single key and value.
#
# The cache shrinks by the number of query heads per KV head. The computation of scores does not: each query head still
# has its own query. Chapter 09 covers how sharing affects quality and kernels, and multi-head latent attention
# (MLA), which stores one compressed vector per token instead.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.3)
for ax, (name, kv) in zip(fig.subplots(1, 3), (("MHA", 8), ("GQA, groups of 4", 2), ("MQA", 1)), strict=True):
    x_kv = [(i + 0.5) * 8 / kv - 0.5 for i in range(kv)]
    for q in range(8):
        ax.plot([q, x_kv[q * kv // 8]], [1, 0], color=GREY, linewidth=1, zorder=1)
    ax.scatter(range(8), [1] * 8, s=110, color=BLUE, zorder=2)
    ax.scatter(x_kv, [0] * kv, s=150, marker="s", color=ORANGE, edgecolor=INK, zorder=2)
    ax.set_title(f"{name}: {kv} of 8 cached", fontsize=10)
    ax.set_xlim(-0.7, 7.7)
    ax.set_ylim(-0.45, 1.45)
    ax.set_xticks([])
    ax.set_yticks([0, 1], ["KV heads", "query heads"] if kv == 8 else ["", ""])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
show(
    fig,
    "Eight query heads as circles above, KV heads as squares below, lines show who reads whom. MHA: eight KV heads, one "
    "each. GQA with groups of four: two KV heads. MQA: one KV head read by all.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# Two small checks in plain torch. First, the formula: allocate real tensors and check their size.

# %% name="scratch"
layers, head_dim, tokens = 4, 16, 10
for name, kv_heads in (("MHA", 8), ("GQA", 2), ("MQA", 1)):
    cache = torch.zeros(layers, 2, tokens, kv_heads, head_dim, dtype=torch.bfloat16)
    formula = 2 * layers * kv_heads * head_dim * 2
    assert cache.nbytes == tokens * formula
    print(f"{name}: {kv_heads} KV heads, {formula} bytes per token, {cache.nbytes} bytes for {tokens} tokens")
each_70b = 2 * 80 * 8 * 128 * 2  # Llama-3-70B: a key and a value, layers, KV heads, head_dim, bytes of 16 bit
print(f"Llama-3-70B: {each_70b:,} bytes per token")
widgets.reveal("02b-gigabytes", 8192 * each_70b / GB)

# %% [markdown] name="scratch-sharing-text"
# Second, what sharing means: grouped-query attention equals multi-head attention in which the heads of a group have
# equal keys and values. It stores them once.


# %% name="scratch-sharing"
def attend(q, k, v):
    """One query per head over all keys. q [heads, d]; k, v [tokens, kv_heads, d]; head h reads KV head h // group."""
    group = q.shape[0] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))  # for the arithmetic only; nothing is stored
    weights = (torch.einsum("hd,thd->ht", q, k) / q.shape[-1] ** 0.5).softmax(dim=-1)
    return torch.einsum("ht,thd->hd", weights, v)


torch.manual_seed(0)
heads, d = 8, 16
q, k, v = torch.randn(heads, d), torch.randn(tokens, 2, d), torch.randn(tokens, 2, d)
same = attend(q, k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1))  # MHA with equal heads in a group
torch.testing.assert_close(attend(q, k, v), same)
print(f"{heads} query heads over {k.shape[1]} KV heads: the output of {heads} KV heads of which four each are equal")

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The engine uses exactly this formula. It computes bytes per block from the model's config, divides the memory you gave
# it by that, and allocates everything at startup. Requests are then allocated blocks, never bytes. Two of the fields,
# `layers` and `window`, are for models in which some layers keep only the last tokens (a *sliding window*): their
# layers form several groups. The course model has one group, of all its layers. Scales, zero points and the kinds other
# than `kv` are for quantized caches, and for models that cache something other than keys and values.

# %% name="engine"
print(inspect.getsource(KVSpec))
spec = llm.engine.kv_spec
print(spec)
print(
    f"formula: {spec.bytes_per_token:,} bytes per token; tensor: {llm.engine.kv_cache.data.nbytes / (llm.engine.num_blocks * spec.block_size):,.0f}"
)
assert llm.engine.kv_cache.data.nbytes == llm.engine.num_blocks * spec.block_size * kv_cache.bytes_per_token(shape, 4)
print(
    f"{format_bytes(llm.engine.kv_cache.data.nbytes)} = {llm.engine.num_blocks} blocks = {llm.engine.num_blocks * spec.block_size} tokens"
)

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# One request grows token by token. How much memory does it hold? The line is the formula. The staircase is what the
# engine took from its pool, from the trace. The gap is the unused rest of the last block, less than one block.
#
# The prompt has 10 tokens, 110 are generated, blocks hold 16. **How many blocks does the request hold in the end?**

# %% name="measure-predict"
widgets.predict("02b-blocks", "A prompt of 10 and 110 outputs in blocks of 16: how many blocks in the end?", "blocks")

# %% name="measure-bytes"
engine = Engine(model, EngineConfig(num_blocks=16, block_size=16, prefix_cache="off"))
prompt = llm.encode("class Stack:\n    def __init__(self):\n        self.items = []\n")[:10]
engine.add(prompt, SamplingParams(max_tokens=110, temperature=0, ignore_eos=True), request_id="grows")
held, stored = [], []
while "grows" in engine.requests:
    request = engine.requests["grows"]
    engine.step()
    if request.block_table:  # its blocks are freed when it finishes
        stored.append(request.num_computed_tokens)
        held.append(len(request.block_table))
        assert held[-1] == -(-stored[-1] // 16) == 16 - engine.trace.steps()[-1].num_free_blocks
print(f"{held[-1]} blocks of 16 hold {stored[-1]} tokens before the last step")
widgets.reveal("02b-blocks", held[-1])

# %% name="measure-figure" jupyter={"source_hidden": true}
each, block = engine.kv_spec.bytes_per_token, engine.kv_spec.bytes_per_block
fig = figure(7.2, 2.8)
ax = fig.subplots()
ax.step(
    stored, np.array(held) * block / 1024, where="post", color=ORANGE, label="held by the request (blocks of 16 tokens)"
)
ax.plot(stored, np.array(stored) * each / 1024, color=BLUE, linestyle="--", label="formula: tokens x bytes per token")
tidy(ax, "tokens in the cache", "KiB")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Memory of one growing request. The formula is a straight line; the blocks held are a staircase on or above it, "
    "never more than one block higher.",
)

# %% [markdown] name="step-time-text"
# Memory is one cost. The other is time: each decode step *reads* the whole cache of its request, in addition to all
# weights. So its floor rises as the context grows. The folded cell times single steps at different lengths, on a cache
# filled with noise, since its contents do not change the time. Times are shown, not checked.
#
# **How many times as long does a step take at a context of 2,000 as at 64?** The weights are read in both.

# %% name="step-predict"
widgets.predict("02b-step", "How many times as long is a decode step at a context of 2,000 as at 64?", "times")

# %% name="step-time" jupyter={"source_hidden": true}
contexts = [64, 256, 512, 1024, 1536, 2000]
cache = ContiguousKVCache(model, 1, 2048)
cache.data.normal_()
attention = ContiguousAttention(model.config.head_dim**-0.5)


@torch.inference_mode()
def step_seconds(context, repeats=5):
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        logits = model(ragged_batch([([5], context - 1)], 2048, model.device), cache, attention)
        float(logits[0, 0])  # waits for a GPU to finish
        times.append(time.perf_counter() - started)
    return min(times)


step_seconds(64)  # the first call includes one-time setup
measured = np.array([step_seconds(n) for n in contexts])
weights = kv_cache.weight_bytes(shape, 32)  # this model in float32
read = weights + np.array(contexts) * kv_cache.bytes_per_token(shape, 4)
equal = kv_cache.tokens_until_cache_equals_weights(weights, kv_cache.bytes_per_token(shape, 4))
print(f"weights {format_bytes(weights)}; the cache is as large at {equal:,.0f} tokens")
print(f"bytes read at a context of {contexts[-1]:,}: {read[-1] / read[0]:.2f} times those at {contexts[0]}")

# %% name="step-answer"
widgets.reveal("02b-step", measured[-1] / measured[0])

# %% name="step-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 2.9)
ax = fig.subplots()
ax.plot(contexts, read / read[0], color=BLUE, linestyle="--", label="bytes read: weights and cache")
ax.plot(
    contexts, measured / measured[0], "o-", color=ORANGE, label=f"measured step (first: {measured[0] * 1e3:.1f} ms)"
)
tidy(ax, "context, tokens", "relative to the first")
ax.set_ylim(bottom=0)
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Time of one decode step of the course model over the context, relative to the shortest, beside the bytes read for "
    f"weights and cache, which grow to {read[-1] / read[0]:.2f}. Measured: "
    + ", ".join(f"{now / measured[0]:.2f} at {n:,}" for n, now in zip(contexts, measured, strict=True))
    + ".",
)

# %% [markdown] name="step-time-reading"
# Do not expect the two curves to agree. The dashed one counts bytes. A real step also has a fixed cost per layer (see
# `a_mechanism`), which flattens the measured curve (on a GPU, with a model this small, nearly to a line), and does
# arithmetic on every key, which slows a single CPU core but not a GPU. In a large model both show: the longer the
# context, the slower each further token.
#
# ### Worked values
#
# The same formula for real configs. Bytes are exact; sizes are decimal (GB) unless they say GiB.


# %% name="worked-table"
def cache_row(name):
    s = MODELS[name]
    heads = f"{s.num_heads}/{s.num_kv_heads}" if s.kv_lora_rank is None else f"{s.num_heads}/latent"
    sizes = [format_bytes(kv_cache.cache_bytes(s, tokens)) for tokens in (8192, 131072)]
    return [name, s.attention_kind, s.kv_layers, heads, int(kv_cache.bytes_per_token(s)), *sizes]


NAMES = """llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b qwen2.5-72b mistral-7b gemma-7b falcon-7b palm-540b
    deepseek-v3 qwen3-next-80b-a3b"""
widgets.table(
    [cache_row(name) for name in NAMES.split()],
    ["model", "kind", "layers", "q/KV heads", "bytes/token", "8k tokens", "128k tokens"],
)

# %% name="worked-lengths"
big, small, qwen = MODELS["llama-3-70b"], MODELS["llama-3-8b"], MODELS["qwen2.5-72b"]
print(f"llama-3-8b, 8,192 tokens: {format_bytes(kv_cache.cache_bytes(small, 8192))}")
mha = kv_cache.attention_bytes_per_token(qwen.layers, qwen.num_heads, qwen.head_dim)
print(f"qwen2.5-72b, 4,096 tokens: {format_bytes(kv_cache.cache_bytes(qwen, 4096))}; with a KV head per query head it "
      f"would be {format_bytes(4096 * mha)}")  # fmt: skip
assert kv_cache.bytes_per_token(big) == each_70b
sizes = {n: kv_cache.cache_bytes(big, n) for n in (4096, 8192, 32768, 65536, 131072, 1_000_000)}
widgets.table(
    [[tokens, format_bytes(size), format_bytes(size, binary=True)] for tokens, size in sizes.items()],
    ["llama-3-70b: tokens", "decimal", "binary"],
)

# %% [markdown] name="footprint-text"
# Many requests: **footprint = bytes per token × length × concurrency**. At some point the cache is larger than the
# weights. That point is a number of tokens over all requests:

# %% name="footprint"
for name in ("llama-2-13b", "llama-2-70b"):
    s = MODELS[name]
    print(
        f"128 requests x 2,048 tokens on {name}: {format_bytes(kv_cache.cache_bytes(s, 2048, 128))} of cache, {format_bytes(kv_cache.weight_bytes(s))} of weights"
    )
for name in ("llama-2-7b", "llama-3-8b", "llama-3-70b"):
    s = MODELS[name]
    tokens = kv_cache.tokens_until_cache_equals_weights(kv_cache.weight_bytes(s), kv_cache.bytes_per_token(s))
    print(
        f"{name}: the cache is as large as the weights at {tokens:,.0f} tokens, {tokens / 8192:.1f} requests of 8,192"
    )

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# The calculator uses the same functions. Questions to try: how many requests of 32,768 tokens does a 70B model hold on
# four H100? What does an 8-bit cache change, and what do 4-bit weights change? Which of the two helps more at long
# contexts? At what length does Llama-2-13B stop fitting, and at what length Llama-2-70B?

# %% name="explore"
widgets.kv_memory("llama-3-70b", context=8192, requests=8, device_name="H100", devices=4)

# %% [markdown] name="oom-text"
# ### Out of memory on a long prompt
#
# Before you change anything, compute the components. Weights, cache, activations of the tokens in one step, score
# matrices if attention is not fused, logits. Each remedy reduces one of them. The cell prefills one prompt of 65,536
# tokens with an 8B model on an 80 GB device in four ways.

# %% name="oom"
ways = {
    "scores written out, logits everywhere": {"fused_attention": False, "logits_for_all_positions": True},
    "fused attention": {"logits_for_all_positions": True},
    "and logits of the last position only": {},
    "and read in chunks of 2,048": {"chunk_tokens": 2048},
}
plans = {
    name: kv_cache.plan_memory(small, device("H100").capacity, 65_536, **options) for name, options in ways.items()
}
for name, plan in plans.items():
    print(f"-- {name}\n{plan.report()}\n")

# %% [markdown] name="oom-reading"
# What remains at the end is weights and cache. If *that* is too much, other remedies are needed: store keys and values
# in 8 bits, which halves the cache; allocate memory in blocks, so that hardly any is reserved and unused; admit
# requests only while blocks are free; and if a single request is too large, split it over several GPUs or offload part
# of the cache. (Tensor parallelism splits the cache by KV heads. With more GPUs than KV heads some heads are stored
# twice, so a GPU's share shrinks no further.)

# %% name="oom-fp8"
for bits in (16, 8):
    print(
        f"cache of 65,536 tokens in {bits} bit: {format_bytes(kv_cache.cache_bytes(small, 65_536, bytes_per_value=bits / 8))}"
    )

# %% [markdown] name="errata-heads"
# ## 7. What the cheat sheets get wrong
#
# **"Bytes per token = L · 2 · H · D · P with H heads."** (E02.3, E02.4) Which heads? With query heads, the result for
# Llama-3-70B is eight times too large. And **"the cache grows with the parameters"**: a 13B model can need more than a
# 70B model.

# %% name="errata-heads-cell"
right = kv_cache.bytes_per_token(big)
wrong = kv_cache.attention_bytes_per_token(big.layers, big.num_heads, big.head_dim)
print(
    f"llama-3-70b: {right:,} bytes per token with KV heads, {wrong:,} with query heads: {wrong / right:.0f} times too many"
)
a, b = MODELS["llama-2-13b"], MODELS["llama-2-70b"]
print(f"13B: {kv_cache.bytes_per_token(a):,} bytes, 70B: {kv_cache.bytes_per_token(b):,} bytes; the 13B needs "
      f"{kv_cache.bytes_per_token(a) / kv_cache.bytes_per_token(b):.1f} times as many")  # fmt: skip
as_mha = kv_cache.attention_bytes_per_token(b.layers, b.num_heads, b.head_dim)
print(f"even with MHA the 70B would need {as_mha / kv_cache.bytes_per_token(a):.1f} times the 13B's cache, "
      f"while it has {b.num_params / a.num_params:.1f} times the parameters")  # fmt: skip

# %% [markdown] name="errata-who"
# **"MQA saves 8 to 16 times"** (E09.1) and **"Llama 2, Mistral and Gemma use GQA"** (E09.2). The factor is the number of
# query heads per KV head, and it differs inside a family. Always read the config. One trap: Falcon-7B's config says
# `num_kv_heads: 71` and means 1, because `multi_query` is true and `new_decoder_architecture` false.

# %% name="errata-who-cell"
for name in ("llama-2-7b", "llama-2-70b", "llama-3-8b", "mistral-7b", "gemma-7b", "falcon-7b", "palm-540b"):
    s = MODELS[name]
    print(
        f"{name:12s} {s.attention_kind}: {s.num_heads} query heads, {s.num_kv_heads} KV heads, cache {s.num_heads // s.num_kv_heads}x smaller than MHA"
    )
falcon = {
    "model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "num_kv_heads": 71,
    "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024,
}  # fmt: skip
print("falcon-7b from its config:", model_shapes.from_config(falcon).attention_kind)

# %% [markdown] name="errata-int8"
# **"An 80 GB GPU holds a 70B model in INT8, 35 GB, with 45 GB left."** (E02.5) One byte per weight is 70.6 GB. 35 GB would be
# 4 bit for every weight, without the scales that 4-bit formats need, and with the embeddings in 4 bits, too. Most 4-bit
# checkpoints keep the embedding and the output matrix in 16 bits: the third row.

# %% name="errata-int8-cell"
gpu, each = device("H100").capacity, kv_cache.bytes_per_token(big)
for name, bits, embedding in (
    ("INT8", 8, None), ("4 bit, group 128", kv_cache.bits_per_weight(4, 128), None),
    ("the same, embeddings in 16 bits", kv_cache.bits_per_weight(4, 128), 16),
):  # fmt: skip
    weights = kv_cache.weight_bytes(big, bits, embedding)
    left = kv_cache.kv_budget(gpu, weights)
    print(
        f"{name:31s} weights {format_bytes(weights)}, left at 0.9: {format_bytes(left)} = {kv_cache.tokens_that_fit(gpu, weights, each):,} tokens"
    )
print(f"one request of 131,072 tokens: {format_bytes(kv_cache.cache_bytes(big, 131072))}")

# %% [markdown] name="errata-units"
# **"Allocate 8,192 tokens × 2.68 GB"** (E02.6) and sizes that are GB in one line and GiB in the next (E00.9). 2.68 GB
# is already the size of 8,192 tokens. A reservation strands the part that no token uses:

# %% name="errata-units-cell"
print(
    f"one token {each:,} bytes; 8,192 tokens {8192 * each:,} bytes = {8192 * each / GB:.2f} GB = {8192 * each / GiB:.2f} GiB"
)
for used in (500, 2000):
    stranded = kv_cache.stranded_bytes(8192, used, each)
    print(
        f"8,192 reserved, {used} used: {8192 - used:,} tokens stranded = {format_bytes(stranded)}, {stranded / (8192 * each):.0%}"
    )
print(f"32,768 tokens: {format_bytes(32768 * each)} = {format_bytes(32768 * each, binary=True)}")

# %% [markdown] name="errata-budget"
# **"(320 − 140) GB over 50 users gives each about 110,000 tokens to generate."** (E02.7, E02.14) Too many by a factor
# of ten. And the division gives the whole context: the prompt has to fit, too.


# %% name="errata-budget-cell"
def budget_row(users):
    whole = kv_cache.max_context_for_budget(320 * GB, 140 * GB, users, each, utilization=1.0)
    return [users, whole, kv_cache.max_context_for_budget(320 * GB, kv_cache.weight_bytes(big), users, each)]


def left_row(prompt, same):
    left = kv_cache.max_new_tokens_for_budget(320 * GB, 140 * GB, 50, each, prompt, same, utilization=1.0)
    return [prompt, same, int(left)]


display(
    widgets.table([budget_row(n) for n in (50, 100)], ["users", "tokens each with all of the memory", "at 0.9 of it"])
)
widgets.table(
    [left_row(*lengths) for lengths in ((0, 0), (4000, 0), (8000, 0), (10_986, 0), (8000, 6000))],
    ["50 users: prompt", "of it the same for all", "tokens left to generate"],
)

# %% [markdown] name="errata-users"
# **"140 GB of weights and 134 GB of cache: four 80 GB GPUs serve 100 users with 4,096 tokens."** (E02.8, E02.9) The numbers
# are those of Qwen2.5-72B, whose weights take more than 140 GB; no model called Qwen3.5-72B exists. And an engine
# does not get all 320 GB.

# %% name="errata-users-cell"
weights, cache_size = kv_cache.weight_bytes(qwen), kv_cache.cache_bytes(qwen, 4096, 100)
usable = 0.9 * 4 * device("H100").capacity
print(
    f"140 GB + {format_bytes(cache_size)} = {format_bytes(140 * GB + cache_size)}; with the true weights ({format_bytes(weights)}) {format_bytes(weights + cache_size)}"
)
print(f"usable at 0.9: {format_bytes(usable)}; left: {format_bytes(usable - weights - cache_size)} for activations and growth, "
      f"{(usable - weights - cache_size) / 100 / kv_cache.bytes_per_token(qwen):.0f} tokens per user")  # fmt: skip
print(f"with an 8-bit cache left: {format_bytes(usable - weights - cache_size / 2)}")
hybrid = MODELS["qwen3-next-80b-a3b"]
print(f"a hybrid model: {hybrid.kv_layers} of {hybrid.layers} layers keep keys and values ({kv_cache.bytes_per_token(hybrid):,} bytes per token), "
      f"the others {format_bytes(hybrid.fixed_state_bytes)} per request, whatever its length")  # fmt: skip

# %% [markdown] name="errata-users-reading"
# Barely feasible, and only if 4,096 is a cap on prompt *and* output. Real plans leave headroom, because
# lengths vary.

# %% [markdown] name="worked-problem"
# ### Worked problem: one long request among many short ones
#
# The course's deployment, as in all chapters: Llama-3-70B in 16 bits (80 layers, 8 KV heads of 128, 70.55 billion
# parameters) on four H100 of 80 GB with tensor parallelism. An engine may use 90 % of the memory; leave activations out.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_02b_one_long_request_costs_as_much_as_many_short_ones -->
#
# *60 chats of 4,096 tokens run. A request of 131,072 tokens arrives: does it fit beside them? Then a second one like it:
# how many chats have to end first? Which change lets both run beside all 60 chats, an 8-bit cache or 4-bit weights? And
# what does a GPU hold of one token with TP 4, 8 and 16?*
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_02b_one_long_request_costs_as_much_as_many_short_ones -->
#
# <details><summary>Answer</summary>
#
# Room for the cache: 0.9 · 320 − 141.1 = 146.9 GB, and a token takes 2 · 80 · 8 · 128 · 2 = 327,680 bytes. A chat takes
# 1.34 GB, 60 of them 80.5 GB. The long request takes 42.9 GB, as much as 32 chats. Together 123.5 GB: **it fits**, with
# 23.4 GB to spare. The second one lacks 19.5 GB: it waits until **15 chats** have ended.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_02b_one_long_request_costs_as_much_as_many_short_ones -->
#
# Two long requests and the 60 chats need 166.4 GB. An 8-bit cache halves that, to 83.2 GB. 4-bit weights
# with a 16-bit scale for every 128, embeddings and output matrix left in 16 bits, take 39.5 GB and leave 248.5 GB.
# **Either is enough.** The 8-bit cache leaves 63.7 GB, in which a token takes half; the 4-bit weights leave 82.1 GB, in
# which it takes all of its 327,680 bytes: 389 thousand tokens more against 250 thousand.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_02b_one_long_request_costs_as_much_as_many_short_ones -->
#
# TP 4: two KV heads on each GPU, 81,920 bytes per token. TP 8: one head, 40,960 bytes. TP 16: **40,960 bytes** again,
# because a head is not split: each is stored on two GPUs, and the cache of all together takes twice the memory.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_02b_one_long_request_costs_as_much_as_many_short_ones -->
#
# </details>

# %% [markdown] name="practice-text"
# ## Practice
#
# A drill is a random model on a random machine. Compute by hand, then check. The checker names the mistake if it
# recognizes it. Change the number for another drill.

# %% name="drill"
drill = drills.make_drill(7)
print(drill.describe())
for question in drill.questions:
    print(f"- {question.key}: {question.prompt}")


# %% name="drill-check"
def my_answers(drill):
    """Replace with your own numbers. This one makes a classic mistake in the first line."""
    s = drill.shape
    return {"kv_bytes_per_token": 2 * s.layers * s.num_heads * s.head_dim * 2 / 1000, "kv_bytes": 1.0}


for key, answer in my_answers(drill).items():
    print(f"{key}: {drills.check(drill, key, answer).message}")

# %% [markdown] name="production"
# ## 8. In production
#
# As of 2026. Names of options and their defaults change; look them up in the version you run.
#
# **vLLM** is given a share of the GPU, `gpu_memory_utilization` (0.9 for years, 0.92 in the current documentation). It
# loads the weights, runs one pass with the largest batch it will ever run to measure peak activation memory, and
# divides the rest of the share into blocks of 16 tokens. The log says how many tokens fit. `--kv-cache-dtype fp8`
# halves the bytes per token; `--max-model-len` caps a request.
#
# **SGLang** calls its share `--mem-fraction-static`: weights and cache pool together. The rest is left for activations
# and graphs, so if the share is too large it fails later, under load.
#
# **TensorRT-LLM** sizes the cache as a share of what is *free after loading* (`free_gpu_memory_fraction`, 0.9 by
# default). So 0.9 means something different than in vLLM: it does not include the weights.

# %% name="production-shares"
weights = kv_cache.weight_bytes(small)
print(
    f"8B on one 80 GB GPU: 0.9 of all minus weights = {format_bytes(0.9 * gpu - weights)}; 0.9 of what is free = {format_bytes(0.9 * (gpu - weights))}"
)

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Change the seed for other numbers. Then build the cache yourself: [lab 02](../../labs/02_kv_cache/kv_cache.ipynb).

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("02_kv_cache").draw(seed=1, tag="memory"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Bytes per token = `2 · layers · KV heads · head_dim · bytes`. KV heads, not query heads; head_dim from the config.
#   MLA: `layers · (latent + rope dim) · bytes`. Hybrids: only the attention layers, plus a fixed state per request.
# - Llama-3-8B: 128 KiB per token in 16 bits. Llama-3-70B: 320 KiB, 2.68 GB per 8,192 tokens.
#   <!-- printed: worked-lengths -->
# - MHA: KV heads = query heads. GQA: fewer. MQA: one. The cache shrinks by query heads per KV head.
# - Budget: `utilization · memory − weights − reserve`. Divide by bytes per token: tokens over *all* requests.
# - Tensor parallelism divides a GPU's share of the cache up to the number of KV heads, and no further.
# - Context per user = prompt + output. Left to generate = context − prompt. A shared prefix counts once.
# - A reservation strands `(reserved − used) · bytes per token`.
# - Out of memory: compute weights, cache, activations, scores, logits. Then act on the largest.
# - Say GB (10⁹) or GiB (2³⁰). They differ by 7 %.
