# %% [markdown] name="title"
# # 01a · Prefill and decode: two kinds of step
#
# A model reads your prompt and writes its answer with the same weights and the same code, and the two take very
# different times. In this notebook you see both in the engine, pass by pass, measure them here, and find the conditions
# under which the usual rules about them hold.
#
# About 40 minutes. You need chapter 00 (the roofline). Three more notebooks follow: `b_floors` (operations, bytes and the
# shortest possible times), `c_metrics` (TTFT, TPOT and their relatives) and `d_sampling` (from logits to tokens). The lab of
# this chapter is [Metrics and sampling](../../labs/01_prefill_decode/metrics_sampling.ipynb).

# %% name="setup"
# Set-up: libraries, the course model, and the devices this notebook computes with.
import json
import random
import time

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, figure, show, tidy
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.assembly.batch import build_batch
from reference_impl.interfaces import KVSpec, Request, Row, StepPlan
from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.core.attention import TorchAttention
from reference_impl.features.cpu.default import default_method
from reference_impl.theory import kv_cache, latency, model_shapes, roofline
from reference_impl.theory.hardware import device
from reference_impl.theory.links import link, transfer_seconds
from reference_impl.theory.units import format_bytes, format_flops, format_seconds

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
folder = course_model("target")
# The prefix cache is off, so that a prompt asked twice is computed twice; chapter 06 turns it on.
llm = LLM(folder, dtype="float32", kv_cache_bytes=2**28 if torch.cuda.is_available() else 2**25, prefix_cache="off")
model = llm.engine.model
shape = model_shapes.from_config(json.loads((folder / "config.json").read_text()), "course model")
on_gpu = model.device.type == "cuda"
weights_here = kv_cache.read_bytes(shape, 32)  # the course model in float32
h100, llama = device("H100"), model_shapes.model("llama-3-8b")
print(f"{shape.name}: {shape.num_params:,} parameters, {format_bytes(weights_here)} in float32, on {model.device}")

# %% [markdown] name="question"
# ## 1. A question with a number
#
# Take Llama-3-8B in BF16 on one H100. It **reads** a prompt of 256 tokens. Then, for the same single user, it
# **writes** 256 tokens. Both times 256 tokens go through the same weights.
#
# Assume perfect software: only the limits of the hardware count. **How many times longer does writing take?**

# %% name="predict"
widgets.predict("01a-writing", "How many times longer is writing 256 tokens than reading 256?", "times")

# %% name="answer"
reading = latency.prefill_seconds(llama, 256, h100)
writing = sum(float(latency.decode_seconds(llama, context, h100)) for context in range(257, 257 + 256))
print(f"reading 256 tokens: {format_seconds(reading)}; writing 256 tokens: {format_seconds(writing)}")
widgets.reveal("01a-writing", writing / reading)

# %% [markdown] name="idea"
# ## 2. The idea
#
# Picture a ferry across a wide river. A crossing takes the same time, with one passenger on board or with two hundred.
#
# **Reading a prompt** is the easy case. All passengers stand at the pier. They board together, and one crossing brings
# them over. Only when there are more than the deck holds does it take longer: then the time is proportional to their
# number.
#
# **Writing an answer** is the hard case. The second passenger is not chosen before the first has landed, and the third
# not before the second. So the ferry crosses once per passenger, nearly empty each time. No larger deck helps.
#
# In the engine, the crossing is one **forward pass**: all weights come from memory once. (Of a dense model; a mixture
# of experts reads those that its tokens are routed to.) A passenger is a token. The
# deck is the arithmetic that can be done while the weights come in. Two more things fit the picture.
#
# - **Other travellers share the crossing.** Ten users who each write one token can board together. That is batching.
# - **Luggage is not shared.** Each user brings the keys and values of a whole text (the KV cache of chapter 02). It is
#   carried on every crossing, and it grows. At some point the luggage fills the ferry, not the passengers.
#
# The field's names: **prefill** is the pass (or passes) that read the prompt. It is also called prompt processing,
# initialization, the context phase, or the *reading* phase. **Decode** is what follows: token generation,
# the generation phase, or the *writing* phase.

# %% name="idea-figure" jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

panels = (
    ("prefill: 6 tokens, 1 pass", [6], [BLUE]),
    ("decode, 1 user: 4 tokens, 4 passes", [1, 1, 1, 1], [ORANGE]),
    ("decode, 3 users: 12 tokens, 4 passes", [3, 3, 3, 3], [ORANGE, GREEN, PURPLE]),
)
fig = figure(7.8, 2.3)
for ax, (title, boards, colours) in zip(fig.subplots(1, 3), panels, strict=True):
    for i, count in enumerate(boards):
        ax.add_patch(Rectangle((i * 1.25, 0), 1.0, 3.3, facecolor="white", edgecolor=INK, linewidth=1.2))
        for j in range(count):
            brings = 2 + i if count < 6 else 0  # a prompt that is read brings no cache yet
            colour = colours[j % len(colours)]
            ax.plot(i * 1.25 + 0.3 + 0.4 * (j % 2), 0.55 + 1.05 * (j // 2), "o", color=colour, markersize=8)
            ax.plot(i * 1.25 + 0.3 + 0.4 * (j % 2), 0.12 + 1.05 * (j // 2), "s", color=colour, markersize=brings)
    ax.annotate("", (5.0, -0.6), (-0.1, -0.6), arrowprops={"arrowstyle": "->", "color": INK})
    ax.text(2.45, -0.75, "time", ha="center", va="top", fontsize=8)
    ax.set_xlim(-0.2, 5.2)
    ax.set_ylim(-1.5, 3.6)
    ax.axis("off")
    ax.set_title(title, fontsize=9)
fig.supxlabel(
    "frame: one pass, all weights read once. disc: a token computed. small square: the cache it brings along, which grows",
    fontsize=8,
)
show(
    fig,
    "Three panels of forward passes over time. Prefill: one pass that carries six tokens. Decode for one user: four "
    "passes with one token each. Decode for three users: four passes with three tokens each; every user's cache, a "
    "small square, grows from pass to pass.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# Four square matrices stand for a model. Six tokens go through it, first all together and then one by one. Weights are
# read only through `Memory`, which counts the bytes. Attention is left out here; chapter 02a builds it.


# %% name="scratch"
class Memory:
    """Holds matrices and counts the bytes that are read from it."""

    def __init__(self, matrices):
        self.matrices, self.bytes_read = matrices, 0

    def read(self, i):
        self.bytes_read += self.matrices[i].nbytes
        return self.matrices[i]


def forward(memory, x):  # x [tokens, d]: any number of tokens share one read of each matrix
    flops = 0
    for i in range(len(memory.matrices)):
        weight = memory.read(i)
        flops += 2 * x.shape[0] * weight.numel()  # a multiplication and an addition per token and weight
        x = torch.relu(x @ weight)
    return x, flops


# %% [markdown] name="scratch-count-text"
# The same six tokens, both ways, with both counts:

# %% name="scratch-count"
torch.manual_seed(0)
d = 64
matrices, text = [torch.randn(d, d) / d**0.5 for _ in range(4)], torch.randn(6, d)

together, one_by_one = Memory(matrices), Memory(matrices)
read_at_once, flops_together = forward(together, text)  # a product of matrices: GEMM
parts = [forward(one_by_one, text[t : t + 1]) for t in range(6)]  # a vector times a matrix: GEMV, six times
torch.testing.assert_close(torch.cat([out for out, _ in parts]), read_at_once)
flops_one_by_one = sum(flops for _, flops in parts)
assert flops_together == flops_one_by_one
assert one_by_one.bytes_read == 6 * together.bytes_read
widgets.table(
    [[name, flops_together, memory.bytes_read, f"{flops_together / memory.bytes_read:.1f}"]
     for name, memory in (("together", together), ("one by one", one_by_one))],
    ["six tokens", "FLOP", "bytes of weights", "FLOP/byte"],
)  # fmt: skip

# %% [markdown] name="scratch-reading"
# Same results, same operations, six times the bytes. The last column is the **arithmetic intensity** of chapter 00. It
# grows with the tokens that share a read. With 32-bit weights it is half a FLOP per byte for each token, with 16-bit
# weights it is one.
#
# The tokens can be read together because all of them are *known*. When the model writes, the input of the next pass is
# the output of this one.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# Here is a prompt of six words, which happen to be six tokens. Each row is one pass of the real engine: what went in,
# what came out, and how many tokens are in the cache afterwards. The last column divides operations by bytes, both from
# `reference_impl.theory`. (The loop that watches the engine is folded: `run` serves this one request and notes every
# pass.)

# %% name="trace-run" jupyter={"source_hidden": true}
greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
prompt = llm.encode("Return the number of words in")
assert len(prompt) == 6


def spell(tokens):
    return [llm.tokenizer.decode([t]) for t in tokens]


def run(**config):
    """The engine after one request, and a line per pass: (tokens in, token out, cached, FLOP, bytes)."""
    engine, lines = Engine(model, EngineConfig(num_blocks=4, **config, prefix_cache="off")), []
    request = engine.add(prompt, greedy, request_id="six")
    while engine.has_work():
        fed = request.tokens[request.num_computed_tokens :][: config.get("max_num_batched_tokens", 2048)]
        past = request.num_computed_tokens
        out = engine.step().tokens
        flops = latency.engine_pass_flops(shape, len(fed), past)  # logits of the last token only
        moved = roofline.step_bytes(shape, 1, past, weights=weights_here, kv_bytes=4)
        lines.append((fed, list(out.get(request.id, ())), past + len(fed), flops, moved))
    return engine, request, lines


# %% name="trace"
engine, request, lines = run()
assert len(lines[0][0]) == 6  # one pass over six tokens ...
assert len(lines[0][1]) == 1  # ... gives one token
assert all(len(fed) == 1 for fed, *_ in lines[1:])
assert len(lines) == len(request.output_tokens) == 5
widgets.table(
    [[n, spell(fed), spell(out), cached, format_flops(flops), format_bytes(moved), f"{flops / moved:.2f}"]
     for n, (fed, out, cached, flops, moved) in enumerate(lines, 1)],
    ["pass", "in", "out", "cached", "operations", "bytes", "FLOP/byte"],
)  # fmt: skip


# %% [markdown] name="trace-reading"
# **Prefill** is the first row. Six tokens go in at once; their keys and values fill the cache; the logits of the *last*
# one give the first output. (The model computes logits for that one token only: `logits_indices` of the batch.)
#
# **Decode** is every other row. One token goes in, one comes out. The bytes are nearly the same as in the first row,
# and the operations a small fraction.
#
# So N outputs take N passes, and the first of them is the prefill. Now look for the two phases in the engine's code.
# You will not find them. A pass computes those tokens of a request that are not computed yet, whether six or one. To
# see it, limit the engine to one token per pass. Then the prompt is read by passes that look like decode. Keys and
# values agree up to rounding, since a product of six rows adds its numbers up in another order than one of a single
# row. So the text is the same unless two candidates are that close:

# %% name="no-phases"
slow_engine, slow_request, slow_lines = run(max_num_batched_tokens=1)
print(f"budget of 2048 tokens per pass: {len(lines)} passes; budget of 1: {len(slow_lines)} passes")
print("the same tokens:", spell(request.output_tokens), slow_request.output_tokens == request.output_tokens)
difference = (engine.kv_cache.data - slow_engine.kv_cache.data).abs().max().item()
print(f"largest difference of keys and values: {difference:.1e} (float32 rounding)")
assert slow_request.output_tokens == request.output_tokens
assert difference < 1e-3
assert len(slow_lines) == len(prompt) + len(request.output_tokens) - 1

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# Two numbers describe this machine: how fast it reads memory, and how fast it multiplies. We measure both as the engine
# uses them. Then we can draw the theory for *this* machine beside the measurements. Times are shown, never checked:
# they depend on the machine and on its other load. If points scatter, something else is running; run the cell again.
# (The stopwatch is folded: `shortest` runs functions in turns and keeps the shortest time of each, `read_rate` reads a
# buffer, `linear` makes a matrix as the engine stores it.)


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
    """Shortest seconds of each function. They run in turns, so that a busy moment of the machine affects all alike."""
    times = [[once(f) for f in functions] for _ in range(rounds)]
    return np.min(times, axis=0)


def read_rate(num_bytes):
    """byte/s of reading a buffer of this size repeatedly: small ones come from a cache, large ones from memory."""
    buffer = torch.ones(int(num_bytes) // 4, device=model.device)
    return buffer.nbytes / shortest([buffer.sum], 15)[0]


def linear(d_in, d_out):
    """One random matrix in the engine's own layout: (its bytes, a function x -> x W)."""
    method = default_method(torch.float32, model.device)
    params = method.create(d_in, d_out, bias=False)
    params["weight"].normal_()
    size = params["weight"].nbytes
    method.finish(params)
    return size, lambda x: method.apply(params, x)


# %% name="machine"
width = 8192 if on_gpu else 3072
matrix_bytes, times_matrix = linear(width, width)
bandwidth = read_rate(matrix_bytes)
tall = torch.randn(width if on_gpu else 1024, width, device=model.device)
with torch.inference_mode():
    rate = 2 * tall.shape[0] * width**2 / shortest([lambda: times_matrix(tall)], 4)[0]
print(
    f"reading {format_bytes(matrix_bytes)}: {bandwidth / 1e9:.1f} GB/s; multiplying: {rate / 1e9:.0f} GFLOP/s (float32)"
)
print(
    f"ridge of this machine: {rate / bandwidth:.1f} FLOP per byte, reached by {2 * rate / bandwidth:.0f} rows in float32"
)

# %% [markdown] name="gemm-text"
# ### Thick and thin products
#
# One weight matrix times one to many rows. Decode is the left end (one row: a **GEMV**, general matrix-vector product).
# Prefill is the right end (many rows: a **GEMM**). The operations *per row* are the same everywhere.

# %% name="gemm"
rows = [1, 2, 4, 8, 16, 32, 64, 128, 256] + ([512, 1024, 2048, 4096] if on_gpu else [])
with torch.inference_mode():
    inputs = [torch.randn(count, width, device=model.device) for count in rows]
    product_seconds = shortest([lambda x=x: times_matrix(x) for x in inputs], rounds=12)
m = np.array(rows)
flops = 2 * m * width**2
moved = matrix_bytes + 2 * m * width * 4  # the matrix, what goes in, what comes out
theory = np.maximum(flops / rate, moved / bandwidth)
widgets.table(
    [[count, *map(format_seconds, (seconds, bound, seconds / count)), f"{2 * count * width**2 / seconds / 1e9:,.0f}"]
     for count, seconds, bound in zip(rows, product_seconds, theory, strict=True)],
    ["rows", "measured", "theory", "measured per row", "GFLOP/s"],
)  # fmt: skip

# %% name="gemm-figure" jupyter={"source_hidden": true}
from matplotlib.ticker import LogLocator

fig = figure(7.6, 3.0)
left, right = fig.subplots(1, 2)
fine = np.geomspace(1, rows[-1], 100)
line = np.maximum(2 * fine * width**2 / rate, (matrix_bytes + 8 * fine * width) / bandwidth)
for ax, measured, bound, label in (
    (left, product_seconds * 1e3, line * 1e3, "ms for the product"),
    (right, product_seconds / m * 1e3, line / fine * 1e3, "ms per row"),
):
    ax.loglog(fine, bound, color=BLUE, linestyle="--", label="theory: bytes or operations")
    ax.loglog(rows, measured, "o", color=ORANGE, label="measured")
    ax.axvline(2 * rate / bandwidth, color=GREY, linewidth=1, label="ridge")
    tidy(ax, "rows (tokens that share the read)", label)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xticks(rows[::2], [str(n) for n in rows[::2]])
    ax.minorticks_off()
left.legend(fontsize=8, frameon=False)
show(
    fig,
    "Time of a matrix product over the number of rows, log-log. Theory: flat until the ridge, then proportional to the "
    "rows. Right: theory per row falls as one over rows until the ridge, then stays. The points are what this machine "
    f"measured: {format_seconds(product_seconds[0])} for 1 row, {format_seconds(product_seconds[-1])} for {rows[-1]}.",
)

# %% [markdown] name="gemm-reading"
# Left, where nothing else runs: almost flat at first. One row costs about what several cost, because the time goes into
# reading the matrix. Right of the ridge the time is proportional to the rows: now the arithmetic is the limit.
#
# The gaps, on an idle machine: right of the ridge the points lie on the line. (Points below it mean that the machine
# was busier while its rate was measured.) Left of it they lie above, because a product with few rows does not read as
# fast as the plain sum with which we measured the bandwidth. (Two rows may even cost less than one: a library has
# different kernels for different shapes, and on a CPU the engine's layout is optimized for about 16 rows.) The corner
# is sharp in theory and rounded in the measurement, because near the ridge reading and multiplying do not overlap
# perfectly.
#
# That is the whole reason for "prefill is compute-bound, decode is memory-bound". It is a statement about the number of
# rows. It is not about the phase: prefill of a *short* prompt is left of the ridge, and decode of *many* users can be
# right of it, as far as the matrices go. On an H100 the ridge is elsewhere:

# %% name="ridge-table"
print(f"H100 SXM5, dense BF16: ridge {h100.ridge():.0f} FLOP/byte, "
      f"reached by {latency.flat_prefill_tokens(h100):.0f} tokens per pass with 16-bit weights")  # fmt: skip

# %% [markdown] name="your-turn-text"
# **Your turn.** Write the line of the picture yourself: the seconds of a product with `rows` rows, from the three
# numbers `matrix_bytes`, `bandwidth` and `rate` (and `width`, the side of the matrix). Leave out the bytes of input and
# output. Replace `None`, run the cell, and read what the check says. The trap: which of the two limits applies when?


# %% name="your-turn"
def my_seconds(rows):
    return None


for count, seconds in zip(rows, product_seconds, strict=True):
    given, right = my_seconds(count), max(matrix_bytes / bandwidth, 2 * count * width**2 / rate)
    if given is None:
        print("my_seconds returns None: not written yet")
        break
    hint = "right" if abs(given / right - 1) < 0.01 else "too long: they overlap" if given > right else "too short"
    print(f"{count:4d} rows: you say {format_seconds(given)}, measured {format_seconds(seconds)}: {hint}")

# %% [markdown] name="batch-text"
# ### More users in one step
#
# Now whole steps of the course model. First many users with 64 tokens each: one new token per user. Then one user with
# longer and longer contexts. Both cells are folded. The batch is built by the engine's own code (`a_batch`), and the
# cache holds noise, since its contents do not change the time; each step is run 15 times in turn with the others, and
# the shortest time counts.


# %% name="batches" jupyter={"source_hidden": true}
def a_batch(rows, spec=llm.engine.kv_spec, tables=None):
    """A Batch of rows (new tokens, past tokens), built by the engine; tables: block ids of each row."""
    requests, plan, first = {}, [], 0
    for i, (new, past) in enumerate(rows):
        count = -(-(new + past) // spec.block_size)
        table = tables[i] if tables else list(range(first, first + count))
        first += count
        requests[str(i)] = Request(
            id=str(i), tokens=[5] * (new + past), num_prompt_tokens=1, sampling=greedy, seed=0, arrival=0.0,
            stop_token_ids=frozenset(), max_total_tokens=new + past + 1, block_tables=[table],
        )  # fmt: skip
        plan.append(Row(str(i), past, new, True))
    return build_batch(StepPlan(1, tuple(plan)), requests, [spec], model.device)


# %% name="steps" jupyter={"source_hidden": true}
cache, attention = llm.engine.kv_cache, llm.engine.attention
cache.data.normal_()

users = [1, 2, 4, 8, 16, 32] + ([64, 128, 256] if on_gpu else [])
contexts = [64, 256, 512, 1024, 1536, 2048]
batches = [a_batch([(1, 63)] * n) for n in users] + [a_batch([(1, n - 1)]) for n in contexts]
with torch.inference_mode():
    seconds = shortest([lambda b=b: model(b, cache, attention) for b in batches], rounds=15)
by_users, by_context = np.split(seconds, [len(users)])
read_here = read_rate(weights_here)  # the course model is small: its weights may come from a cache of the processor
print(f"reading {format_bytes(weights_here)} again and again: {read_here / 1e9:.1f} GB/s")
widgets.table(
    [[n, format_seconds(step), f"{n / step:,.0f}", f"{1 / step:.0f}"] for n, step in zip(users, by_users, strict=True)],
    ["users", "step", "tokens/s together", "tokens/s each"],
)

# %% name="steps-figure" jupyter={"source_hidden": true}
fig = figure(7.8, 3.1)
left, right = fig.subplots(1, 2)


def floor_here(batch, context):
    moved = roofline.step_bytes(shape, batch, context - 1, weights=weights_here, kv_bytes=4)
    return np.maximum(batch * latency.decode_flops(shape, context) / rate, moved / read_here)


n, c = np.arange(1, users[-1] + 1), np.arange(64, 2049, 32)
price = by_users[0] - floor_here(1, 64)
for ax, x, floor, at, measured, label in (
    (left, n, floor_here(n, 64), users, by_users, "users, 64 tokens each"),
    (right, c, floor_here(1, c), contexts, by_context, "context of one user, tokens"),
):
    ax.plot(x, floor * 1e3, color=BLUE, linestyle="--", label="floor: bytes or operations")
    ax.plot(x, (floor + price) * 1e3, color=INK, linewidth=1, label="floor + cost of a pass (from 1 user)")
    ax.plot(at, measured * 1e3, "o", color=ORANGE, label="measured")
    ax.set_ylim(bottom=0)
    tidy(ax, label, "ms per step")
left.legend(fontsize=8, frameon=False)
show(
    fig,
    "Time of a decode step of the course model. Left over the number of users, right over the context of one user. "
    "Floors from this machine's rates are dashed; a fixed cost per pass added to them gives the solid line. Measured: "
    f"{format_seconds(by_users[0])} for 1 user, {format_seconds(by_users[-1])} for {users[-1]}; "
    f"{format_seconds(by_context[-1])} at a context of {contexts[-1]}.",
)

# %% name="steps-summary"
many = users[-1]
print(f"{many} users instead of 1: {many * by_users[0] / by_users[-1]:.1f} times the tokens per second, "
      f"each user waits {by_users[-1] / by_users[0]:.1f} times as long for a token")  # fmt: skip
print(f"context {contexts[-1]} instead of {contexts[0]}: step takes {by_context[-1] / by_context[0]:.2f} times as long, "
      f"bytes grow {roofline.step_bytes(shape, 1, 2047, weights=weights_here, kv_bytes=4) / roofline.step_bytes(shape, 1, 63, weights=weights_here, kv_bytes=4):.2f} times")  # fmt: skip

# %% [markdown] name="steps-reading"
# The gap between the dashed line and the points is mostly a **fixed cost per pass**: a few hundred small operations,
# each launched from Python (`b_floors` takes it apart). The solid line adds that cost, taken from the first point. What
# remains grows with users and with context: attention in plain torch reads its keys and values below the full rate, and
# for several users it copies them first.
#
# The left plot is the intuition behind batching. More users in a step cost little *until something binds*. On this
# machine arithmetic binds early, since its ridge is low. On an H100 the ridge is high (a large deck), and what usually
# binds is each user's cache (the luggage). Here is the floor of a step for an 8B model, with its largest term:


# %% name="batching-floor"
def floor_row(context, batch):
    if batch > room[context]:
        return [context, batch, *["-"] * 4, "refused: they do not fit"]
    at = roofline.place(llama, h100, batch, context - 1)
    own = batch * kv_cache.cache_bytes(llama, context) / at.num_bytes
    bound = "arithmetic" if at.compute_bound else "reading caches" if own > 0.5 else "reading weights"
    together, each = f"{batch / at.seconds:,.0f}", f"{1 / at.seconds:.0f}"
    return [context, batch, format_seconds(at.seconds), together, each, f"{own:.0%}", bound]


weights, per_token = kv_cache.weight_bytes(llama), kv_cache.bytes_per_token(llama)
room = {n: kv_cache.concurrent_requests(h100.capacity, weights, n, per_token) for n in (512, 8192)}
for context, most in room.items():
    print(f"context {context:,}: memory holds {most} such users (90 % of 80 GB)")
widgets.table(
    [floor_row(context, batch) for context in room for batch in (1, 8, 32, 128, 512)],
    ["context", "users", "step", "tokens/s together", "each", "caches, of the bytes", "bound by"],
)


# %% name="batching-limits"
def limit_row(context):
    needed = roofline.batch_for_ridge(llama, context, h100.ridge())
    users = f"{needed:,.0f} users" if np.isfinite(needed) else "no number of users"
    return [context, users, f"{roofline.max_decode_intensity(llama, context):.0f}", f"{h100.ridge():.0f}"]


widgets.table(
    [limit_row(context) for context in (128, 512, 8192)],
    ["context", "compute-bound from", "best FLOP/byte of any batch", "ridge"],
)

# %% [markdown] name="batching-limits-reading"
# So "decode becomes compute-bound with enough users" holds for short contexts only, for this model and this GPU in
# BF16. Users share the weights, but not their caches. Chapter 03 builds the scheduler that fills the steps.
#
# ### Side by side
#
# All numbers for Llama-3-8B in BF16 on one H100 SXM5 (dense peak, floors):

# %% name="side-by-side"
kinds = {
    "prefill, 2,048 tokens": roofline.place(llama, h100, 1, 0, 2048),
    "prefill, 64 tokens": roofline.place(llama, h100, 1, 0, 64),
    "decode, 1 user at 2,048": roofline.place(llama, h100, 1, 2047, 1),
    "decode, 64 users at 2,048": roofline.place(llama, h100, 64, 2047, 1),
}
widgets.table(
    [[name, format_flops(at.flops), format_bytes(at.num_bytes), f"{at.intensity:,.1f}", format_seconds(at.seconds),
      f"{at.utilization:.1%}", "arithmetic" if at.compute_bound else "memory"] for name, at in kinds.items()],
    ["step", "operations", "bytes", "FLOP/byte", "floor", "peak usable", "bound by"],
)  # fmt: skip

# %% [markdown] name="side-by-side-table"
# | | prefill | decode |
# |---|---|---|
# | tokens per pass | all of the prompt (or a chunk of it) | one per user |
# | why not more | – | the next token is not known yet |
# | main product | GEMM, thick | GEMV, or thin GEMM with a batch |
# | bound by | arithmetic, once past the ridge | memory: weights, then caches; in small models the fixed cost of a pass |
# | memory access | weights once for many tokens; writes the cache | weights once per step; reads the whole cache of each user, in order within each block |
# | what the user feels | the wait for the first token (with the queue: TTFT) | the rhythm of the text (TPOT, ITL) |
# | more users in a step | more work, nearly in proportion | little extra time, until arithmetic or caches bind |
# | what helps | fewer tokens (prefix cache), faster kernels (FlashAttention), more compute (more GPUs, FP8) | fewer bytes (quantized weights and cache, fewer KV heads), more users per read (batching), several tokens per pass (speculation), fewer launches (CUDA graphs) |

# %% [markdown] name="answer-reading"
# And the question from the top: a prompt of 256 tokens is still below the ridge of an H100, so reading it takes about as
# long as *one* step of decode. The ferry was not full.
#
# ### Could the phases live on different machines?
#
# One phase needs arithmetic, the other needs bandwidth, and a long prefill delays everybody's decode. So why not give
# each phase its own machines (**disaggregation**, chapter 13)? Each side can then be sized and tuned for its own limit.
# The price: when the prefill ends, the cache has to be transferred. Compute it before you believe either side. (Llama 3
# itself has a context of 8,192 tokens. Llama 3.1 has the same shape and a context of 131,072, so the longer prompt is
# for that model.)
# <!-- source: config.json of both models, max_position_embeddings -->


# %% name="transfer"
def transfer_row(name, tokens):
    size = kv_cache.cache_bytes(llama, tokens)
    seconds = transfer_seconds(size, link(name).per_direction)
    prefill, decode = latency.prefill_seconds(llama, tokens, h100, mfu=0.5), latency.decode_seconds(llama, tokens, h100)
    shares = f"{seconds / prefill:.0%}", f"{seconds / decode:.1f}"
    return [name, tokens, format_bytes(size), format_seconds(seconds), *shares]


widgets.table(
    [transfer_row(n, t) for n in ("NVLink 4", "InfiniBand NDR 400G", "Ethernet 100G") for t in (2048, 32768)],
    ["link", "tokens", "cache", "time", "of the prefill at 50 % MFU", "decode steps"],
)

# %% [markdown] name="transfer-reading"
# These are floors with the whole link for one request. When many requests share a link, what counts is bytes per
# second, not one transfer. Part of a transfer can also be overlapped with the prefill, layer by layer.

# %% [markdown] name="worked"
# ### Worked problem 3: a prompt beside 32 streams
#
# The course's deployment again (chapter 00): Llama-3-70B in 16 bits on four H100 with tensor parallelism; 139.0 GB of
# weights that a pass reads, of which 2.1 GB are the output matrix, and 327,680 bytes of cache per token. 32 requests
# decode at 2,048 tokens each. A prompt of 4,096 tokens arrives, and a step computes it whole, beside the 32.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_3_a_prompt_beside_32_streams -->
#
# *At half of the arithmetic peak, and at full bandwidth: how long is a step of the 32 alone, and how long is the step
# with the prompt? All logits but the last of the prompt are left out, and so is communication.*
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_3_a_prompt_beside_32_streams -->
#
# <details><summary>Answer</summary>
#
# The 32 alone: 139.0 GB + 32 · 2,048 · 327,680 bytes = 139.0 + 21.5 = 160.5 GB at 13.4 TB/s: **12.0 ms**. (Their
# arithmetic, 4.6 TFLOP at half of 3,956 TFLOP/s, takes 2.3 ms and hides behind it.)
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_3_a_prompt_beside_32_streams -->
#
# The prompt: 2 · 68.45 · 10⁹ weights · 4,096 = 560.8 TFLOP in the layers' matrices, one row of logits, and 4 · 80 · 64
# · 128 · 4,096 · 4,097 / 2 = 22.0 TFLOP in attention. With the 32: 587 TFLOP at 1,978 TFLOP/s: **297 ms**. The bytes of
# the step, 162 GB, take 12 ms and hide.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_3_a_prompt_beside_32_streams -->
#
# So for all 32 one gap is about 25 times as long as the others. They are not slower because the prompt is *beside*
# them: running it alone, and them after it, would take 306 ms until their next token. What helps is to cut the prompt
# (chapter 03).
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_3_a_prompt_beside_32_streams -->
#
# </details>

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# A real run, drawn from the engine's trace with real seconds. Request 0 has a short prompt and decodes. Request 1
# arrives later with a long prompt. Look at what happens to request 0 while request 1 is read. Switch the axis to steps:
# a prefill is as wide as a decode there, and that is how the engine counts.

# %% name="explore"
engine = Engine(model, EngineConfig(num_blocks=80, prefix_cache="off"))
long_prompt = (llm.encode("def parse(lines):\n    for line in lines:\n        yield line.split()\n") * 40)[:700]
writes = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
engine.add(prompt, writes)
for step in range(60):
    if step == 12:
        engine.add(long_prompt, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    if engine.has_work():
        engine.step()
gaps = engine.trace.metrics("0").itl
print(f"request 0: usual gap {format_seconds(float(np.median(gaps)))}, longest {format_seconds(max(gaps))}; "
      f"one of its passes also read the {len(long_prompt)} tokens of request 1")  # fmt: skip
widgets.timeline(engine.trace, by="seconds")

# %% [markdown] name="errata-trace"
# ## 7. What the cheat sheets get wrong
#
# **"After prefill, step 2 computes Q, K and V of the fourth word and so generates it."** (E01.12) The fourth word came out of the
# prefill; step 2 takes it *in*. The trace in section 4 shows it, and the cache is always one token behind the text
# (chapter 02a has the details):

# %% name="errata-trace-cell"
for n, (_, _, cached, _, _) in enumerate(lines, 1):
    assert cached == len(prompt) + n - 1
print(f"after {len(lines)} outputs: {len(prompt)} + {len(lines)} tokens of text, {lines[-1][2]} in the cache")

# %% [markdown] name="errata-random"
# **"Decode makes random accesses to the KV cache."** (E01.13) Each step reads *all* keys and values of a text, once, in
# order. An engine keeps them in **blocks** of, say, 16 tokens, and a **block table** lists the blocks of each text
# (chapter 04). What can be scattered is the location of the blocks. Is that random access? It depends on the size of
# the pieces.
#
# We take the engine's own decode attention and a pool larger than the processor's caches. Two users of 1,024 tokens (on
# a GPU 64 of them, since fewer finish too quickly to measure), once with adjacent blocks, once with a shuffled block
# table. Each measurement reads blocks that were not read before. For comparison, true random access: single numbers of
# four bytes, gathered from everywhere. (Both measurements are folded.)


# %% name="errata-random-rates" jupyter={"source_hidden": true}
@torch.inference_mode()
def gather_rates(block_size, kv_heads, head_dim, length=1024, rounds=12):
    """(bytes of a contiguous piece, byte/s in order, byte/s shuffled) of one layer's decode attention."""
    users, pool_bytes = (64, 2**31) if on_gpu else (2, 2**28)
    spec = KVSpec(1, kv_heads, head_dim, block_size, bits_per_value=32)
    pool = PagedKVCache([spec], pool_bytes // spec.bytes_per_block, torch.float32, model.device)
    backend = TorchAttention(head_dim**-0.5, torch.float32)
    each = length // block_size
    rounds = min(rounds, pool.num_blocks // (users * each))
    shuffled = random.Random(0).sample(range(pool.num_blocks), pool.num_blocks)
    q, k = (torch.randn(users, heads, head_dim, device=model.device) for heads in (2 * kv_heads, kv_heads))
    times = {"in order": [], "shuffled": []}
    for r in range(rounds):
        for name, blocks in (("in order", range(pool.num_blocks)), ("shuffled", shuffled)):
            tables = [list(blocks[(users * r + u) * each : (users * r + u + 1) * each]) for u in range(users)]
            batch = a_batch([(1, length - 1)] * users, spec, tables)
            backend.plan(batch)
            times[name].append(once(lambda b=batch: backend.forward(q, k, k, 0, pool, b)))
    read = users * length * spec.bytes_per_token
    return spec.bytes_per_block // 2, read / min(times["in order"]), read / min(times["shuffled"])


def single_numbers(count=2**23 if on_gpu else 2**19, rounds=5):
    """(4, byte/s in order, byte/s at random) of gathering single float32 values."""
    pool = torch.ones(2**26, device=model.device)
    times = {"in order": [], "random": []}
    for r in range(rounds):
        in_order = torch.arange(r * count, (r + 1) * count, device=model.device)
        for name, places in (
            ("in order", in_order),
            ("random", torch.randint(len(pool), (count,), device=model.device)),
        ):
            times[name].append(once(lambda p=places: pool.index_select(0, p)))
    return 4, *(4 * count / min(t) for t in times.values())


# %% name="errata-random-cell"
found = [single_numbers()]
found += [gather_rates(block_size, shape.num_kv_heads, shape.head_dim) for block_size in (1, 4, 16, 64)]
found += [gather_rates(block_size, llama.num_kv_heads, llama.head_dim, length=256) for block_size in (16, 64)]
print(f"one block of 16 tokens, keys of one layer: course model {16 * shape.num_kv_heads * shape.head_dim * 4:,} bytes in float32, "
      f"llama-3-8b {16 * llama.num_kv_heads * llama.head_dim * 2:,} bytes in BF16")  # fmt: skip
read = ["single numbers", *["course model's shape"] * 4, *["llama-3-8b's shape"] * 2]
widgets.table(
    [[what, piece, f"{in_order / 1e9:.2f}", f"{scattered / 1e9:.2f}", f"{scattered / in_order:.0%}"]
     for what, (piece, in_order, scattered) in zip(read, found, strict=True)],
    ["what is read", "bytes of a piece", "GB/s in order", "GB/s scattered", "scattered / in order"],
)  # fmt: skip

# %% name="errata-random-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 2.7)
ax = fig.subplots()
pieces, shares = [f[0] for f in found], [f[2] / f[1] for f in found]
ax.plot(pieces[0], shares[0], "s", color=INK, label="single numbers")
ax.plot(pieces[1:5], shares[1:5], "o-", color=ORANGE, label="engine's decode attention, shape of the course model")
ax.plot(pieces[5:], shares[5:], "^-", color=GREEN, label="the same, shape of llama-3-8b")
ax.axhline(1, color=GREY, linewidth=1)
ax.axvline(16 * llama.num_kv_heads * llama.head_dim * 2, color=BLUE, linestyle="--", linewidth=1)
ax.text(
    16 * llama.num_kv_heads * llama.head_dim * 2.2,
    0.05,
    "a block of 16 tokens,\nllama-3-8b, BF16",
    fontsize=8,
    color=BLUE,
)
ax.set_xscale("log", base=2)
ax.set_ylim(0, 1.5)
tidy(ax, "bytes of a contiguous piece", "scattered / in order")
ax.legend(fontsize=8, frameon=False, loc="upper left")
show(
    fig,
    "Rate of reading scattered pieces relative to reading in order, over the size of a piece: "
    + ", ".join(f"{share:.0%} for {piece:,} bytes" for piece, share in zip(pieces, shares, strict=True))
    + ". A block of 16 tokens of llama-3-8b in BF16 is marked.",
)

# %% [markdown] name="errata-random-reading"
# Single numbers at random are slow: each read fetches a whole cache line and uses four bytes of it. Blocks of kilobytes
# are different. Inside a block the reads are sequential, and the only cost is at the start of each block: on a CPU the
# prefetcher stops at page boundaries, on a GPU there is one block-table lookup per block. The larger the block's bytes
# *per layer*, the less it matters.
#
# So decode attention is **streaming with a gather at block granularity**. It is bound by bandwidth, not by the latency
# of single accesses. The condition is the block size in bytes: a cache with one head, few dimensions and one token per
# block would come closer to random access.
#
# One note on the figures: this backend copies the gathered blocks before it computes, so its GB/s are below
# the machine's. A paged attention kernel reads through the block table without a copy (chapters 04 and 05).

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Look up names and defaults in the version you run.
#
# **vLLM** dropped the distinction from its scheduler with the V1 engine (the default since 0.8, 2025): a request has
# computed tokens and tokens to compute, and one step may mix both kinds. Prompts longer than the step's budget
# (`max_num_batched_tokens`) are cut into chunks by default. The engine of this course follows that idea.
#
# **TensorRT-LLM** calls the two *context phase* and *generation phase*; in-flight batching puts both into one step.
#
# **SGLang** schedules separate prefill ("extend") and decode batches by default and can mix them when asked
# (`--enable-mixed-chunk`).
#
# **Splitting the phases over machines** was argued by Splitwise (2023) and DistServe (2024) and is offered today by
# vLLM (KV connectors), SGLang (PD disaggregation) and NVIDIA Dynamo (2025). Mooncake (2024) described it in production
# at Moonshot AI. Chapter 13 says when it pays off.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Each wrong option stands for a particular mistake, and the feedback names it. Change the seed for other numbers. The
# lab comes after `d_sampling`: [Metrics and sampling](../../labs/01_prefill_decode/metrics_sampling.ipynb).

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("01_prefill_decode").draw(seed=1, tag="phases"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Prefill: all prompt tokens in one pass (or in chunks). Fills the cache; the last position gives the first output.
# - Decode: one new token per user per pass. N outputs = N passes, including the prefill.
# - Same code, same weights, same FLOP per token. What differs is how many tokens share one read of the weights.
# - Intensity of the matrices: `2 · tokens / bytes per weight`. Flat below the ridge, proportional to tokens above.
# - "Prefill is compute-bound" holds past the ridge. "Decode is memory-bound" holds except for many users with short
#   contexts.
# - A batch shares the weights, not the caches. At long contexts no batch reaches the ridge (8B, BF16, H100: from a few
#   hundred tokens on).
# - Decode reads each cache once per step, in order within blocks: streaming, with a gather per block.
# - Disaggregation: each side is tuned for its own limit; the price is moving the cache.
