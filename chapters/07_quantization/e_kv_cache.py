# %% [markdown] name="title"
# # 07e · Fewer bits for keys and values
#
# About 35 minutes. You need `a_numbers`, `b_what_it_buys` and chapter 04 (paged attention). Weights are rounded once, at
# leisure, by a method that sees calibration data. Keys and values are rounded while the model runs, as they are written.

# %% name="setup"
import inspect
import json

import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, figure, show, tidy
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.features.kv_formats.eight_bits import EightBitKVCache
from reference_impl.bench.quality import logprobs
from reference_impl.interfaces import KVSpec
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.units import GiB

torch.set_num_threads(1)
FOLDER = course_model("target")
llm = LLM(FOLDER, dtype="float32", kv_cache_bytes=2**20)
model, c = llm.engine.model, llm.engine.model.config
text = llm.encode(inspect.getsource(json.decoder))[:384]
exact = logprobs(model, text)


class Through(RecomputeAttention):
    """Attention that sees keys and values as a cache gives them back. keys, values: [tokens, heads, head_dim] -> same."""

    def __init__(self, keys=None, values=None):
        super().__init__(c.attention_scale, c.attention_softcap)
        self.keys, self.values, self.seen = keys or (lambda k: k), values or (lambda v: v), []

    def forward(self, q, k, v, layer, kv_cache, batch):
        self.seen.append((q, k, v))
        return super().forward(q, self.keys(k), self.values(v), layer, kv_cache, batch)


@torch.inference_mode()
def logprobs_through(tokens, attention):
    """[tokens, vocabulary]"""
    batch = ragged_batch([(tokens, 0)], len(tokens), model.device, c.layer_windows)
    batch.logits_indices = torch.arange(len(tokens))
    return model(batch, None, attention).float().log_softmax(-1)


def kl_of(found):
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def off(y, right):
    """Relative error, percent."""
    return 100 * float((y - right).norm() / right.norm())


def scores(q, k):
    """Of the last 64 tokens with all: [heads, 64, tokens]. Grouped queries."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("qhd,khd->hqk", q[-64:], k)


watching = Through()
logprobs_through(text, watching)
q3, k3, v3 = watching.seen[3]  # layer 3: after norms and rotation, as the cache is given them

# %% [markdown] name="question"
# ## 1. A question with a number
#
# The course model's cache is stored in INT8, with a scale for each token and head: a number has one of 255 values. Then in
# INT4: 15 values, and steps 127 / 7 = 18 times as wide. **How many times as large is the KL to the 16-bit model?**
# <!-- printed: answer -->

# %% name="predict"
widgets.predict("07e-kl", "KL with an INT4 cache over KL with an INT8 cache, scale per token and head?", "times")


# %% name="answer"
def rounded(x, bits, dim):
    """Integers with one scale for what lies along `dim`, and read back."""
    most = 2 ** (bits - 1) - 1
    scale = x.abs().amax(dim, keepdim=True).clamp(min=1e-9) / most
    return (x / scale).round() * scale


by_bits = {}
for bits in (8, 4):
    per_token = lambda x, bits=bits: rounded(x, bits, -1)  # noqa: E731
    by_bits[bits] = kl_of(logprobs_through(text, Through(per_token, per_token)))
print(f"{2**8 - 1} and {2**4 - 1} values, steps {127 / 7:.0f} times as wide; KL {by_bits[8]:.2e} and {by_bits[4]:.2e}")
widgets.reveal("07e-kl", by_bits[4] / by_bits[8])

# %% [markdown] name="answer-reading"
# Not 18 times but the square of it, more or less: near its minimum of 0, KL grows with the square of the error.
# <!-- printed: answer --> That is why 8 bits are nearly free and 4 bits are a question.
#
# ## 2. The idea
#
# Whoever takes minutes writes in shorthand, once, while others speak, and reads them again for every later question. The
# shorthand has to be quick to write; what it leaves out is gone for all questions; and a page holds more of it.
#
# - **On write**: each new key and value is rounded, with a scale made from it alone. Nothing has to be calibrated.
# - **On read**: the attention kernel reads codes and scales, and multiplies on the way. Fewer bytes per step.
# - **Fit**: the same memory holds more tokens.
#
# What shares a scale decides how good it is. Look at what is to be stored, channel by channel:

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.6)
axes = fig.subplots(1, 2, sharey=True)
for ax, (name, x) in zip(axes, (("keys", k3), ("values", v3)), strict=True):
    for head, style in ((0, "-"), (1, ":")):
        ax.plot(x[:, head].abs().amax(0), style, color=BLUE, label=f"head {head}, largest")
        ax.plot(x[:, head].square().mean(0).sqrt(), style, color=GREEN, linewidth=1, label=f"head {head}, rms")
    tidy(ax, "channel", "magnitude" if name == "keys" else "", f"{name} of layer 3")
axes[0].legend(fontsize=7.5, frameon=False)
spread = [float(x.abs().amax(0).max() / x.abs().amax(0).median()) for x in (k3, v3)]
show(
    fig,
    f"Largest magnitude and rms of each channel in layer 3. The largest channel is {spread[0]:.1f} times the median one in the "
    f"keys and {spread[1]:.1f} times in the values.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# A token's key is a row. With a scale for each row, its large channels set the step for the small ones. **KIVI** (Liu et al.
# 2024) stores keys with a scale for each *channel*, over a block of tokens, and values with one for each token. (It was made
# for 2 bits: with a least number beside each scale, and the latest tokens in 16 bits. Here it is only its split, in 4.)
# **In 4 bits, with as many values for a scale in both, by what factor does that change the error of the attention scores?**

# %% name="scratch-predict"
widgets.predict("07e-kivi", "INT4 keys: error of the scores per token over that per channel?", "times")


# %% name="scratch-kivi"
def per_channel(x, bits, block=64):
    """A scale for each channel of each head over `block` tokens; the last, partial block stays as it is."""
    whole = len(x) // block * block
    blocks = x[:whole].unflatten(0, (-1, block))  # [blocks, block, heads, head_dim]
    return torch.cat((rounded(blocks, bits, 1).flatten(0, 1), x[whole:]))


right = scores(q3, k3)
error = {
    (bits, name): off(scores(q3, way(k3, bits)), right)
    for bits in (8, 4)
    for name, way in (
        ("tensor", lambda x, bits: rounded(x, bits, (0, 1, 2))),
        ("token and head", lambda x, bits: rounded(x, bits, -1)),
        ("channel, 64 tokens", per_channel),
    )
}
widgets.reveal("07e-kivi", error[4, "token and head"] / error[4, "channel, 64 tokens"])
names = dict.fromkeys(name for _, name in error)
widgets.table([[n, *(f"{error[b, n]:.2f} %" for b in (8, 4))] for n in names], ["keys: a scale per", "INT8", "INT4"])

# %% [markdown] name="scratch-kivi-reading"
# This is why a partial block is a complication: a channel's scale is known only when the block is full. Until then its
# tokens stay in 16 bits; and an engine has to keep that straight when a block is shared, copied, rolled back or swapped.
#
# Values have no such channels, and attention sums them over tokens with a weight for each:

# %% name="scratch-values"
weights = (right * c.attention_scale).softmax(-1)
mixed = lambda v: torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(weights.shape[0] // v.shape[1], 1))  # noqa: E731
rows = []
for name, way in (("token and head", lambda x, b: rounded(x, b, -1)), ("channel, 64 tokens", per_channel)):
    rows.append([name, *(f"{off(mixed(way(v3, bits)), mixed(v3)):.2f} %" for bits in (8, 4))])
widgets.table(rows, ["values: a scale per", "INT8", "INT4"])

# %% [markdown] name="scratch-values-reading"
# Here there is little between the two, and a scale per token can be written at once. So keys go by channel, values by
# token. The planted case shows what KIVI is for. Large models have a few key channels that are ten times as large as the
# rest, or more; to plant four of them (`c_methods`, section 4, lists what is planted where), multiply these channels of the keys by 10 and of the queries by 1/10, which leaves
# every score what it was. **INT4 per token: what is the error of the scores?** <!-- source: KIVI's paper, section 3 -->
# <!-- printed: scratch-planted -->

# %% name="scratch-planted-predict"
widgets.predict(
    "07e-planted", "Keys with four channels 10 times as large, INT4 per token and head: error of the scores?", "%"
)

# %% name="scratch-planted"
factor = torch.ones(c.head_dim)
factor[[3, 19, 35, 51]] = 10
q10, k10 = q3 / factor, k3 * factor
assert off(scores(q10, k10), right) < 0.001  # % of it: the same scores
rows = []
for name, way in (("token and head", lambda x, b: rounded(x, b, -1)), ("channel, 64 tokens", per_channel)):
    rows.append([name, *(f"{off(scores(q10, way(k10, bits)), right):.2f} %" for bits in (8, 4))])
print(f"{int((factor == 10).sum())} channels, {int(factor.max())} times as large")
widgets.reveal("07e-planted", off(scores(q10, rounded(k10, 4, -1)), right))
widgets.table(rows, ["planted keys: a scale per", "INT8", "INT4"])

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# `kv_dtype="int8"` or `"fp8"`: each head of a token has codes of 8 bits and a scale of 32. `"int4"`: codes of 4 bits, a
# scale and a least number of 16 bits each. Tokens are rounded as they are written, so
# a text does not depend on how its prompt was cut into steps. No format of the engine splits keys by channel: a block's
# scales are known when it is full, so its last tokens would need a place of their own. Here in 8 bits:

# %% name="engine-source"
print(inspect.getsource(EightBitKVCache.write))

# %% [markdown] name="engine-bits-text"
# What a token takes is counted in one place, `KVSpec`: **head_dim is 64 here; by how much does an 8-bit cache shrink a
# token, scales included?**

# %% name="engine-bits-predict"
widgets.predict("07e-bytes", "Bytes of a token in 16 bits over those in INT8 with its scales?", "times")

# %% name="engine-bits"
rows, each = [], {}
for name, bits, scale, lowest in (
    ("16 bits", 16, 0, 0),
    ("8 bits", 8, 32, 0),
    ("4 bits, with a least number", 4, 16, 16),
):
    spec = KVSpec(
        c.num_layers,
        c.num_kv_heads,
        c.head_dim,
        16,
        bits_per_value=bits,
        bits_per_scale=scale,
        bits_per_zero_point=lowest,
    )
    each[name] = spec.bytes_per_token
    rows.append([name, spec.bits_per_head, f"{spec.bits_per_head / c.head_dim:.2f}", spec.bytes_per_token])
widgets.reveal("07e-bytes", each["16 bits"] / each["8 bits"])
widgets.table(rows, ["cache", "bits of a key", "bits a value", "bytes a token, all layers"])

# %% name="engine-run"
prompt, rows = "def read_lines(path):\n", []
for kv_dtype in ("auto", "int8", "fp8", "fp8_e5m2", "int4"):
    served = LLM(FOLDER, dtype="bfloat16", kv_dtype=kv_dtype, kv_cache_bytes=2**20, max_num_seqs=2)
    [output] = served.generate([prompt], SamplingParams(max_tokens=24, temperature=0))
    engine = served.engine
    rows.append([kv_dtype, f"{engine.num_blocks * engine.block_size:,}", repr(output.text[:44])])
widgets.table(rows, ["kv_dtype", "tokens in 1 MiB of cache", "text"])

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# KL of the whole model, cache rounded in all layers. FP8 (E4M3) with a scale per token and head, too:


# %% name="measure-formats"
def e4m3(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


CACHES = {
    "INT8, token and head": (lambda k: rounded(k, 8, -1), lambda v: rounded(v, 8, -1)),
    "FP8, token and head": (e4m3, e4m3),
    "INT4, tensor": (lambda k: rounded(k, 4, (0, 1, 2)), lambda v: rounded(v, 4, (0, 1, 2))),
    "INT4, token and head": (lambda k: rounded(k, 4, -1), lambda v: rounded(v, 4, -1)),
    "INT4, split as in KIVI": (lambda k: per_channel(k, 4), lambda v: rounded(v, 4, -1)),
    "INT4 values only": (None, lambda v: rounded(v, 4, -1)),
}
eight, four = (kv_cache.bits_per_weight(bits, c.head_dim) for bits in (8, 4))  # a 16-bit scale for 64 values
rows = []
for (name, pair), bits in zip(CACHES.items(), (eight, eight, 4, four, four, (16 + four) / 2), strict=True):
    found = logprobs_through(text, Through(*pair))
    agree = float((found.argmax(-1) == exact.argmax(-1)).float().mean())
    rows.append([name, f"{bits:.2f}", f"{16 / bits:.2f}", f"{kl_of(found):.5f}", f"{agree:.3f}"])
print(f"KL of FP8 over that of INT8, same bits: {float(rows[1][3]) / float(rows[0][3]):.0f} times")
widgets.table(rows, ["cache", "bits a value", "times as many tokens", "KL, nats", "same first token"])

# %% [markdown] name="measure-formats-reading"
# FP8 takes the bits of INT8 and has many times its KL. That is `a_numbers` again: the 64 values of a head have no
# outliers here, so equal steps are finer than a float's, and KL grows with the square. Both are small beside any 4-bit
# cache. With channels that stand out, FP8 hardly changes and INT8 loses. What engines offer is decided by something else:
# which of the two their attention kernels read. And among 4-bit caches of the same size it is the split that counts.

# %% [markdown] name="measure-distance-text"
# ### By distance
#
# An average over text says little about long contexts: most tokens follow from the last few. So put a fact at a distance,
# and ask for it. A made-up key and a number, then other text, then the key again. **Which suffers more in INT4, a fact 32
# tokens back, or one 320 tokens back?** The table shows the log-probability of the right number's tokens, its mean over
# eight facts, and how often each token of it came first. <!-- printed: measure-distance -->

# %% name="measure-distance"
KEYS = ("brovek", "tulami", "senqor", "habdil", "morvak", "pelsin", "dorvit", "lankem")
filler = llm.encode(inspect.getsource(json.decoder))


def recall(attention, distance):
    """(mean log-probability of the answer's tokens, share of them put first)."""
    logs, firsts = [], []
    for i, key in enumerate(KEYS):
        answer = llm.encode(f" {3117 + 577 * i}")
        front = llm.encode(f"The code for {key} is {3117 + 577 * i}.\n")
        tokens = front + filler[40 * i : 40 * i + distance] + llm.encode(f"\nThe code for {key} is")
        found = logprobs_through(tokens + answer, attention)[len(tokens) - 1 : -1]
        right = torch.tensor(answer)[:, None]
        logs.append(found.gather(1, right).mean())
        firsts.append((found.argmax(-1) == right[:, 0]).float().mean())
    return float(torch.stack(logs).mean()), float(torch.stack(firsts).mean())


# %% name="measure-distance-table"
DISTANCES, rows = (32, 320), []
for name in ("16 bits", "INT8, token and head", "INT4, tensor", "INT4, token and head", "INT4, split as in KIVI"):
    line = [recall(Through(*CACHES.get(name, (None, None))), distance) for distance in DISTANCES]
    rows.append([name, *(f"{log:.2f}, {first:.0%}" for log, first in line)])
widgets.table(rows, ["cache", *(f"{distance} tokens back" for distance in DISTANCES)])

# %% [markdown] name="measure-distance-reading"
# Rounding hardly shows at either distance: the differences between the rows are no larger than eight facts can tell apart,
# and the distance itself costs far more. Read it with the first row in mind: what the model cannot recall in 16 bits, a
# cache cannot spoil. So this small model is no proof that long contexts are safe. A gate for a 4-bit cache is made of
# tasks that the model *does* solve, at the lengths that you serve: facts at several depths, evidence of tool calls in the
# middle of a context.
#
# ## 6. Explore
#
# Keys and values as the cache is given them, tokens by channels. *For which is a scale per channel better than one per
# token? Compare layer 0 with layer 7.*

# %% name="explore-widget"
shown = {}
for layer in (0, 3, 7):
    _, k, v = watching.seen[layer]
    shown |= {f"layer {layer}, keys": k.flatten(1).numpy(), f"layer {layer}, values": v.flatten(1).numpy()}
widgets.outliers(shown)

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"A 4-bit cache is risky since its scales cannot be calibrated."** And: **"A 4-bit cache costs next to nothing."** (E07.4)
# Scales need no calibration: they are made from each token or block as it comes. And the cost is not one number. The table
# of section 5 has INT4 caches of nearly the same bits with different KLs, and planted channels set them far apart:

# %% name="errata-four"
rows = []
for name, group, bits in (
    ("16 bits", None, 16),
    ("INT8", 64, 8),
    ("INT4, token and head", 64, 4),
    ("INT4, channel, 64 tokens", 64, 4),
):
    stored = bits if group is None else kv_cache.bits_per_weight(bits, group)
    rows.append([name, f"{stored:.2f}", f"{16 / stored:.2f}"])
widgets.table(rows, ["cache, scales of 16 bits", "bits a value", "times smaller"])

# %% [markdown] name="errata-users-text"
# **"Halving the bytes doubles the users."** (E07.8) An 8B on an H100, FP8 cache. Users are the smaller of two limits: what
# fits, and what the step time allows. **With 200-token chats and a limit of 10 ms a token: how many times as many users?**

# %% name="errata-users-predict"
widgets.predict("07e-users", "8B, H100, context 200, 10 ms a token: users with an 8-bit cache over 16 bits?", "times")


# %% name="errata-users"
L8, H100 = shape_of("llama-3-8b"), device("H100")


def users(context, limit, kept):
    fit = (
        kv_cache.tokens_that_fit(H100.capacity, kv_cache.weight_bytes(L8), kv_cache.bytes_per_token(L8, kept))
        // context
    )
    fast = [
        n for n in range(1, int(fit) + 1) if latency.decode_seconds(L8, context, H100, n, bytes_per_value=kept) <= limit
    ]
    return int(fit), len(fast)


rows = []
for context, limit in ((200, 0.01), (2000, 0.05), (8000, 0.05)):
    (fit16, now16), (fit8, now8) = (users(context, limit, kept) for kept in (2, 1))
    rows.append([f"{context:,}, {1000 * limit:.0f} ms", f"{fit16:,}", f"{fit8:,}", now16, now8, f"{now8 / now16:.2f}"])
widgets.reveal("07e-users", float(rows[0][-1]))
more = latency.decode_parts(L8, 200, H100, rows[0][3] + 1)
print(
    f"16 bits, 200 tokens, one user more: {1e3 * more.arithmetic:.2f} ms; reading {1e3 * (more.weights + more.cache):.2f} ms"
)
widgets.table(rows, ["context, limit", "fit, 16 bits", "fit, 8 bits", "users, 16 bits", "users, 8 bits", "ratio"])

# %% [markdown] name="errata-users-reading"
# With short chats and a tight limit it is the *arithmetic* of so many users that ends it, and no cache format changes that:
# the line above the table has one user more than the limit allows. With longer contexts it was the memory.
#
# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026; look names up in the version you run.
#
# **vLLM**, **SGLang** and **TensorRT-LLM** have an FP8 cache, mostly E4M3 with one scale for a tensor or a head: calibrated
# ones come with the checkpoint, and without any the scale is 1. (Ours has one for each token and head, made on write: more
# bits, no calibration.) 4-bit caches are offered by some, in INT4 or NVFP4. **llama.cpp** takes types of GGUF for keys and
# for values apart, since keys need more bits; its scales are for 32 values of a token, not per channel.
# Check that the attention backend which you run reads the codes: a cache that is unpacked to memory first saves room and
# no time.

# %% name="production-fit"
held = kv_cache.weight_bytes(L8)
rows = []
for name, bytes_per_value in (("16 bits", 2), ("FP8", 1), ("NVFP4", 4.5 / 8)):
    tokens = kv_cache.tokens_that_fit(H100.capacity, held, kv_cache.bytes_per_token(L8, bytes_per_value))
    gib = kv_cache.cache_bytes(L8, 8192, 32, bytes_per_value) / GiB
    step = latency.decode_seconds(L8, 8192, H100, 32, bytes_per_value=bytes_per_value)
    rows.append([name, f"{int(tokens):,}", f"{gib:.1f} GiB", f"{1000 * step:.1f} ms"])
widgets.table(rows, ["8B on an H100", "tokens that fit", "32 requests of 8,192", "a step of them, at best"])

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Then quantize a cache yourself: [lab 07](../../labs/07_quantization/quantization.ipynb), part 6. At the end the engine decodes
# from it.

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("07_quantization").draw(seed=1, tag="cache"))

# %% [markdown] name="card"
# ## 10. Card
#
# - A cache is rounded on write and read in codes; scales come from the tokens themselves.
# - KL grows with the square of the rounding error: 8 bits are nearly free, 4 bits depend on what shares a scale.
# - Keys have channel outliers: a scale per channel over a block of tokens (KIVI). Values: per token. The last block stays
#   in 16 bits until it is full.
# - Half the bytes: twice the tokens. Users and speed follow where the cache was the limit.
#   <!-- tested: tests/claims/test_chapter_07.py::test_e07_08_half_the_cache_bytes_double_the_tokens_and_hardly_the_speed_of_short_contexts -->
# - The gate: facts at the distances that you serve, with tasks that the model solves in 16 bits.
