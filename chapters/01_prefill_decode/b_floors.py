# %% [markdown] name="title"
# # 01b · Floors: the shortest time a step can take
#
# About 45 minutes. You need `a_phases`. You will count the operations and bytes of a step, turn them into a time that no
# engine can beat, and find out where the rest of a measured time goes. The lab of this chapter is
# [Metrics and sampling](../../labs/01_prefill_decode/metrics_sampling.ipynb).

# %% name="setup"
# Set-up: libraries, the course model, and the devices this notebook computes with.
import json
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, figure, show, tidy
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.assembly.batch import build_batch
from reference_impl.assembly.sampler import sample
from reference_impl.interfaces import Request, Row, StepPlan
from reference_impl.features.cpu import operators
from reference_impl.theory import collectives, kv_cache, latency, model_shapes, roofline
from reference_impl.theory.hardware import device
from reference_impl.theory.units import GB, format_bytes, format_flops, format_seconds

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
folder = course_model("target")
# The prefix cache is off, so that a prompt asked twice is computed twice; chapter 06 turns it on.
llm = LLM(folder, dtype="float32", kv_cache_bytes=32 * 2**20, prefix_cache="off")
model, cache, attention = llm.engine.model, llm.engine.kv_cache, llm.engine.attention
shape = model_shapes.from_config(json.loads((folder / "config.json").read_text()), "course model")
on_gpu = model.device.type == "cuda"
weights_here = kv_cache.read_bytes(shape, 32)  # the course model in float32
h100, llama, small = device("H100"), model_shapes.model("llama-3-8b"), model_shapes.model("llama-2-7b")
print(f"{h100.sku}: {h100.bandwidth / 1e12:.2f} TB/s, {h100.peak() / 1e12:.0f} TFLOP/s dense BF16")
print(f"{llama.name} in BF16: {format_bytes(kv_cache.weight_bytes(llama))} of weights, of which "
      f"{format_bytes(kv_cache.weight_bytes(llama) - kv_cache.read_bytes(llama))} are the table of input embeddings; "
      f"{kv_cache.bytes_per_token(llama):,} bytes of cache per token; {llama.layers} layers")  # fmt: skip

# %% [markdown] name="question"
# ## 1. A question with a number
#
# Llama-3-8B in BF16 on **four** H100 SXM5 with tensor parallelism (TP): every matrix and the cache are split, so that
# each GPU reads a quarter. One user, 8,192 tokens of context, one token per pass. Twice per layer the four have to sum
# up partial results (an *all-reduce*); take 10 us for each, whatever its size.
#
# **How many tokens per second can no such engine exceed?** Work it out from what the cell above prints, with paper.
# There are two traps: not all weights are read, and the four GPUs do not divide everything by four.

# %% name="predict"
widgets.predict("01b-tp4", "Most tokens per second, Llama-3-8B at 8,192 tokens on four H100 with TP?", "tokens/s")

# %% name="answer"
reads = kv_cache.read_bytes(llama) + kv_cache.cache_bytes(llama, 8192)  # all matrices, one cache
sums = collectives.all_reduces_per_token(llama.layers) * 10e-6
print(f"read {format_bytes(reads)}, a quarter of it per GPU in {format_seconds(reads / 4 / h100.bandwidth)}; "
      f"{collectives.all_reduces_per_token(llama.layers)} all-reduces {format_seconds(sums)}")  # fmt: skip
seconds = collectives.tensor_parallel_seconds(reads, h100.bandwidth, 4, llama.layers, 10e-6)
one = reads / h100.bandwidth
print(
    f"{format_seconds(seconds)} per token; on one GPU {format_seconds(one)}, {1 / one:.0f} tokens/s: {one / seconds:.1f} times"
)
widgets.reveal("01b-tp4", 1 / seconds)

# %% [markdown] name="answer-reading"
# Four GPUs do not give four times the rate: the all-reduces are a third of the step already. Weights, cache, messages,
# and what of them has to be counted: this notebook goes through them one by one.

# %% [markdown] name="idea"
# ## 2. The idea
#
# Picture a customs office with two counters. Every shipment has to pass both. At one counter clerks **stamp papers**:
# that is the arithmetic, so many operations per second. At the other, workers **unload crates**: those are the bytes
# that come from memory, so many per second. Both work at the same time on the same shipment. It leaves when the
# *slower* counter has finished.
#
# `floor = max(operations / peak rate, bytes / bandwidth)`
#
# A decode step has few papers and many crates. A long prefill has many papers for the same crates. The floor is the
# time the office needs if nobody ever pauses. It is a lower bound, with three uses:
#
# - No engine can be faster, *if* the count has only operations and bytes that none can do without. So of the weights we
#   count every matrix once and not the table of input embeddings, of which a pass looks up a row per token; of the
#   logits those that choose a token; of the cache what is read and what is added. (What the chip's own cache keeps from
#   one pass to the next is neglected: an H100 has 50 MB for it.) Count more, and you have an estimate, which a good
#   engine beats.
#   <!-- source: NVIDIA H100 data sheet, L2 cache -->
# - The *ratio* of measured time to floor says how good an engine is. A time alone does not.
# - It tells which counter to enlarge. More clerks do not help a shipment that waits for the crates.

# %% name="idea-figure" jupyter={"source_hidden": true}
steps = {
    "decode, 1 user, 2,048 cached": (1, 2047, 1),
    "decode, 64 users, 2,048 cached": (64, 2047, 1),
    "prefill of 256 tokens": (1, 0, 256),
    "prefill of 2,048 tokens": (1, 0, 2048),
}
fig = figure(7.4, 2.6)
ax = fig.subplots()
said = []
for i, (name, (batch, past, new)) in enumerate(steps.items()):
    at = roofline.place(llama, h100, batch, past, new)
    stamps, crates = at.flops / h100.peak() * 1e3, at.num_bytes / h100.bandwidth * 1e3
    ax.barh(i - 0.18, stamps, 0.34, color=ORANGE, hatch="//", edgecolor="white", label="operations" if i == 0 else None)
    ax.barh(i + 0.18, crates, 0.34, color=BLUE, edgecolor="white", label="bytes" if i == 0 else None)
    ax.text(max(stamps, crates) + 0.3, i, f"floor {at.seconds * 1e3:.2f} ms", va="center", fontsize=8)
    said.append(f"{name}: operations {stamps:.2f} ms, bytes {crates:.2f} ms")
ax.set_yticks(range(len(steps)), list(steps))
ax.invert_yaxis()
ax.set_xlim(0, 42)
tidy(ax, "ms on one H100 at its limits (Llama-3-8B, BF16)")
ax.legend(fontsize=8, frameon=False, loc="upper right")
show(
    fig,
    "Two bars per step, time for operations and time for bytes; the longer one is the floor. " + "; ".join(said) + ".",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# The whole calculation fits on one screen, from the numbers of a config. Two kinds of work:
#
# - **matrices**: every token meets every weight once, a multiplication and an addition: `2 · N` FLOP per token. `N`
#   counts the matrices without the input embedding, which is a lookup. The last of them turns a token into logits; of a
#   prompt only the last token needs it.
# - **attention**: every query is compared with every key it may attend to, and as many values are mixed: `4 · heads ·
#   head_dim · layers` FLOP per pair. `heads · head_dim` is often called `d`. A decode step has `context` pairs. A
#   causal prefill of `L` tokens has `L(L+1)/2`, so about `2 · L² · d · layers`.


# %% name="scratch"
def config_numbers(c):
    """(weights of the layers, of the output matrix, FLOP per pair, cache bytes per token in 16 bits)."""
    d, f = c["hidden_size"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    layer = d * q + 2 * d * kv + q * d + 3 * d * f  # Q, K, V, O, gate, up, down
    layers = c["num_hidden_layers"]
    return layers * layer, c["vocab_size"] * d, 4 * q * layers, 2 * layers * kv * 2


def floor(c, new, past, peak, bandwidth):
    """Minimum seconds of one pass over `new` tokens after `past` cached ones, 16-bit weights and cache."""
    body, head, per_pair, per_token = config_numbers(c)
    pairs = new * past + new * (new + 1) / 2
    flops = 2 * body * new + 2 * head + per_pair * pairs  # logits of the last token
    num_bytes = 2 * (body + head) + (past + new) * per_token  # cached keys and values are read, new ones written
    return max(flops / peak, num_bytes / bandwidth)


# %% [markdown] name="scratch-check-text"
# For Llama-3-8B, against the course's own formulas:

# %% name="scratch-check"
config_8b = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
}  # fmt: skip
body, head, per_pair, per_token = config_numbers(config_8b)
assert 2 * (body + head) == kv_cache.read_bytes(llama)
assert per_token == kv_cache.bytes_per_token(llama)
found = []
for new, past in ((1, 2047), (2048, 0), (32768, 0)):
    mine = floor(config_8b, new, past, h100.peak(), h100.bandwidth)
    theirs = roofline.place(llama, h100, 1, past, new).seconds
    assert np.isclose(mine, theirs)
    found.append([new, past, format_seconds(mine)])
widgets.table(found, ["new tokens", "cached tokens", "at least"])

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# Do the formulas count what the engine does? PyTorch has a counter for matrix products, `FlopCounterMode`. It sees
# shapes, not masks: causal attention would be counted as a full square, although a fused kernel skips the half that is
# masked. So we let it count the matrices, and count the unmasked pairs ourselves, in the one function that all
# attention calls. The counters are folded: `counted(batch)` gives the operations of one pass, `a_batch` builds a batch
# with the engine's own code.


# %% name="counter" jupyter={"source_hidden": true}
class Pairs(TorchFunctionMode):
    """Unmasked query-key pairs, summed over heads and layers."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            queries, keys = args[0].shape[:-1], args[1].shape[-2]
            if kwargs.get("is_causal"):
                self.count += queries[:-1].numel() * keys * (keys + 1) // 2
            elif kwargs.get("attn_mask") is not None:
                allowed = kwargs["attn_mask"]
                allowed = allowed if allowed.dtype is torch.bool else allowed == 0
                self.count += int(allowed.expand(*queries, keys).sum())
            else:
                self.count += queries.numel() * keys
        return func(*args, **kwargs)


def packed(x, weight, *rest, out_shape=None, **options):  # the counter does not know the engine's CPU layout
    return 2 * int(np.prod(x)) * out_shape[-1]


known = {torch.ops.mkldnn._linear_pointwise: packed} if operators.available(torch.float32) else {}
products = {torch.ops.aten.mm, torch.ops.aten.addmm, *known}


def counted(batch):
    """(FLOP in the matrices, FLOP in attention) of one forward pass of the engine's model."""
    with torch.inference_mode(), FlopCounterMode(display=False, custom_mapping=known) as flops, Pairs() as pairs:
        model(batch, cache, attention)
    in_matrices = sum(count for op, count in flops.get_flop_counts()["Global"].items() if op in products)
    return in_matrices, 4 * shape.head_dim * pairs.count


def a_batch(rows, spec=llm.engine.kv_spec):
    """A Batch of rows (new tokens, past tokens), built by the engine's own code."""
    requests, plan, first = {}, [], 0
    for i, (new, past) in enumerate(rows):
        count = -(-(new + past) // spec.block_size)
        requests[str(i)] = Request(
            id=str(i), tokens=[5] * (new + past), num_prompt_tokens=1, sampling=SamplingParams(temperature=0), seed=0,
            arrival=0.0, stop_token_ids=frozenset(), max_total_tokens=new + past + 1,
            block_tables=[list(range(first, first + count))],
        )  # fmt: skip
        first += count
        plan.append(Row(str(i), past, new, True))
    return build_batch(StepPlan(1, tuple(plan)), requests, [spec], model.device)


# %% name="counter-check"
cache.data.normal_()  # contents do not matter for counts and times
checked = []
for name, rows in {
    "prefill of 500": [(500, 0)],
    "decode at 500": [(1, 499)],
    "chunk of 100 after 400": [(100, 400)],
    "decode of 3 users": [(1, 99), (1, 499), (1, 899)],
    "a mixed step": [(200, 0), (1, 499), (64, 300)],
}.items():
    in_matrices, in_attention = counted(a_batch(rows))
    every_logit = sum(latency.pass_flops(shape, new, past) for new, past in rows)
    formula = sum(latency.engine_pass_flops(shape, new, past) for new, past in rows)  # logits of each last token only
    assert in_matrices + in_attention == formula
    checked.append([name, *map(format_flops, (in_matrices, in_attention, formula, every_logit - formula))])
widgets.table(checked, ["step", "matrices", "attention", "formula, both", "logits of every token would add"])

# %% [markdown] name="counter-reading"
# The formula and the counter agree to the last operation, for prefill, decode, chunks and mixed steps. One detail is
# worth knowing. The usual `2 · N · L` for a prefill includes logits for every token (`latency.prefill_flops`). An engine
# computes the logits of the last position only, which is `latency.engine_pass_flops`, and the floors here count those
# (`latency.prefill_seconds`, `roofline.place`). This matters in small models with large vocabularies, and hardly in
# large ones:


# %% name="head-share"
def head_row(s):
    share = s.vocab_size * s.hidden_size / s.linear_params
    less = 1 - latency.engine_pass_flops(s, 2048) / latency.prefill_flops(s, 2048)
    return [s.name, f"{share:.1%}", f"{less:.1%}"]


widgets.table(
    [head_row(s) for s in (shape, model_shapes.model("llama-3.2-1b"), llama, model_shapes.model("llama-3-70b"))],
    ["model", "output matrix, of the weights a token meets", "fewer operations in a prefill of 2,048"],
)

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# ### Prefill: three regimes
#
# Prompts of 1 to 2,048 tokens through the course model. (It was trained on texts of up to 1,024 tokens, and its config
# allows 2,048. Beyond 1,024 its text is of little use, but its times are valid.) All lengths are timed in turns, and of
# each the shortest time counts (the cells that do it are folded). Before you look: in the matrices of the layers, 256
# tokens are 256 times the operations of one. How many times the time?

# %% name="predict-regimes"
widgets.predict("01b-regimes", "A prompt of 256 tokens over one of a single token, on this machine?", "times the time")


# %% name="stopwatch" jupyter={"source_hidden": true}
def once(f):
    """Seconds of one run."""
    if on_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    f()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def shortest(functions, rounds):
    """Shortest seconds of each function. They run in turns, so that a busy moment of the machine hits all alike."""
    times = [[once(f) for f in functions] for _ in range(rounds)]
    return np.min(times, axis=0)


# %% name="prefill" jupyter={"source_hidden": true}
lengths = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048])
prompts = [a_batch([(int(n), 0)]) for n in lengths]
side = 8192 if on_gpu else 1024
square = torch.randn(side, side, device=model.device)
buffer = torch.ones(int(weights_here) // 4, device=model.device)
yardsticks = [lambda: square @ square, buffer.sum]  # alternating with the prompts: the next section compares them
with torch.inference_mode():
    short = shortest([*yardsticks, *(lambda b=b: model(b, cache, attention) for b in prompts[:8])], rounds=15)
    long = shortest([*yardsticks, *(lambda b=b: model(b, cache, attention) for b in prompts[8:])], rounds=3)
product_seconds, read_seconds = np.minimum(short[:2], long[:2])
measured = np.concatenate([short[2:], long[2:]])
widgets.table(
    [[int(n), format_seconds(took), format_seconds(took / n)] for n, took in zip(lengths, measured, strict=True)],
    ["prompt tokens", "measured", "per token"],
)

# %% name="prefill-answer"
widgets.reveal("01b-regimes", measured[list(lengths).index(256)] / measured[0])

# %% [markdown] name="prefill-fit-text"
# Three costs are fitted to these times: one per pass, one per token, one per pair (`fit`, folded: least squares, none
# below zero).


# %% name="fit" jupyter={"source_hidden": true}
def fit(columns, values):
    """Least squares of the relative error with no negative cost: the best of all choices of columns."""
    best = None
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        found, *_ = np.linalg.lstsq(columns[:, chosen] / values[:, None], np.ones(len(values)), rcond=None)
        error = np.sum((columns[:, chosen] @ found / values - 1) ** 2)
        if (found >= 0).all() and (best is None or error < best[0]):
            best = error, dict(zip(chosen, found, strict=True))
    return [best[1].get(i, 0.0) for i in range(columns.shape[1])]


# %% name="prefill-fit"
# seconds = per_pass + per_token * L + per_pair * L(L+1)/2
columns = np.stack([np.ones(len(lengths)), lengths, latency.causal_pairs(lengths)], axis=1)
per_pass, per_token_here, per_pair_here = fit(columns, measured)
for name, price in (("pass", per_pass), ("token", per_token_here), ("pair", per_pair_here)):
    print(f"{format_seconds(price)} per {name}" if price else f"per {name}: too little to be seen here")
if per_token_here:
    print(f"the pass costs more than the tokens up to {per_pass / per_token_here:.0f} tokens")
here = 4 * shape.num_heads * shape.head_dim * shape.layers  # FLOP per pair, all layers
body = shape.linear_params - shape.vocab_size * shape.hidden_size  # what every prompt token meets
shares = [latency.attention_over_linear(body, latency.causal_pairs(n), n, here) for n in (128, 1024, 2048)]
print("attention, of the operations of the matrices, at 128, 1,024 and 2,048 tokens: "
      + ", ".join(f"{share:.0%}" for share in shares))  # fmt: skip
print(f"equal at {latency.equal_prompt_length(body, here):,.0f} tokens, more than this model has positions")

# %% name="prefill-figure" jupyter={"source_hidden": true}
fig = figure(7.8, 3.3)
left, right = fig.subplots(1, 2)
fine = np.geomspace(1, 2048, 200)
for part, label, style in (
    (np.full_like(fine, per_pass), "per pass (flat)", {"color": GREEN, "linestyle": ":"}),
    (per_token_here * fine, "per token (linear)", {"color": BLUE, "linestyle": "--"}),
    (per_pair_here * fine * (fine + 1) / 2, "per pair (quadratic)", {"color": PURPLE, "linestyle": "-."}),
):
    left.loglog(fine, part * 1e3, label=label, **style)
fitted = per_pass + per_token_here * fine + per_pair_here * fine * (fine + 1) / 2
left.loglog(fine, fitted * 1e3, color=INK, linewidth=1, label="sum")
left.loglog(lengths, measured * 1e3, "o", color=ORANGE, label="measured")
left.set_ylim(measured.min() * 1e3 / 8, measured.max() * 2e3)
tidy(left, "prompt tokens", "ms", "course model on this machine")
left.legend(fontsize=7, frameon=False)
long = np.geomspace(16, 262144, 200)
total = latency.prefill_seconds(llama, long, h100)
pairs = (latency.prefill_flops(llama, long) - latency.linear_flops(llama.linear_params, long)) / h100.peak()
matrices = latency.engine_pass_flops(llama, long) / h100.peak() - pairs
right.loglog(long, np.full_like(long, kv_cache.read_bytes(llama) / h100.bandwidth * 1e3), color=GREEN, linestyle=":")
right.loglog(long, matrices * 1e3, color=BLUE, linestyle="--")
right.loglog(long, pairs * 1e3, color=PURPLE, linestyle="-.")
right.loglog(long, total * 1e3, color=INK, linewidth=1)
right.set_ylim(1, total.max() * 2e3)
tidy(right, "prompt tokens", "ms", "Llama-3-8B, BF16, H100: floor")
show(
    fig,
    "Prefill time over prompt length, log-log. Left, the course model: measured points and the sum of a flat, a linear "
    "and a quadratic part that was fitted to them. Right, the floor for Llama-3-8B on an H100: flat up to about 300 tokens, then linear, and "
    "quadratic beyond about 60,000 tokens, where attention overtakes the matrices.",
)

# %% [markdown] name="prefill-reading"
# - **Flat:** up to some length the pass costs more than its tokens. For a large model on a GPU that is the time to read
#   the weights; in a model this small the fixed cost of a pass counts as well (section below).
# - **Linear:** the matrices. Where they take most of the time, twice the prompt takes twice the time.
# - **Quadratic:** attention. In this small model its operations count early, because `d · layers` is large relative to
#   the weights.
#
# The fitted costs are those of kernels: the next cell turns them into rates. Attention need not reach the rate of
# matrix products.
#
# ### How good is it? MFU and MBU
#
# **MFU** (model FLOP utilization) is the useful operations divided by what the peak could have done in the time.
# **MBU** is the same for bytes. In place of this machine's peaks we take a large product and a long read, measured in
# turns with the prompts. They are yardsticks, not specifications: a share above 100 % means that the engine's matrix
# layout, or a quieter moment, was faster than the yardstick.

# %% name="utilization"
bandwidth, rate = buffer.nbytes / read_seconds, 2 * side**3 / product_seconds
print(f"this machine: {rate / 1e9:,.0f} GFLOP/s in float32, reading {format_bytes(weights_here)} "
      f"at {bandwidth / 1e9:,.0f} GB/s")  # fmt: skip
for name, flops, price in (("the matrices", 2 * body, per_token_here), ("attention", here, per_pair_here)):
    if price:
        print(f"the fit: {flops / price / 1e9:,.0f} GFLOP/s in {name}")


def shares_of(n, took):
    flops = latency.engine_pass_flops(shape, n)
    moved = weights_here + n * kv_cache.bytes_per_token(shape, 4)
    bound = max(flops / rate, moved / bandwidth)
    shares = f"{flops / took / rate:.0%}", f"{moved / took / bandwidth:.0%}"
    return [n, format_seconds(took), format_seconds(bound), *shares]


widgets.table(
    [shares_of(int(n), took) for n, took in zip(lengths, measured, strict=True)],
    ["prompt tokens", "measured", "floor", "of the rate (MFU)", "of the bandwidth (MBU)"],
)

# %% [markdown] name="waterfall-text"
# ### Decode: from the floor to what you measure
#
# One user, context 512, one step. The floor is the time to read weights and cache at this machine's rate. Then we run
# more and more of the real step and see what each part adds: the matrices alone, the attention of all layers alone, the
# whole model, building the batch, sampling, and at last the whole `engine.step()`. Every bar is a measurement or a
# difference of two. Small differences are noise, and a bar may even point to the left. (The pieces are folded.)

# %% name="predict-waterfall"
widgets.predict("01b-waterfall", "Which percentage of a measured decode step is its floor, here?", "%")

# %% name="waterfall-pieces" jupyter={"source_hidden": true}
context = 512
batch = a_batch([(1, context - 1)])
attention.plan(batch)
c, dtype = model.config, model.dtype
inputs = {n: torch.randn(1, n, device=model.device, dtype=dtype) for n in {lin.in_features for lin in model.linears()}}
q, k = (torch.randn(1, h, c.head_dim, device=model.device, dtype=dtype) for h in (c.num_heads, c.num_kv_heads))
asking = Request(
    id="0", tokens=[5] * context, num_prompt_tokens=1, sampling=SamplingParams(temperature=0), seed=0, arrival=0.0,
    stop_token_ids=frozenset(), max_total_tokens=context + 1,
)  # fmt: skip
logits = torch.randn(1, c.vocab_size, device=model.device, dtype=dtype)


def all_matrices():
    for lin in model.linears():
        lin(inputs[lin.in_features])
    inputs[c.hidden_size] @ model.embedding.T


def all_attention():
    attention.plan(batch)
    for layer in range(c.num_layers):
        attention.forward(q, k, k, layer, cache, batch)


engine = Engine(model, EngineConfig(num_blocks=80, prefix_cache="off"))
engine.add([5] * (context - 20), SamplingParams(max_tokens=500, temperature=0, ignore_eos=True))
engine.step()  # the prefill
pieces = {
    "matrices": all_matrices,
    "attention": all_attention,
    "model": lambda: model(batch, cache, attention),
    "batch": lambda: a_batch([(1, context - 1)]),
    "sampling": lambda: sample(logits, [asking]),
    "step": engine.step,
}

# %% name="waterfall"
with torch.inference_mode():
    took = dict(zip(pieces, shortest(list(pieces.values()), rounds=40), strict=True))
weight_floor = weights_here / bandwidth
cache_floor = kv_cache.cache_bytes(shape, context, bytes_per_value=4) / bandwidth
parts = {
    "weights, read at full rate": weight_floor,
    "cache, read at full rate": cache_floor,
    "matrices beyond their floor": took["matrices"] - weight_floor,
    "attention beyond its floor": took["attention"] - cache_floor,
    "norms, rotary, sums, Python": took["model"] - took["matrices"] - took["attention"],
    "building the batch": took["batch"],
    "sampling": took["sampling"],
    "scheduler, trace, the rest": took["step"] - took["model"] - took["batch"] - took["sampling"],
}
widgets.table(
    [[name, f"{part * 1e3:.2f} ms", f"{part / took['step']:.0%}"]
     for name, part in {**parts, "one step of the engine": took["step"]}.items()],
    ["part", "time", "of the step"],
)  # fmt: skip

# %% name="waterfall-answer"
print(f"one step of the engine: {1 / took['step']:.0f} tokens/s; floor {(weight_floor + cache_floor) * 1e3:.2f} ms")
widgets.reveal("01b-waterfall", 100 * (weight_floor + cache_floor) / took["step"])

# %% name="waterfall-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.0)
ax = fig.subplots()
start = 0.0
for i, seconds in enumerate(parts.values()):
    floor_part = i < 2
    ax.barh(i, seconds * 1e3, left=start * 1e3, color=BLUE if floor_part else ORANGE, hatch="" if floor_part else "//",
            edgecolor="white")  # fmt: skip
    start += seconds
ax.barh(len(parts), took["step"] * 1e3, color=GREY)
ax.axvline((weight_floor + cache_floor) * 1e3, color=INK, linestyle="--", linewidth=1)
ax.text((weight_floor + cache_floor) * 1e3, -0.75, " floor", fontsize=8, color=INK, va="center")
ax.set_yticks(range(len(parts) + 1), [*parts, "measured step"])
ax.invert_yaxis()
tidy(ax, "ms, one decode step of the course model, context 512")
show(
    fig,
    "Waterfall from the floor of a decode step to its measured time. "
    + "; ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in parts.items())
    + f"; measured step {took['step'] * 1e3:.2f} ms.",
)

# %% [markdown] name="waterfall-reading"
# Mind the conditions: a model of 7 million parameters, and on a CPU one core. Why is the floor not all of it? Hundreds
# of small operations per step each have a fixed cost, and small matrices are read below the full rate. In a large model
# the blue bars grow with the weights, and the fixed costs hardly grow; so their *share* falls. On a GPU they are mostly
# kernel launches: Python launches each operation separately, which is called *eager mode*. CUDA graphs record a whole
# step once and launch it as one. They and compiled models remove most of that cost (chapter 05).
#
# The number of PyTorch operations is a count, so it does not depend on how busy the machine is (the counter is folded):


# %% name="launches" jupyter={"source_hidden": true}
class Operations(TorchDispatchMode):
    """Counts calls to PyTorch operations, including views, which move no data."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


with torch.inference_mode(), Operations() as operations:
    model(batch, cache, attention)
beyond = took["model"] - weight_floor - cache_floor
print(f"{operations.count} operations in one forward pass of {c.num_layers} layers, {operations.count / c.num_layers:.0f} per layer; "
      f"the time beyond the floor is {format_seconds(beyond / operations.count)} for each")  # fmt: skip

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# The roofline of chapter 00, with a decode step of a 70B model on four GPUs. Try: one GPU (rejected, and why?), batch 1
# against 64, new tokens 1 against 2,048, 4-bit weights at batch 1. Which of them change the floor?

# %% name="explore"
widgets.roofline("llama-3-70b", device_name="H100", devices=4, batch=1, past=2048, new=1)

# %% [markdown] name="errata-30ms"
# ## 7. What the cheat sheets get wrong
#
# **"A 7B model in BF16 takes about 30 ms per token on an H100."** (E01.1) That is what somebody measured, not what the
# hardware requires. Divide:

# %% name="errata-30ms-cell"
for name, num_bytes in (("7 billion x 2 bytes", 14 * GB), ("what Llama-2-7B reads", kv_cache.read_bytes(small))):
    seconds = num_bytes / h100.bandwidth
    print(
        f"{name}: {format_bytes(num_bytes)} / ({h100.bandwidth / 1e12:.2f} TB/s) = {format_seconds(seconds)}, at most {1 / seconds:.0f} tokens/s"
    )
claimed = 0.030
print(f"30 ms would be {14 * GB / claimed / 1e9:.0f} GB/s, "
      f"{latency.model_bandwidth_utilization(14 * GB, claimed, h100):.0%} of the bandwidth, "
      f"{claimed / (14 * GB / h100.bandwidth):.1f} times the floor")  # fmt: skip
floor_70b = 140 * GB / h100.bandwidth
print(
    f"70 billion x 2 bytes per {h100.bandwidth / 1e12:.2f} TB/s: {format_seconds(floor_70b)} (such a device would need room for them, see below)"
)

# %% [markdown] name="errata-30ms-reading"
# 30 ms is plausible for a loop in eager mode whose time goes into launches. A compiled engine with CUDA graphs should
# come within about 1.3 to 2 times of the floor, as a rule of thumb. So with every decode time, give the share of the
# bandwidth. Here is that line for our engine, with this machine's measured rate instead of a data sheet's:

# %% name="errata-30ms-engine"
floor_here = weight_floor + cache_floor
print(f"{format_seconds(took['step'])} per token, floor {format_seconds(floor_here)}, ratio {took['step'] / floor_here:.1f}, "
      f"{floor_here / took['step']:.0%} of the bandwidth used")  # fmt: skip

# %% [markdown] name="errata-prefill"
# **"Prefill of 1,000 tokens takes 50 ms with a 7B model on an H100."** (E01.2) Compute the floor, then say which MFU you assume.

# %% name="errata-prefill-cell"
flops = latency.linear_flops(7e9, 1024)
at_peak = flops / h100.peak()
print(f"2 x 7e9 x 1,024 = {format_flops(flops)}; at the dense BF16 peak {format_seconds(at_peak)}")
for mfu in (0.6, 0.5, 0.4):
    print(f"at {mfu:.0%} MFU {format_seconds(at_peak / mfu)}")
print(f"50 ms would be {latency.model_flops_utilization(flops, 0.050, h100):.0%} MFU")
print(f"with attention, Llama-2-7B: {format_flops(latency.prefill_flops(small, 1024))}, "
      f"{format_seconds(latency.prefill_seconds(small, 1024, h100))} at peak")  # fmt: skip
n = 512
flops_here = latency.engine_pass_flops(shape, n)
time_here = measured[list(lengths).index(n)]
print(
    f"our engine, {n} tokens: {format_seconds(time_here)}, {flops_here / time_here / rate:.0%} of this machine's measured rate"
)

# %% [markdown] name="errata-linear"
# **"Prefill costs 2·L·N, so it is linear in the prompt", "TTFT grows linearly for *long* prompts", and "prefill is
# quadratic"** (E01.3). Each is right somewhere. Long prompts are exactly where the linear rule fails. Here N is the
# full parameter count, as in the rule. (Llama 3 has a context of 8,192 tokens; Llama 3.1 has the same shapes and a
# context of 131,072.)

# %% name="errata-linear-cell"
for name, thousands in (("llama-3-8b", (1, 8, 32, 128)), ("llama-3-70b", (1, 8, 32, 128))):
    s = model_shapes.model(name)
    pair = 4 * s.num_heads * s.head_dim * s.layers
    shares = [latency.attention_over_linear(s.num_params, (k * 1024) ** 2 / 2, k * 1024, pair) for k in thousands]
    print(f"{name}: attention / matrices at "
          + ", ".join(f"{k}k {share:.1%}" for k, share in zip(thousands, shares, strict=True))
          + f"; equal at {latency.equal_prompt_length(s.num_params, pair):,.0f} tokens, or at "
          + f"{latency.equal_prompt_length(s.linear_params, pair):,.0f} without the input embedding, a look-up")  # fmt: skip
print(f"flat up to about {latency.flat_prefill_tokens(h100):.0f} tokens (H100, BF16, at peak)")
floors = {n: latency.prefill_seconds(llama, n, h100) for n in (128, 4096, 8192, 65536, 131072)}
widgets.table(
    [[n, format_seconds(once), f"{latency.prefill_seconds(llama, 2 * n, h100) / once:.2f} times"]
     for n, once in floors.items()],
    ["prompt tokens, llama-3-8b", "floor", "twice the prompt takes"],
)  # fmt: skip

# %% [markdown] name="errata-linear-reading"
# Three regimes: flat, linear, quadratic. And TTFT is not prefill alone: the queue comes on top (`c_metrics`).
#
# **"A decode token costs 2N FLOP."** (E01.4) Plus `4 · context · d · layers`. We counted it in the engine in section 4. For an
# 8B model:

# %% name="errata-decode-cell"
pair = 4 * llama.num_heads * llama.head_dim * llama.layers
shares = {k: latency.attention_over_linear(llama.num_params, k * 1024, 1, pair) for k in (1, 8, 32, 128)}
print("attention adds to the operations of the matrices, Llama-3-8B: "
      + ", ".join(f"{share:.0%} at a context of {k}k" for k, share in shares.items()))  # fmt: skip
counts = [sum(counted(a_batch([(1, past)]))) for past in (0, 999, 1999)]
print(f"counted in the course model: {', '.join(map(format_flops, counts))} at contexts 1, 1,000 and 2,000")
assert counts[2] - counts[0] == here * 1999

# %% [markdown] name="errata-decode-reading"
# These operations rarely determine the time of a decode step, since each pair also reads a key and a value. But a FLOP
# count that leaves them out is wrong by a factor at long contexts.
#
# **"One H100 serves a 70B model in FP16 at up to 24 tokens/s, because 3350 / 140 = 24."** (E01.5) The division is right and the
# machine does not exist: 140 GB do not fit in 80. Check the deployment first, then compute:

# %% name="errata-fit-cell"
big = model_shapes.model("llama-3-70b")
try:
    latency.require_fit(140 * GB, h100, 1)
except ValueError as error:
    print("refused:", error)
for degree in (2, 4, 8):
    latency.require_fit(140 * GB, h100, degree)
    seconds = collectives.tensor_parallel_seconds(140 * GB, h100.bandwidth, degree, big.layers, 10e-6)
    reads = 140 * GB / degree / h100.bandwidth
    print(f"{degree} x H100: {format_bytes(140 * GB / degree)} each, {format_seconds(reads)} of reading + "
          f"{collectives.all_reduces_per_token(big.layers)} all-reduces of 10 us = {format_seconds(seconds)}, "
          f"{1 / seconds:.0f} tokens/s")  # fmt: skip

# %% [markdown] name="errata-single"
# **"In practice 10 to 25 tokens/s below a ceiling of 24; batching brings one stream to the upper end; the weights not
# staying in on-chip memory is one reason for the shortfall."** (E01.6) Three slips in one paragraph. A ceiling is not
# exceeded. A batch raises what all users get *together*; each single stream gets slower or stays. And the ceiling
# already assumes that weights are read in every step, so that cannot be the reason for being below it.
#
# What does lower the rate below the ceiling? Reading the cache; a bandwidth that is reached only in part (80 to 90 % is
# a rule of thumb for long reads); the fixed cost of a pass; communication between GPUs. You saw a waterfall from our
# engine. Here is one for a deployment that fits, as a calculation with its assumptions in the labels:

# %% name="errata-single-cell"
degree, context = 4, 8192
weights = kv_cache.read_bytes(big) / degree
own = kv_cache.cache_bytes(big, context) / degree  # 8 KV heads: each GPU keeps two of them
mbu, all_reduce, sums = 0.85, 10e-6, collectives.all_reduces_per_token(big.layers)
latency.require_fit(kv_cache.weight_bytes(big) + kv_cache.cache_bytes(big, context), h100, degree)
bill = {
    "weights at the peak bandwidth": weights / h100.bandwidth,
    f"cache of {context:,} tokens": own / h100.bandwidth,
    f"bandwidth reached to {mbu:.0%}": (weights + own) / h100.bandwidth * (1 / mbu - 1),
    f"{sums} all-reduces of {format_seconds(all_reduce)}": sums * all_reduce,
}
totals = np.cumsum(list(bill.values()))
widgets.table(
    [[name, f"+{seconds * 1e3:.2f} ms", f"{total * 1e3:.2f} ms", f"{1 / total:.0f}"]
     for (name, seconds), total in zip(bill.items(), totals, strict=True)],
    ["one stream of the 70B on four H100", "adds", "sum", "tokens/s"],
)  # fmt: skip

# %% [markdown] name="errata-single-batch-text"
# And with more streams at the same context, as far as they fit:


# %% name="errata-single-batch"
def streams_row(batch):
    caches = kv_cache.cache_bytes(big, context, batch)
    latency.require_fit((kv_cache.weight_bytes(big) + caches) / 0.9, h100, degree)  # a tenth stays for other things
    read = kv_cache.read_bytes(big) + caches
    seconds = float(collectives.tensor_parallel_seconds(read, mbu * h100.bandwidth, degree, big.layers, all_reduce))
    return [batch, f"{1 / seconds:.0f}", f"{batch / seconds:,.0f}"]


widgets.table([streams_row(batch) for batch in (1, 16, 32)], ["streams", "tokens/s for each", "tokens/s together"])

# %% [markdown] name="errata-gpus"
# **"More GPUs do not make one stream faster"**, and elsewhere **"TP=2 halves the latency"** (E01.7). Tensor parallelism
# (TP) splits every matrix, so each GPU *reads* only its share: it multiplies bandwidth, which is what limits a single
# stream. But after attention and after the MLP of each layer the GPUs have to sum their partial results. That is an
# **all-reduce**. For one token its time hardly depends on the few kilobytes it moves. Assume 10 us for each, as in the
# question at the top:

# %% name="predict-tp"
widgets.predict("01b-tp", "How many times as fast is a 70B stream on 8 H100 as one GPU's bandwidth would be?", "times")

# %% name="errata-gpus-cell"
for degree in (1, 2, 4, 8):
    seconds = collectives.tensor_parallel_seconds(140 * GB, h100.bandwidth, degree, big.layers, 10e-6)
    note = "  (does not fit on one; for comparison)" if degree == 1 else ""
    print(f"70B, TP={degree}: {format_seconds(seconds)}, {floor_70b / seconds:.2f} times as fast{note}")
widgets.reveal("01b-tp", floor_70b / seconds)

# %% [markdown] name="errata-gpus-ring-text"
# Now with a *ring*, whose number of steps grows with the number of GPUs, and three models:

# %% name="errata-gpus-ring"
degrees = [1, 2, 4, 8, 16, 32]
names = ("llama-3.2-1b", "llama-3-8b", "llama-3-70b")


def fastest_row(name, alpha):
    s = model_shapes.model(name)
    message, reads = collectives.all_reduce_message(1, s.hidden_size), kv_cache.read_bytes(s)

    def ring(n):
        return float(collectives.ring_all_reduce(message, n, alpha, h100.link_per_direction)) if n > 1 else 0.0

    best = collectives.best_tensor_parallel_degree(reads, h100.bandwidth, s.layers, ring, degrees)
    alone, parallel = (
        collectives.tensor_parallel_seconds(reads, h100.bandwidth, n, s.layers, ring(n)) for n in (1, best)
    )
    return [name, format_seconds(alpha), f"TP={best}", f"{alone / parallel:.1f} times"]


widgets.table(
    [fastest_row(name, alpha) for alpha in (1e-6, 3e-6) for name in names],
    ["model", "a step of the ring", f"fastest of {', '.join(map(str, degrees))}", "as fast as one GPU's bandwidth"],
)

# %% name="errata-gpus-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.9)
for ax, alpha in zip(fig.subplots(1, 2, sharey=True), (1e-6, 3e-6), strict=True):
    for name, colour, mark in zip(names, (GREEN, ORANGE, BLUE), ("o", "s", "^"), strict=True):
        s = model_shapes.model(name)
        message = collectives.all_reduce_message(1, s.hidden_size)
        seconds = [
            collectives.tensor_parallel_seconds(
                kv_cache.read_bytes(s), h100.bandwidth, n, s.layers,
                float(collectives.ring_all_reduce(message, n, alpha, h100.link_per_direction)) if n > 1 else 0.0,
            )
            for n in degrees
        ]  # fmt: skip
        ax.plot(degrees, np.array(seconds) * 1e3, marker=mark, color=colour, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(degrees, [str(n) for n in degrees])
    tidy(
        ax,
        "GPUs (TP degree)",
        "ms per token, one stream" if alpha == 1e-6 else "",
        f"{format_seconds(alpha)} per step of the ring",
    )
    ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Floor of a decode step over the tensor-parallel degree for models of 1, 8 and 70 billion parameters, with 1 and 3 "
    "microseconds per step of a ring all-reduce. Each curve falls, reaches a minimum and rises; the minimum comes "
    "early for the 1B model and late for the 70B, and earlier with the slower all-reduce.",
)

# %% [markdown] name="errata-gpus-reading"
# So tensor parallelism speeds up one stream, though less than proportionally, until communication takes as long as
# reading. A small model reaches that point soon. Conditions: batch 1, short context, a ring over one NVLink domain with
# nothing overlapped. (At long contexts another limit comes in: the cache is split by KV heads. These models have 8, so
# beyond 8 GPUs a head is kept and read more than once, and the cache's part of the step shrinks no further.) An H100 node has eight GPUs, so degrees of 16 and 32 are hypothetical here. Real libraries use
# other algorithms for messages this small (chapter 12).
#
# The other two kinds of parallelism do not help one stream. **Pipeline** stages work one after another: the token still
# waits for every weight to be read once. **Data** parallelism copies the model for *other* users.

# %% name="errata-gpus-others"
seconds = kv_cache.read_bytes(llama) / h100.bandwidth
stage = kv_cache.read_bytes(llama) / 4 / h100.bandwidth
print(f"8B on one GPU {format_seconds(seconds)}; four pipeline stages, one after another: 4 x {format_seconds(stage)} = "
      f"{format_seconds(4 * stage)}, plus three transfers; four replicas: {format_seconds(seconds)} each")  # fmt: skip

# %% [markdown] name="practice-text"
# ## Practice
#
# Three questions, each about a model, a machine and a load that a seed draws: how long is the prefill at a stated MFU,
# what is the floor of a decode step, and how close to it is a rate that somebody measured? Each answer is graded, and a
# mistake that is recognized is named. Change the seed for other numbers.

# %% name="practice"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("01_prefill_decode").draw(seed=3, tag="deployment"))

# %% [markdown] name="worked"
# ### Worked problem 4: from the floor to a rate
#
# The course's deployment (chapter 00): Llama-3-70B in 16 bits on four H100 with tensor parallelism, 139.0 GB of weights
# to read, 80 layers, 327,680 bytes of cache per token. One stream at 8,192 tokens.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_4_from_the_floor_of_a_stream_to_its_rate -->
#
# *What is the floor of a step without communication? What remains of its rate with 160 all-reduces of 10 us, and if
# reads reach 80 % of the bandwidth as well? And what would two more things do: 4-bit weights, or 32 streams?*
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_4_from_the_floor_of_a_stream_to_its_rate -->
#
# <details><summary>Answer</summary>
#
# 139.0 + 2.7 = 141.7 GB at 13.4 TB/s: **10.6 ms**, 95 tokens/s. With 1.6 ms of all-reduces 12.2 ms, 82 tokens/s. At 80 %
# of the bandwidth 13.2 + 1.6 = **14.8 ms**, **67 tokens/s**.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_4_from_the_floor_of_a_stream_to_its_rate -->
#
# 4-bit weights, a 16-bit scale for every 128 and the output matrix left in 16 bits: 35.3 + 2.1 = 37.4 GB. With the cache
# 40.1 GB, at 80 %: 3.7 + 1.6 = 5.3 ms, 187 tokens/s. That is 2.8 times, not 4: scales, output matrix, cache and
# all-reduces do not shrink.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_4_from_the_floor_of_a_stream_to_its_rate -->
#
# 32 streams: 139.0 + 85.9 = 224.9 GB, 21.0 + 1.6 = 22.6 ms. Each stream gets 44 tokens/s, all together 1,417, which is
# 21 times the tokens of one stream for 1.5 times its step. (The messages are 32 times as large. They are still small,
# and 10 us is an assumption either way.)
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_4_from_the_floor_of_a_stream_to_its_rate -->
#
# </details>

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Measure on the machine you have; the floors above come from data sheets.
#
# **vLLM, SGLang and TensorRT-LLM** capture decode steps as CUDA graphs by default on NVIDIA GPUs, for a list of batch
# sizes. That is their answer to the fixed cost of a pass. vLLM's `--enforce-eager` turns it off, which is a simple way
# to see how much it saves.
#
# **Benchmarks of one stream** should name SKU, precision, context, degree of tensor parallelism and batch 1. Then
# anybody can compute the share of bandwidth. `vllm bench latency` measures a fixed batch without a server.
#
# **Small all-reduces** are why engines implement their own: vLLM and SGLang have custom one-shot kernels, TensorRT-LLM
# has fused ones, since a general ring takes too many steps for a few kilobytes.
#
# **CPU back ends** have their own overheads. vLLM's documentation for CPUs, for example, recommends preloading another
# memory allocator (TCMalloc).

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Change the seed for other numbers. `c_metrics` and `d_sampling` come next, then the lab:
# [Metrics and sampling](../../labs/01_prefill_decode/metrics_sampling.ipynb).

# %% name="quiz"
widgets.quiz(load_quiz("01_prefill_decode").draw(seed=1, tag="floors"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Floor of a step: `max(FLOP / peak, bytes / bandwidth)`, on a deployment that fits. Check the fit first.
# - FLOP: `2N` per token and `4 · d · layers` per query-key pair (`d` = heads · head_dim). Prefill of L: `2NL + 2L²·d·layers`.
#   Decode: `2N + 4 · context · d · layers`.
# - Prefill is flat (below the ridge), linear, then quadratic. Attention = matrices at `L = N / (d · layers)`: 61k tokens
#   for 8B. `2NL` counts logits for every token; an engine computes one row of them, and a floor counts one.
#   <!-- printed: errata-linear-cell -->
# - Prefill time = FLOP / (MFU · peak). No time without an MFU. Dense peak.
# - Decode floor = (weights + caches) / bandwidth; of the weights all matrices, not the input embeddings. 7 billion
#   weights in BF16 on an H100: 4.2 ms. Give the ratio to it with every decode time.
#   <!-- printed: errata-30ms-cell -->
# - Most tokens/s of one stream = bandwidth / bytes. What lowers it: cache reads, achieved bandwidth, fixed cost of a
#   pass, communication. A batch raises the sum, never one stream.
# - TP speeds up one stream; on a ring, whose steps grow with TP, until `2 · layers` all-reduces take as long as
#   `bytes / (TP · bandwidth)`. PP and DP do not.
