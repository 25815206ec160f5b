# %% [markdown] name="title"
# # 07b · What fewer bits buy
#
# About 35 minutes. You need `a_numbers`, chapter 00 (the roofline) and chapter 02 (the KV cache). Fewer bits can save
# time, memory, or neither: this notebook says which, when, and how much.

# %% name="setup"
import inspect
import statistics

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, ORANGE, RED, figure, show, tidy
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.kernels.reference import gemm_w4a16, pack_int4
from reference_impl.models.quantization.rounding import quantize_int4, quantize_int8
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import DEVICES, device
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.units import format_seconds

torch.set_num_threads(1)
torch.manual_seed(0)
L8, H100 = shape_of("llama-3-8b"), device("H100")
INT4 = kv_cache.bits_per_weight(4, 128)
PLAIN = (16, "bf16", 2)  # bits of a weight, arithmetic, bytes of a cached value
KINDS = {
    "weights in 4 bits": (INT4, "bf16", 2),
    "weights in 8 bits": (8, "bf16", 2),
    "weights and arithmetic in FP8": (8, "fp8", 2),  # attention's arithmetic, too
    "cache in 8 bits": (16, "bf16", 1),
}


def step(kind, batch, context):
    """The parts of a decode step of the 8B, at the limits of an H100; the output projection in 16 bits."""
    bits, precision, kept = kind
    read = kv_cache.read_bytes(L8, bits, embedding_bits=16)
    return latency.decode_parts(L8, context, H100, batch, precision, read, kept)


def gain(kind, batch, context):
    """Times as fast as in 16 bits."""
    return step(PLAIN, batch, context).bound / step(kind, batch, context).bound


# %% [markdown] name="question"
# ## 1. A question with a number
#
# An 8B model decodes one request on an H100, at a context of 2,048. Its weights take 16 GB in BF16. Now the layers'
# weights are stored in INT4, in groups of 128 with a scale of 16 bits; embedding and output projection stay in 16 bits,
# as they do in most checkpoints. **At the limits of the hardware: how many times as fast is a step?**

# %% name="predict"
widgets.predict("07b-gain", "INT4 weights, 8B, H100, batch 1, context 2,048: times as fast?", "times")

# %% name="answer"
before, after = (step(kind, 1, 2048) for kind in (PLAIN, KINDS["weights in 4 bits"]))
for name, one in (("16 bits", before), ("INT4", after)):
    print(
        f"{name}: weights {format_seconds(one.weights)}, cache {format_seconds(one.cache)}, bound {format_seconds(one.bound)}"
    )
widgets.reveal("07b-gain", before.bound / after.bound)

# %% [markdown] name="idea"
# ## 2. The idea
#
# A lorry brings bricks to a building site. Smaller bricks: the lorry carries more of them per trip, and the yard holds
# more. Whether the house is finished sooner depends on who was waiting: if the masons stood idle between trips, yes. If
# the bricks were piling up in front of them, smaller bricks change nothing, and if every brick has to be unpacked first,
# they are slower.
#
# - **Bytes per step**: a decode step reads all weights, and each request's cache. Fewer bits, fewer bytes.
# - **Fit**: what is smaller leaves room for the cache, or fits at all.
# - **Arithmetic**: tensor cores multiply FP8 and INT8 faster than BF16, *if both sides are in 8 bits*: an H100 does at
#   twice the rate. (Not every GPU has both, and not every GPU that has both is fast at both. A GeForce multiplies INT8, and a B200 FP4, at four times the rate: section
#   8 has the table.)
#
# What is quantized decides which of the three you get. The names count bits: W4A16 has weights in 4 bits and activations
# in 16. **Weights alone** (W4A16, W8A16): bytes and fit; the product is computed in 16 bits, after unpacking. **Weights
# and activations** (W8A8, in INT8 or FP8; W4A4, in NVFP4 on Blackwell): all three. **The cache**: bytes and fit of long
# contexts and large batches.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.0)
axes = fig.subplots(1, 2, sharey=True)
batches = [2**n for n in range(11)]
for ax, context in zip(axes, (100, 8000), strict=True):
    for (name, kind), colour, style in zip(
        KINDS.items(), (BLUE, GREEN, ORANGE, RED), ("-", "--", "-.", ":"), strict=True
    ):
        ax.plot(batches, [gain(kind, b, context) for b in batches], style, color=colour, label=name)
    ax.set_xscale("log", base=2)
    tidy(ax, "requests in the batch", "times as fast" if context == 100 else "", f"context {context:,}")
axes[1].legend(fontsize=7.5, frameon=False, loc="upper right")
show(
    fig,
    "Gain of four kinds of quantization over the batch, 8B on an H100, by formula. At context 100 weights in 4 bits gain "
    "three times at batch 1 and nothing at 512, where the step is bound by arithmetic; FP8 comes to twice. At context "
    "8,000 the cache decides: weights gain less and less, a cache in 8 bits comes to twice.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# Weights alone. A product with 4-bit weights: the codes are unpacked and scaled on the way, and multiplied in the
# activations' own precision. (A kernel does this tile by tile, so that the 16-bit weight never exists in memory.)


# %% name="scratch-w4a16"
def product_w4a16(x, codes, scales, group_size):
    """x [rows, in] times the weight that codes [out, in] and scales [in / group_size, out] stand for."""
    y = torch.zeros(len(x), len(codes))
    for g in range(scales.shape[0]):
        columns = slice(g * group_size, (g + 1) * group_size)
        partial = x[:, columns] @ (codes[:, columns].float() - 8).T  # small integers: exact in 16 bits, too
        y += partial * scales[g]  # the scale comes once per group, not once per weight
    return y


weight, x = torch.randn(96, 256), torch.randn(5, 256)
codes, scales = quantize_int4(weight, 128, torch.float32)
mine = product_w4a16(x, codes, scales, 128)
engine = gemm_w4a16(x, pack_int4(codes, 128), scales, group_size=128)
print(f"ours and the engine's differ by {float((mine - engine).abs().max()):.1e}")
assert torch.allclose(mine, engine, atol=1e-4)

# %% [markdown] name="scratch-w8a8-text"
# Weights and activations. Both are integers, so the product of the codes is exact in 32-bit integers, and the two scales
# are applied once to the result. That is what integer tensor cores do:


# %% name="scratch-w8a8"
def product_w8a8(x, codes, scales):
    """codes [out, in] int8, scales [1, out]; x is rounded here, with a scale for each row (dynamic)."""
    row_scales = x.abs().amax(1, keepdim=True) / 127
    rounded = (x / row_scales).round().to(torch.int8)
    exact = rounded.int() @ codes.int().T  # 32-bit sums: no rounding at all
    return exact * row_scales * scales


codes8, scales8 = quantize_int8(weight, torch.float32)
both = product_w8a8(x, codes8, scales8)
alone = x @ (codes8.float() * scales8.T).T
right = x @ weight.T
for name, y in (("weights in INT8", alone), ("weights and activations", both), ("weights in INT4", mine)):
    print(f"{name}: error {float((y - right).norm() / right.norm()):.2%}")

# %% [markdown] name="scratch-reading"
# Rounding the activations as well costs little here, since these are normal numbers. Real activations have outliers, and
# that is why 8-bit *activations* need methods, and 8-bit weights hardly do.
#
# ## 4. The same thing inside the engine
#
# The engine has one `LinearMethod` for each way to store a weight. Its 4-bit one, without Triton:

# %% name="engine-source"
print(inspect.getsource(gemm_w4a16))

# %% [markdown] name="engine-text-2"
# The same prompt, greedy, with each kind of weights: the bytes that the linear layers hold, and where the text changes:

# %% name="engine-texts"
prompt = "def read_lines(path):\n"
rows, texts = [], {}
for quantization in ("none", "int8", "fp8", "int4"):
    llm = LLM(course_model("target"), dtype="float32", quantization=quantization, kv_cache_bytes=2**20)
    [output] = llm.generate([prompt], SamplingParams(max_tokens=24, temperature=0))
    texts[quantization] = output.token_ids
    same = next((i for i, (a, b) in enumerate(zip(texts["none"], output.token_ids, strict=False)) if a != b), 24)
    held = sum(linear.weight_bytes() for linear in llm.engine.model.linears())
    rows.append([quantization, f"{held:,}", same, repr(output.text[:40])])
widgets.table(rows, ["quantization", "bytes of the linear layers", "tokens as without", "text"])

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# The gain of INT4 weights at the limits of an H100 is some 3.2 at batch 1 and a context of 500. **At which batch is it
# only half of that?** <!-- printed: measure-batch -->

# %% name="measure-predict"
widgets.predict("07b-half", "INT4 weights, 8B, H100, context 500: at which batch is the gain halved?", "requests")

# %% name="measure-batch"
batches = range(1, 513)
gains = np.array([gain(KINDS["weights in 4 bits"], b, 500) for b in batches])
half = next(b for b, g in zip(batches, gains, strict=True) if g < gains[0] / 2)
widgets.reveal("07b-half", half)
sizes = (1, 16, 64, 256, 512)
rows = [
    [name, f"{context:,}", *(f"{gain(kind, b, context):.2f}" for b in sizes)]
    for context in (100, 500, 8000)
    for name, kind in KINDS.items()
]
print(f"context 500: {gains[0]:.1f} at batch 1")
widgets.table(rows, ["8B on an H100", "context", *(f"batch {b}" for b in sizes)])

# %% [markdown] name="measure-batch-reading"
# Two things take the gain away. Each request brings its own **cache** to read, which is as large as before: at contexts of
# some hundred tokens and more it is this, and a cache in fewer bits is the answer. Only at very short contexts does the
# **arithmetic** come first, which is done in 16 bits as before; there FP8, which halves it, gains where INT4 has nothing
# left. (At the limits of the hardware. A real kernel reaches less of the peak, so arithmetic counts sooner.) In prefill
# arithmetic counts at once:


# %% name="measure-prefill"
def first_token(tokens, bits, precision="bf16"):
    read = kv_cache.read_bytes(L8, bits, embedding_bits=16)
    return float(latency.prefill_seconds(L8, tokens, H100, precision, weights=read))


rows = []
for name, kind in {"16 bits": PLAIN, **KINDS}.items():
    tpots = [step(kind, batch, 4000).bound for batch in (1, 32)]
    rows.append([name, *map(format_seconds, (first_token(4000, *kind[:2]), *tpots))])
attention = latency.flops_per_pair(L8)[0] * latency.causal_pairs(4000)
others = latency.engine_pass_flops(L8, 4000) - attention
split = others / H100.peak("fp8") + attention / H100.peak("bf16")
no_gain = next(n for n in range(1, 4000) if first_token(n, INT4) == first_token(n, 16))
print(f"FP8, but attention in BF16: TTFT {format_seconds(split)}")
print(f"weights in 4 bits: no gain in TTFT from {no_gain} tokens of prompt on")
widgets.table(rows, ["8B on an H100", "TTFT, prompt of 4,000 alone", "TPOT at 4,000, batch 1", "batch 32"])

# %% [markdown] name="measure-prefill-reading"
# Weights alone, in 4 bits or in 8, do nothing for the time to the first token of a long prompt: from where on, the cell
# prints. (Their unpacking costs a little, which a bound does not show.) FP8 halves it if attention is computed in FP8 as
# well; many engines compute it in BF16. TPOT is the other way round: at batch 1 it is nearly all weights, and in a batch
# of 32 an 8-bit cache gains more than 8-bit weights. And here, on this machine? torch has products for 4- and 8-bit weights
# on CPUs. The course model in bfloat16, one request and sixteen:


# %% name="measure-here"
def step_seconds(quantization, batch):
    """The median time of a decode step."""
    llm = LLM(course_model("target"), dtype="bfloat16", quantization=quantization, kv_cache_bytes=2**24)
    prompts = [list(range(5 + i, 69 + i)) for i in range(batch)]
    llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
    steps = [s for s in llm.engine.trace.steps() if len(s.rows) == batch and all(r.num_tokens == 1 for r in s.rows)]
    return statistics.median(s.finished_at - s.started_at for s in steps)


took = {(kind, batch): step_seconds(kind, batch) for batch in (1, 16) for kind in ("none", "int8", "int4")}
rows = [
    [kind, *(f"{format_seconds(took[kind, b])} ({took['none', b] / took[kind, b]:.2f}x)" for b in (1, 16))]
    for kind in ("none", "int8", "int4")
]
widgets.table(rows, ["course model, bfloat16", "a step of 1 request", "of 16 requests"])

# %% [markdown] name="measure-here-reading"
# These are times, and yours will differ, in both directions. The course model is so small that much of a step is not
# matrix products, and unpacking costs a CPU arithmetic, of which it has little: for one request there may be less to gain
# than in the formula, or a loss. In a batch it depends on whether the CPU multiplies bfloat16 itself: one that has to widen every
# 16-bit weight first gains most from having fewer bits to widen.
#
# ## 6. Explore
#
# Bounds for real GPUs. *With the 8B on an H100: find a batch and a context where an 8-bit cache gains more than 4-bit
# weights. Then take the 70B on a B200, where 16-bit weights fit only just, and see how many tokens of cache fit.*

# %% name="explore-widget"
widgets.fewer_bits()

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"INT4 weights are four times as fast."** (E07.1) The weights are 16 / 4.125 times smaller, because of the scales; and
# a step reads more than them. What is left, for one request:

# %% name="errata-four"
rows = [["the codes alone", 16 / 4.0], ["with a scale per 128", 16 / INT4]]
rows += [["with a zero point of 4 bits, too", 16 / kv_cache.bits_per_weight(4, 128, zero_point_bits=4)]]
mixed = kv_cache.read_bytes(L8, 16) / kv_cache.read_bytes(L8, INT4, embedding_bits=16)
rows += [["8B, output projection in 16 bits", mixed]]
rows += [[f"and a context of {c:,}", gain(KINDS["weights in 4 bits"], 1, c)] for c in (2048, 32768)]
assert all(rows[i][1] > rows[i + 1][1] for i in range(len(rows) - 1))
widgets.table([[name, f"{value:.2f}"] for name, value in rows], ["counted", "times fewer bytes"])

# %% [markdown] name="errata-users-text"
# **"An 8-bit cache doubles the number of users at once."** (E07.8) It doubles the tokens of cache that fit, exactly with
# one scale for a tensor. Users double if it was the cache that limited them; speed follows only as far as a step reads the cache. **One request at a
# context of 2,048: how many percent faster is a step with an 8-bit cache?**

# %% name="errata-users-predict"
widgets.predict("07b-cache", "8-bit cache, 8B on an H100, batch 1, context 2,048: how much faster?", "%")

# %% name="errata-users"
held = kv_cache.weight_bytes(L8)
tokens = [int(kv_cache.tokens_that_fit(H100.capacity, held, kv_cache.bytes_per_token(L8, kept))) for kept in (2, 1)]
print(f"tokens that fit: {tokens[0]:,} and {tokens[1]:,}")
assert abs(tokens[1] - 2 * tokens[0]) <= 1
rows = [
    [f"{c:,}", *(f"{100 * (gain(KINDS['cache in 8 bits'], b, c) - 1):.1f} %" for b in (1, 32))] for c in (2048, 32768)
]
widgets.reveal("07b-cache", 100 * (gain(KINDS["cache in 8 bits"], 1, 2048) - 1))
widgets.table(rows, ["context", "faster, batch 1", "faster, batch 32"])

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026.
#
# Which GPU multiplies which format natively; a format that is not in the table is emulated: stored in few bits, unpacked,
# and multiplied in the next one. Fewer bytes then, and the arithmetic of the format that it is unpacked to.

# %% name="production-formats"
names = ("tf32", "bf16", "fp16", "int8", "fp8", "fp4")
rows = []
for machine in DEVICES.values():
    peaks = [f"{machine.dense_flops[n] / 1e12:,.0f}" if n in machine.dense_flops else "-" for n in names]
    rows.append([machine.name, *peaks, "yes" if machine.sparse_flops else "no"])
widgets.table(rows, ["dense peak, 10^12 operations/s", *names, "2:4 sparsity"])

# %% [markdown] name="production-reading"
# **Marlin** (IST Austria, in vLLM) is the best known W4A16 kernel: near the ideal up to a batch of 16 to 32 on an
# A10, where kernels before it had lost their gain at 1 or 2.
# <!-- source: Marlin's README and paper (Frantar et al. 2024) -->
# **vLLM**, **SGLang** and **TensorRT-LLM** take FP8 checkpoints, and vLLM and SGLang can also quantize to FP8 while they
# load; all three have an FP8 cache. For a first choice on Hopper: FP8 for a server with large batches, INT4 weights for one user or where the
# model would not fit otherwise, an FP8 cache for long contexts, each judged on your own task.
#
# What the table leaves out: the tensor cores of Turing and Ampere multiply INT4, too, Hopper's no longer; Blackwell's
# multiply FP6, at the rate of FP8. Few engines use either: 4-bit *integer* activations need rotation or the like
# (`c_methods`), and FP6 saves little over FP8. Emulation costs instructions: each weight is unpacked once for each tile of rows that it meets. In a
# small batch they run while the next weights are on their way; in prefill they come on top.
# <!-- source: NVIDIA's white papers on the Turing, Ampere, Hopper and Blackwell architectures -->

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("07_quantization").draw(seed=1, tag="buys"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Three reasons: bytes per step, fit, arithmetic. Weights alone: the first two. Weights and activations: all three.
#   Cache: the first two, at long contexts and large batches; arithmetic, too, where attention itself is computed in FP8
#   (vLLM with FlashAttention-3 on an FP8 cache). <!-- source: vLLM's documentation, Quantized KV Cache -->
# - Gain of a step = bytes before / bytes after, *all* bytes: scales, 16-bit output projection, cache. INT4 on an 8B at
#   batch 1, context 2,048: 3.1, not 4.
#   <!-- tested: tests/claims/test_chapter_07.py::test_e07_01_four_bit_weights_with_scales_read_3_88_times_fewer_bytes_and_less_in_practice -->
# - It fades with the batch: each request reads its own cache, and at very short contexts the arithmetic, still in 16
#   bits, becomes the bound. In a long prefill weights alone gain nothing.
# - FP8 × FP8 halves the arithmetic, too, on GPUs that have it. Elsewhere it is emulated: memory, no speed in prefill.
# - Half the bits of a cache: twice the tokens. Users and speed follow only where the cache was the limit.
