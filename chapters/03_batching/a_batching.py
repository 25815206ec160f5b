# %% [markdown] name="title"
# # 03a · Batching: which requests share a step
#
# About 45 minutes. You need chapters 01 and 02. The next notebook, `b_scheduling`, is about which requests go first and
# which have to wait. The lab of both is [Build a scheduler](../../labs/03_batching/scheduler.ipynb).

# %% name="setup"
import inspect
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from IPython.display import display

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, figure, show, tidy
from reference_impl import LLM, Engine, EngineConfig, Parts, SamplingParams, course_model
from reference_impl.assembly.batch import build_batch
from reference_impl.features.baselines.contiguous_manager import ContiguousKVManager
from reference_impl.features.baselines.dynamic_batching import DynamicBatching
from reference_impl.features.baselines.no_cache import generate_no_cache
from reference_impl.features.baselines.orca_batching import OrcaBatching
from reference_impl.features.baselines.static_batching import StaticBatching
from reference_impl.bench.simulation import Arrival, poisson, simulate
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.kv_manager import KVManager
from reference_impl.core.linear import Linear
from reference_impl.observe.metrics import percentile
from reference_impl.core.scheduler import Scheduler
from reference_impl.theory import latency
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.units import format_seconds

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
# The prefix cache is off, so that a prompt asked twice is computed twice; chapter 06 turns it on.
llm = LLM(course_model("target"), dtype="float32", kv_cache_bytes=8 * 2**20, prefix_cache="off")
model = llm.engine.model
on_gpu = model.device.type == "cuda"
text = llm.encode(inspect.getsource(Engine)) * 3

llama = shape_of("llama-3-8b")
h100 = Deployment(llama, device("H100"), mfu=0.5, mbu=0.8)
print(
    f"Large machine, by formula: Llama-3-8B in bf16 on one H100 (SXM, dense peak), MFU {h100.mfu:.0%}, MBU {h100.mbu:.0%}:"
)
print(f"a decode step of 1 / 64 requests at context 1,000: {format_seconds(h100.tpot(1000))} / {format_seconds(h100.tpot(1000, 64))}")  # fmt: skip

# %% [markdown] name="question"
# ## 1. A question with a number
#
# 64 requests are waiting, all since the same moment. Their outputs have 100 tokens on average, and vary as such lengths
# do: many are short, a few are long (an exponential distribution). The machine has 8 seats (slots): 8 requests can
# decode together.
#
# You can fill the 8 seats, wait until all 8 requests have finished, and admit the next 8. Or you can give a seat to the
# next request as soon as it is free. **How many times more steps does the first way take?**

# %% name="predict"
widgets.predict("03a-steps", "How many times more steps, if a batch of 8 must end before the next may start?", "times")

# %% [markdown] name="idea"
# ## 2. The idea
#
# Think of a **lift** in a tall building. It stops at every floor. The cabin is so heavy that the motor hardly notices
# whether one or fifty people are in it: a ride of one floor takes the same time. That is the decode step. The cabin is
# the weights, which are read once per step, however many requests are in it.
#
# - **No batching:** one person at a time. Everybody else watches a nearly empty cabin go up.
# - **Static batching:** a group enters together, and the doors stay shut until the last of the group has reached the
#   right floor. Those whose floor came earlier ride on for nothing. Those who arrive meanwhile wait below.
# - **Dynamic batching:** the doors shut when the cabin is full *or* when the first has waited for some time. That helps
#   the first to arrive. Once the doors are shut it is a static batch.
# - **Continuous batching:** the doors open at *every* floor. Passengers who have arrived get out, and the next in line
#   get in.
#
# And then somebody comes with **eighty crates** (a long prompt). All crates in one ride make the cabin so heavy that
# this one floor takes minutes. Everybody waits for it, inside with the crates or outside until the lift is back: sharing
# the ride is not what costs them, its length is. So the attendant lets people in first, and then as many crates as the
# motor can carry without slowing down. The rest goes with the next rides. That is **chunked prefill**. The crates arrive
# a little later than if they had had the lift to themselves, and nobody else notices them. (`crates`, in section 5, draws
# it.)

# %% name="idea-figure" jupyter={"source_hidden": true}
lengths = (1000, 200, 400, 100)
colours, hatches = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED), ("", "//", "..", "\\\\", "", "xx")
fig = figure(7.6, 3.0)
left, right = fig.subplots(1, 2)
for ax, title in ((left, "static: the rectangle"), (right, "continuous: the same seats")):
    for seat, n in enumerate(lengths):
        ax.barh(seat, n, 0.7, color=colours[seat], edgecolor="white")
        ax.text(12, seat, f"{n:,}", va="center", fontsize=8, color="white", fontweight="bold")
    ax.invert_yaxis()
    ax.set_yticks(range(4), [f"seat {i + 1}" for i in range(4)])
    ax.set_xlim(0, 1020)
    tidy(ax, "step", title=title)
for seat, n in enumerate(lengths):
    left.barh(seat, 1000 - n, 0.7, left=n, color="white", edgecolor=GREY, hatch="////")
    if n < 1000:
        left.text(
            (n + 1000) / 2,
            seat,
            "ended; nobody may enter",
            ha="center",
            va="center",
            fontsize=7,
            backgroundcolor="white",
        )
        right.barh(seat, 1000 - n, 0.7, left=n, color=SKY, edgecolor="white")
        right.text((n + 1000) / 2, seat, "the next requests", ha="center", va="center", fontsize=8)
show(
    fig,
    "Four requests of 1000, 200, 400 and 100 tokens on four seats. Static: the three shorter rows are empty from their "
    "end to step 1000. Continuous: the next requests take these seats at once.",
)

# %% [markdown] name="idea-four"
# A static batch has four problems, and the left picture shows three of them: a finished row computes for nothing;
# requests that finished early are not returned until the longest has ended (in an engine that returns whole batches);
# new requests wait for the longest. The fourth: prompts of unequal length are padded to a rectangle.

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# Lengths are all you need. A **rule** says when a free seat may be filled: in a static batch when *all* seats are free,
# in a continuous one always. Everything else is the same loop.


# %% name="scratch"
def play(lengths, seats, rule):
    """Every running request gets a token per step. -> (steps, bars: (seat, request, first step, one past the last))."""
    waiting, running, bars, step = list(range(len(lengths))), {}, [], 0
    while waiting or running:
        if rule == "continuous" or not running:
            for seat in range(seats):
                if seat not in running and waiting:
                    request = waiting.pop(0)
                    running[seat] = [request, lengths[request]]
                    bars.append((seat, request, step, step + lengths[request]))
        for seat in list(running):
            running[seat][1] -= 1
            if running[seat][1] == 0:
                del running[seat]
        step += 1
    return step, bars


exponential = [1 + int(x) for x in np.random.default_rng(3).exponential(99, 64)]
in_steps = {rule: play(exponential, 8, rule)[0] for rule in ("static", "continuous")}
print(f"64 requests, {sum(exponential)} tokens, 8 seats: {in_steps} steps")
widgets.reveal("03a-steps", in_steps["static"] / in_steps["continuous"])

# %% [markdown] name="scratch-useful-text"
# The waste of a static batch is a rectangle's: rows that have ended go on to the longest, and prompts are padded to the
# longest. Both shares take one division.


# %% name="scratch-useful"
def useful(lengths, seats, rule):  # share of seat-steps that produced a token, while a batch ran
    return sum(lengths) / (seats * play(lengths, seats, rule)[0])


steps, _ = play([1000, 200, 400, 100], 4, "static")
print(f"1000/200/400/100 in one static batch: {steps} steps, {useful([1000, 200, 400, 100], 4, 'static'):.1%} useful")
prompts = [1024, 256, 64, 128, 64, 256, 128, 128]
print(f"prompts of {prompts} tokens:")
print(
    f"mean {np.mean(prompts):.0f}, padded to {max(prompts)}: {1 - np.mean(prompts) / max(prompts):.0%} of the rectangle is padding"
)

# %% [markdown] name="scratch-lengths-text"
# How much of it is due to the lengths? The same 64 requests with three kinds of them.

# %% name="scratch-lengths"
rng = np.random.default_rng(3)
outputs = {"all 100": [100] * 64, "50 to 150": rng.integers(50, 151, 64).tolist(), "exponential, mean 100": exponential}
rows = []
for name, lens in outputs.items():
    static, continuous = play(lens, 8, "static")[0], play(lens, 8, "continuous")[0]
    rows.append((name, static, continuous, -(-sum(lens) // 8), f"{static / continuous:.2f}"))
widgets.table(rows, ("64 requests, 8 seats", "steps, static", "continuous", "least possible", "static / continuous"))

# %% [markdown] name="scratch-reading"
# Two arguments are easily confused, so keep them apart.
#
# - *Batching* exists because one read of the weights can serve many requests. A static batch shares that read, too.
# - *Continuous* batching exists because outputs differ in length, and because requests arrive at any time. With equal
#   lengths and simultaneous arrival, the first row of the table, it gains nothing.
#
# Here is the second argument as a timeline. A seat that becomes free at the end of a step is filled **in the very next
# step**: the scheduler decides between steps, when it already knows which requests have finished.

# %% name="refill" jupyter={"source_hidden": true}
small = [6, 5, 7, 2, 5, 4]
fig = figure(7.6, 2.9)
axes = fig.subplots(2, 1, sharex=True)
for ax, rule in zip(axes, ("static", "continuous"), strict=True):
    steps, bars = play(small, 4, rule)
    for seat, request, first, end in bars:
        ax.barh(seat, end - first, 0.8, left=first, color=colours[request], edgecolor="white", hatch=hatches[request])
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # low: a gap would be an empty seat
        ax.text((first + end) / 2, seat, f"r{request + 1}", ha="center", va="center", fontsize=7, bbox=white)
    ax.invert_yaxis()
    ax.set_yticks(range(4), [f"seat {i + 1}" for i in range(4)], fontsize=8)
    tidy(ax, title=f"{rule}: {steps} steps")
    ax.set_xticks(range(13))
axes[1].set_xlabel("step")
show(
    fig,
    "Six requests on four seats. Static: requests 5 and 6 start in a second batch, after step 7. Continuous: request 5 "
    "takes the seat of request 4 in the step after it ended, request 6 the seat of request 2; no seat is empty between.",
)

# %% name="refill-check"
_, bars = play(small, 4, "continuous")
freed = {(seat, end) for seat, _, _, end in bars}
later = [(seat, first) for seat, _, first, _ in bars if first > 0]
assert all(start in freed for start in later)
print(
    "seats taken again:",
    ", ".join(f"seat {seat + 1} at step {first}" for seat, first in later),
    "- each the step after it was freed",
)

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The engine's scheduler can be replaced, and three older ones are in `reference_impl/features/baselines`: static
# batching, dynamic batching, and that of Orca (Yu et al., 2022), which introduced continuous batching, without chunked
# prefill and with memory reserved for the longest output. Same model, same attention, same requests: only the order of
# work differs. So only the steps differ, and the texts are equal. (Up to rounding, to be exact: other neighbours in a
# step can mean another order of additions. In float32 that rarely tips a choice, and the cells check that it does not
# here; in 16 bits it can, unless the engine runs with `batch_invariant=True`.)


# %% name="engine-parts"
def engine_with(make, seats=4, budget=2048, blocks=256):
    """make(kv) -> scheduler, or None for the engine's own."""
    config = EngineConfig(num_blocks=blocks, max_num_seqs=seats, max_num_batched_tokens=budget, prefix_cache="off")
    if make is None:
        return Engine(model, config)
    pool = BlockPool(blocks)
    kv = KVManager(pool, config.block_size)
    return Engine(model, config, Parts(block_pool=pool, kv_manager=kv, scheduler=make(kv)))


def run(engine, prompts, outputs):
    greedy = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in outputs]
    added = [engine.add(p, s, f"r{i + 1}") for i, (p, s) in enumerate(zip(prompts, greedy, strict=True))]
    while engine.has_work():
        engine.step()
    return [r.output_tokens for r in added], engine.trace


# %% [markdown] name="engine-run-text"
# Six requests on four seats, whose outputs have 6, 5, 7, 2, 5 and 4 tokens. `play` has said how many steps the static and
# the continuous rule take. **How many rows does the static batch compute in vain?**

# %% name="engine-predict"
widgets.predict(
    "03a-vain", "Outputs of 6, 5, 7, 2, 5, 4 tokens on 4 seats: rows a static batch computes in vain?", "rows"
)

# %% name="engine-run"
makers = {
    "static": lambda kv: StaticBatching(kv, 4),
    "Orca": lambda kv: OrcaBatching(kv, 4),
    "the engine's own": None,
}
prompts = [text[40 * i : 40 * i + n] for i, n in enumerate((12, 30, 20, 9, 25, 16))]
traces, texts, in_vain = {}, {}, {}
for name, make in makers.items():
    texts[name], traces[name] = run(engine_with(make), prompts, small)
    rows = sum(len(s.rows) for s in traces[name].steps())
    in_vain[name] = sum(not row.samples for s in traces[name].steps() for row in s.rows)
    print(f"{name}: {len(traces[name].steps())} steps, {rows} rows computed, {in_vain[name]} of them in vain")
assert texts["static"] == texts["Orca"] == texts["the engine's own"]
assert len(traces["static"].steps()) == play(small, 4, "static")[0]
assert len(traces["the engine's own"].steps()) == play(small, 4, "continuous")[0]
print("the same texts, and as many steps as the loop above said")
widgets.reveal("03a-vain", in_vain["static"])

# %% [markdown] name="engine-source-text"
# This is the whole decision, taken before every step: how many tokens each running request may compute, blocks for
# them, and then which requests are admitted. There is no "prefill mode" in it: a request has tokens, some of them not
# computed yet. A request with exactly one such token is decoding.

# %% name="engine-source"
print(inspect.getsource(Scheduler.schedule))
print(inspect.getsource(Scheduler._shares))

# %% [markdown] name="ragged-text"
# ### The ragged batch
#
# One step may contain a prompt of 5 tokens and three requests that decode. What is the model's input? One flat list of
# tokens, without padding; a position for each; the boundaries between requests (`query_start_loc`); and each request's
# context, including its new tokens (`seq_lens`).

# %% name="ragged"
engine = engine_with(None)
for i, n in enumerate((3, 6, 4)):
    engine.add(prompts[i][:n], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), f"r{i + 1}")
engine.step()
engine.add(prompts[3][:5], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), "new")
plan = engine.scheduler.schedule(0.0)
batch = build_batch(plan, engine.requests, engine.kv_specs, torch.device("cpu"))
owner = torch.repeat_interleave(torch.arange(batch.num_rows), torch.tensor(batch.query_lens))
print("rows, most context first", batch.request_ids, " new tokens:", batch.query_lens)
print("input_ids       ", batch.input_ids.tolist())
print("positions       ", batch.positions.tolist())
print("row of each     ", owner.tolist(), "(the sequence ids; engines keep the boundaries instead)")
print("query_start_loc ", batch.query_start_loc.tolist())
print("seq_lens        ", batch.seq_lens.tolist())
print("logits_indices  ", batch.logits_indices.tolist(), "(only these tokens need logits)")
assert batch.positions.tolist()[-5:] == [0, 1, 2, 3, 4]

# %% [markdown] name="selective-text"
# Matrix products are the same for every request's tokens: each runs **once** over the flat list. Attention is not:
# every request has its own keys. Orca called this *selective batching*. Count it: how often each matrix is called in a
# step, with how many tokens, and how many query-key pairs attention computes, compared with one packed score matrix.

# %% name="selective"
seen = []
hooks = [
    m.register_forward_hook(lambda m, x, y: seen.append(x[0].shape[0]))
    for m in model.modules()
    if isinstance(m, Linear)
]
engine.executor.submit(engine.planner.step(plan, engine.requests))
for hook in hooks:
    hook.remove()
tokens = batch.num_tokens
assert set(seen) == {tokens}
pairs = sum(latency.causal_pairs(q, c - q) for q, c in zip(batch.query_lens, batch.context_lens, strict=True))
packed = tokens * sum(batch.context_lens)
print(f"{len(seen)} matrices in the layers, each called once, with all {tokens} tokens;")
print(f"logits for {len(batch.logits_indices)} of them only")
print(f"query-key pairs per head: {pairs} row by row; one matrix over everything would have")
print(f"{tokens} x {sum(batch.context_lens)} = {packed}")

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# ### What sharing a step gains
#
# First batching itself. A decode step reads the weights once. Every request in it adds its own keys and values and its
# arithmetic. So seconds per token should fall like `weights / batch + own part`. The formula for the large machine, and
# the course model here, both relative to a single request:

# %% name="amortize"
sizes = (1, 2, 4, 8, 16, 32) + ((64, 128) if on_gpu else ())
measured = []
for size in sizes:
    _, trace = run(
        engine_with(None, seats=size, blocks=size * 8), [text[9 * i : 9 * i + 16] for i in range(size)], [24] * size
    )
    whole = sorted(s.finished_at - s.started_at for s in trace.steps()[1:] if len(s.rows) == size)
    measured.append(whole[len(whole) // 2] / size)
formula = [h100.tpot(1000, size) / size for size in sizes]
widgets.table(
    [[size, f"{1e3 * f * size:.2f} ms", f"{1e3 * f:.3f} ms", f"{f / formula[0]:.3f}", f"{1e3 * m * size:.2f} ms",
      f"{m / measured[0]:.3f}"] for size, f, m in zip(sizes, formula, measured, strict=True)],
    ["batch", "H100 by formula: step", "per token", "relative", "course model, measured: step", "relative"],
)  # fmt: skip

# %% name="amortize-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 2.9)
ax = fig.subplots()
ax.plot(sizes, [1 / s for s in sizes], ":", color=INK, label="1 / batch: only the shared part")
ax.plot(sizes, np.array(formula) / formula[0], "--", color=BLUE, label="H100, context 1,000, formula")
ax.plot(
    sizes, np.array(measured) / measured[0], "o-", color=ORANGE, label=f"course model, {model.device.type}, measured"
)
ax.set_xscale("log", base=2)
ax.set_yscale("log", base=2)
ax.set_xticks(sizes, [str(s) for s in sizes])
ax.set_yticks([2.0**-i for i in range(0, 6)], ["1"] + [f"1/{2**i}" for i in range(1, 6)])
ax.minorticks_off()
tidy(ax, "requests that decode together", "time per token, relative")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Time per token over the batch, relative to a lone request. The formula for an H100 follows 1/batch closely and "
    f"leaves it slowly: {formula[-1] / formula[0]:.3f} at {sizes[-1]} requests. The course model, measured: "
    f"{measured[-1] / measured[0]:.3f}.",
)

# %% [markdown] name="amortize-reading"
# The dotted line would hold if everything were shared. The part that is not shared bends the curves up: on a GPU the
# keys and values of each request (more at a longer context), on a CPU also the arithmetic, because a core has far fewer
# operations per byte than a tensor core. Where the shared part is small there is little to gain.
#
# ### What filling the seats gains
#
# Now continuous against static in the real engine: 32 requests, 8 seats, course model, one burst. `play` predicts the
# *steps*. Time is a different matter, because a static batch also computes its finished rows, and a step of 8 rows
# costs more than one of 2.

# %% name="ratio"
rng = np.random.default_rng(5)
loads = {
    "all 12": [12] * 32,
    "6 to 18": rng.integers(6, 19, 32).tolist(),
    "exponential": [1 + int(x) for x in rng.exponential(11, 32)],
    "one in eight long": [47 if i % 8 == 0 else 7 for i in range(32)],
}
burst = [text[11 * i : 11 * i + 12] for i in range(32)]
table, shown = {}, []
for name, lens in loads.items():
    kinds = [("static", lambda kv: StaticBatching(kv, 8)), ("continuous", None)]
    seconds = {"static": [], "continuous": []}
    for _ in range(2):
        for kind, make in kinds:
            began = time.perf_counter()
            _, trace = run(engine_with(make, seats=8), burst, lens)
            seconds[kind].append(time.perf_counter() - began)
            assert len(trace.steps()) == play(lens, 8, kind)[0]
        kinds.reverse()  # the one that runs first in one round runs last in the next
    steps = [play(lens, 8, kind)[0] for kind in seconds]
    table[name] = (steps[0] / steps[1], min(seconds["static"]) / min(seconds["continuous"]))
    shown.append([name, f"{sum(lens) / 32:.1f}", *steps, *(f"{ratio:.2f}" for ratio in table[name])])
widgets.table(shown, ["outputs", "mean", "steps, static", "continuous", "ratio of steps", "ratio of times"])

# %% name="ratio-figure" jupyter={"source_hidden": true}
fig = figure(6.4, 2.7)
ax = fig.subplots()
x = np.arange(len(table))
ax.bar(x - 0.2, [a for a, _ in table.values()], 0.38, color=BLUE, label="theory: ratio of steps")
ax.bar(
    x + 0.2,
    [b for _, b in table.values()],
    0.38,
    color=ORANGE,
    hatch="//",
    edgecolor="white",
    label="measured: ratio of times",
)
ax.axhline(1, color=INK, linewidth=0.8)
ax.set_xticks(x, list(table))
tidy(ax, "lengths of the outputs", "static / continuous")
ax.legend(fontsize=8, frameon=False, loc="upper left")
show(
    fig,
    "Static over continuous batching for four sets of output lengths, ratio of steps by counting and ratio of measured "
    "times: " + "; ".join(f"{name} {a:.2f} and {b:.2f}" for name, (a, b) in table.items()) + ".",
)

# %% [markdown] name="ratio-reading"
# The cell asserts the steps; the times depend on the machine and on what else it does. On a CPU the two ratios can
# differ on an idle machine, too: the last steps of the continuous run have few rows and are cheap, while the static run
# pays for all its rows, finished or not. Where a step costs nearly the same for 2 and 8 rows, as on a GPU, they are
# close. **The ratio is a property of the lengths**, not of the method: without a load, a ratio means nothing.
#
# ### Requests that arrive
#
# A burst hides the second effect: waiting. The same engine on a *simulated* GPU (`reference_impl/bench/simulation.py`):
# real scheduler, real blocks, real trace; each step takes the time of the formula; the tokens are meaningless. 4
# requests arrive per second at random, 200 tokens in, 200 out on average (exponential), 16 seats, for 30 seconds.

# %% name="arrivals"
chat = poisson(4, 30, seed=1, prompts=(200,), mean_output=200)
small_seats = EngineConfig(max_num_seqs=16, max_num_batched_tokens=16_384)
waits = {}
ways = {
    "static": lambda kv: DynamicBatching(kv, 16, 1e6),  # waits for a full batch, however long
    "window 2 s": lambda kv: DynamicBatching(kv, 16, 2.0),
    "window 0.5 s": lambda kv: DynamicBatching(kv, 16, 0.5),
    "window 0": lambda kv: DynamicBatching(kv, 16, 0.0),
    "continuous": None,
}
shown = []
for name, make in ways.items():
    trace = simulate(h100, chat[: len(chat) // 16 * 16], small_seats, scheduler=make)
    w = waits[name] = trace.workload()
    queue = percentile([m.queue for m in w.requests], 95)
    times = [np.mean(w.ttft), percentile(w.ttft, 95), queue, np.mean(w.latency)]
    shown.append([name, *(f"{seconds:.2f} s" for seconds in times)])
widgets.table(
    shown, ["16 seats", "mean TTFT", "p95 TTFT", "p95 wait for the first step", "mean time to the last token"]
)

# %% [markdown] name="arrivals-reading"
# A window limits how long a request waits for *others to join*. It cannot help one that arrives just after the batch
# has started: it waits for the longest output in the batch. No window removes that wait; continuous batching does. (The
# last column counts a token when it is computed. A server that returns static batches whole is worse still.)

# %% [markdown] name="chunk-text"
# ### A long prompt arrives
#
# Now the crates. The picture counts in rides: one takes 1, or as long as its load takes the motor, which lifts 16 people
# and crates in that time.

# %% name="crates" jupyter={"source_hidden": true}
people, crates, power = 4, 80, 16
per_ride = power - people  # crates that ride without slowing the people down
ways_up = {
    "crates first,\nthen people": [(0, crates), (people, 0)],
    "all in\none ride": [(people, crates)],
    "people first,\nthen what fits": [
        (people, min(per_ride, crates - done)) for done in range(0, crates, per_ride)
    ],
}  # fmt: skip
fig = figure(7.6, 3.6)
ax = fig.subplots()
waits_of_people = {}
for row, (name, rides) in enumerate(ways_up.items()):
    at, last = 0.0, 0.0
    for inside, load in rides:
        length = max(1.0, (inside + load) / power)
        split = 0.26 if inside and load else 0.76 * bool(inside)  # people below, crates above
        if inside:
            ax.bar(at, split, length, row - 0.38, align="edge", color=SKY, edgecolor="white")
            ax.text(at + length / 2, row - 0.38 + split / 2, f"{inside} people", ha="center", va="center", fontsize=8)
            ax.plot(at + length, row + 0.43, marker="v", color=INK, markersize=5)
            waits_of_people[name] = max(waits_of_people.get(name, 0), at + length - last)
            last = at + length
        if load:
            ax.bar(
                at, 0.76 - split, length, row - 0.38 + split, align="edge", color=BLUE, hatch="//", edgecolor="white"
            )
            label = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            ax.text(
                at + length / 2, row + split / 2, f"{load} crates", ha="center", va="center", fontsize=8, bbox=label
            )
        at += length
waits_of_people = {name.replace("\n", " "): wait for name, wait in waits_of_people.items()}
ax.invert_yaxis()
ax.set_yticks(range(3), list(ways_up), fontsize=9)
ax.set_ylim(2.55, -0.5)
tidy(ax, "time, rides of people alone; a triangle: the people are one floor further")
show(
    fig,
    "Three ways to lift 80 crates and 4 people. Crates alone first: 5 rides' time, and then the people's ride; they wait "
    "6. All in one ride: 5.25, for both. People first and 12 crates with them: seven rides of 1, the people wait 1 each "
    "time, and the last crates arrive after 7.",
)

# %% [markdown] name="chunk-predict-text"
# Crates alone first or people and crates together: the people wait about as long. Only short rides help them, and the
# crates pay with a few rides more.
#
# In numbers: 32 requests decode, at a context of 1,000. A request with a prompt of 10,000 tokens arrives. The engine may
# compute it whole, or with a budget of 2,048 or 512 tokens per step; the budget includes the 32 decodes. (Llama-3-8B has
# a context of 8,192 tokens. For longer prompts, take its shapes as those of Llama 3.1, whose context is 131,072.) Each
# token takes 2 operations per weight, at half of the peak. **How many milliseconds is the longest gap of the 32, if the
# prompt is computed whole?**

# %% name="convoy-predict"
widgets.predict(
    "03a-gap", "A prompt of 10,000 tokens computed whole beside 32 decodes: the longest gap of the 32?", "ms"
)


# %% name="convoy"
def with_long_prompt(long, budget, decodes=32, make=None, outputs=400):
    """32 requests decode; later a prompt of `long` tokens arrives. -> (its prefill, gaps of the others meanwhile)."""
    load = [Arrival(0.0, 1000, outputs) for _ in range(decodes)] + [Arrival(2.0, long, 20, name="long")]
    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=budget)
    trace = simulate(h100, load, config, scheduler=make)
    reading = [s for s in trace.steps() if any(r.request_id == "long" and r.start < long for r in s.rows)]
    first, last = reading[0].started_at, reading[-1].finished_at
    gaps = [b - a for i in range(decodes) for a, b in pairwise(trace.token_times(str(i))) if b > first and a < last]
    return trace, trace.metrics("long").prefill, np.array(gaps), len(reading)


runs, shown = {}, []
for budget in (131_072, 8192, 2048, 512, 256):
    runs[budget] = with_long_prompt(10_000, budget)
    _, prefill, gaps, steps = runs[budget]
    name = "whole prompt" if budget > 10_032 else f"budget {budget}"
    shown.append([name, steps, f"{1e3 * prefill:.0f} ms", f"{1e3 * gaps.max():.0f} ms"])
beside = ["steps", "prefill of the long prompt", "longest gap of the others"]
display(widgets.table(shown, ["10,000 tokens beside 32 decodes", *beside]))
print(f"without it a decode step takes {1e3 * h100.tpot(1200, 32):.1f} ms")
widgets.reveal("03a-gap", 1e3 * runs[131_072][2].max())

# %% name="convoy-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.8)
axes = fig.subplots(3, 1, sharex=True)
for ax, budget in zip(axes, (131_072, 2048, 512), strict=True):
    trace = runs[budget][0]
    start = min(s.started_at for s in trace.steps() if any(r.request_id == "long" for r in s.rows))
    for s in trace.steps():
        chunk = sum(r.num_tokens for r in s.rows if r.request_id == "long" and r.start < 10_000)
        if s.finished_at > start - 0.05 and s.started_at < start + 0.5:
            ax.barh(
                0,
                s.finished_at - s.started_at,
                left=s.started_at - start,
                color=BLUE if chunk else SKY,
                hatch="//" if chunk else "",
                edgecolor="white",
                linewidth=0.5,
            )
            ax.plot(s.finished_at - start, 0.56, marker="v", color=INK, markersize=2.5)
    ax.set_yticks([0], ["whole" if budget > 10_032 else f"budget {budget}"], fontsize=8)
    ax.set_xlim(-0.05, 0.5)
    ax.set_ylim(-0.45, 0.75)
    ax.spines[["top", "right"]].set_visible(False)
axes[-1].set_xlabel(
    "seconds since the long prompt's first step; a triangle: all 32 get a token.\n"
    "hatched: steps with a piece of the prompt; plain: decodes only",
    fontsize=8,
)
show(
    fig,
    "Steps on a time line while a prompt of 10,000 tokens is read beside 32 decodes. Whole: one step of several hundred "
    "milliseconds in which nobody gets a token. Budget 2048: five steps of about 70 ms. Budget 512: some twenty short steps.",
)

# %% [markdown] name="convoy-reading"
# Count the triangles. In the first row 32 users look at a frozen screen, and they would look at it as long if the prompt
# had been computed in a step of its own. In the last one they hardly notice anything, and the long prompt's first token comes a little later: in each of its steps the 32 decodes take their share of the
# arithmetic. (Each chunk also rereads the weights and the keys and values before it. As long as a step is bound by
# arithmetic, that costs no time.) The extreme cases, a retrieval prompt of 30,000 tokens and one of 100,000:

# %% name="convoy-extreme"
shown = []
for long in (30_000, 100_000):
    for budget in (131_072, 2048):
        _, prefill, gaps, steps = with_long_prompt(long, budget, outputs=400)
        name = "whole" if budget > long + 32 else f"budget {budget}"
        shown.append([long, name, steps, f"{prefill:.2f} s", f"{gaps.max():.2f} s"])
widgets.table(shown, ["prompt", "computed", *beside])

# %% [markdown] name="convoy-extreme-reading"
# Look at the gaps with chunks, too. The last chunks of a very long prompt take longer than the first, because attention
# covers all earlier tokens. A fixed token budget does not bound time; it bounds tokens.

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# Seats over steps, static above, continuous below, drawn from traces. Choose other lengths; move the step. Find: a seat
# that is refilled; a row that computes for nothing (hatched); and the load for which both pictures are the same.

# %% name="explore-batching"
shown = {}
for name, lens in {
    "exponential": [1 + int(x) for x in np.random.default_rng(1).exponential(11, 16)],
    "all 12": [12] * 16,
}.items():
    pieces = [text[7 * i : 7 * i + 8] for i in range(16)]
    shown[name] = {
        kind: run(engine_with(make), pieces, lens)[1]
        for kind, make in (("static", makers["static"]), ("continuous", None))
    }
widgets.batching(shown)

# %% [markdown] name="explore-chunk-text"
# And the other parameter: tokens per step. The curve shows the cost of each setting: the long prompt's TTFT on the
# x-axis, the longest step on the y-axis. Try: 4 decodes instead of 32; a prompt of 131,072; the smallest budget, which
# is not far above the number of tokens that cost no extra time (shown in the picture); as many decodes as the budget
# has tokens; a 70B model on eight GPUs.

# %% name="explore-chunk"
widgets.chunk_size("llama-3-8b", prompt=8192, decodes=32, budget=512)

# %% [markdown] name="errata-reason"
# ## 7. What the cheat sheets get wrong
#
# **"One read of the weights for many tokens is the entire reason why continuous batching exists."** (E00.10) It is the
# reason for batching, and a static batch has it, too. Remove the differences that continuous batching exploits, one
# after the other:

# %% name="errata-reason-cell"
gains = []
for name, lens in outputs.items():
    static, continuous = play(lens, 8, "static")[0], play(lens, 8, "continuous")[0]
    gains.append([name, sum(lens), static, continuous, f"{sum(lens) / static:.1f}x", f"{static / continuous:.2f}x"])
widgets.table(
    gains, ["64 requests, 8 seats", "steps, one by one", "static", "continuous", "batching gains", "continuous on top"]
)

# %% [markdown] name="errata-halves-text"
# **"Mixing prefill into a decode batch halves the throughput of both."** (E03.1) A step takes the *longer* of the times
# for its arithmetic and its bytes, not the sum. Decode leaves the arithmetic idle, prefill leaves the bandwidth idle,
# so together they take less time than apart. That holds for the matrices, where one read serves the tokens of both.
# (Attention over the decodes' caches is separate work, and overlaps with them far less.) 70B on eight H100, 70e9
# parameters, matrices only, half of the peak, full bandwidth, no communication: 64 decodes alone take 5.2 ms, a prompt of
# 8,192 alone 290 ms. **How many milliseconds longer or shorter do the 64 wait for their next token if they share the
# prompt's step, instead of running after it?** (Shorter is negative.)
# <!-- tested: tests/claims/test_chapter_03.py::test_e03_01_a_mixed_step_is_shorter_than_its_parts_and_no_decode_waits_longer -->

# %% name="halves-predict"
widgets.predict(
    "03a-mixed", "64 decodes in the step of a prompt of 8,192: how much longer than after it do they wait?", "ms"
)


# %% name="errata-halves-cell"
def matrices(tokens, extra=0.0):  # 70e9 parameters over eight GPUs
    return float(latency.step_bound((2 * 70e9 * tokens + extra) / 8, 140e9 / 8, device("H100"), mfu=0.5))


decode, prefill, mixed = matrices(64), matrices(8192), matrices(8192 + 64)
attention = latency.attention_flops(latency.causal_pairs(8192), 80, 64, 128)
print(
    f"64 decodes {1e3 * decode:.1f} ms; a prompt of 8,192 {1e3 * prefill:.0f} ms ({1e3 * matrices(8192, attention):.0f} with attention)"
)
print(f"prompt, then decodes: the 64 wait {1e3 * (prefill + decode):.0f} ms; in one step {1e3 * mixed:.0f} ms")
print(f"either way {mixed / decode:.0f} times as long as without the prompt: the step is long, whoever shares it")
free = latency.flat_prefill_tokens(device("H100"), mfu=0.5)
assert matrices(int(free)) == decode < matrices(int(free) + 2)
print(f"up to {free:.0f} tokens in all, decodes included, a step takes no longer than reading the weights:")
print("so much prefill rides for free")
widgets.reveal("03a-mixed", 1e3 * (mixed - prefill - decode))

# %% [markdown] name="errata-alternate"
# So mixing harms neither throughput nor latency, compared with computing the prompt in a step of its own. What stalls the
# decodes is a *long step*, with or without them in it. The usual name is a generation stall (Sarathi-Serve); "bubble"
# usually means idle stages of a pipeline. What chunks buy is a shorter step. Mixing is what makes them cheap: the decodes
# take part in each chunk's read of the weights.
#
# **"Chunked prefill alternates: a chunk, a decode step, a chunk, a decode step."** (E03.2) Sarathi-Serve, vLLM's V1 and
# TensorRT-LLM compute decodes *and* a chunk in the same pass, decodes first. Alternation exists, too: SGLang's default
# is a prefill batch *or* a decode batch per step. Here are both, and the older way, in which whole prompts go first;
# each scheduler is a few lines.


# %% name="errata-alternate-schedulers"
class Alternating(Scheduler):
    """Steps compute chunks and decodes alternately."""

    chunks_now = False

    def schedule(self, now):
        plan = super().schedule(now)
        chunks = [row for row in plan.rows if row.num_tokens > 1]
        decodes = [row for row in plan.rows if row.num_tokens == 1]
        self.chunks_now = bool(chunks) and (not self.chunks_now or not decodes)
        return replace(plan, rows=tuple(chunks if self.chunks_now else decodes))


class PromptsFirst(OrcaBatching):
    """Whole prompts, one per step, before any decode."""

    def schedule(self, now):
        entered = self._let_in()
        prompts = [r for r in self.running if r.num_missing_tokens > 1]
        return self._plan([self.row_of(r) for r in prompts[:1] or self.running], entered)


# %% [markdown] name="errata-alternate-text"
# A prompt of 8,192 beside 32 decodes, four ways. Compare the last two rows first: whole prompts in the decodes' step, and
# in a step of their own.

# %% name="errata-alternate-cell"
designs = {
    "mixed, budget 512": (512, None),
    "alternating, chunks of 512": (512, lambda kv: Alternating(kv, 256, 512)),
    "whole prompts, mixed (Orca)": (16_384, lambda kv: OrcaBatching(kv, 256)),
    "whole prompts first": (16_384, lambda kv: PromptsFirst(kv, 256)),
}
found = {name: with_long_prompt(8192, budget, make=make) for name, (budget, make) in designs.items()}
display(
    widgets.table(
        [[name, f"{1e3 * prefill:.0f} ms", f"{1e3 * gaps.mean():.1f} ms", f"{1e3 * gaps.max():.1f} ms"]
         for name, (_, prefill, gaps, _) in found.items()],
        ["a prompt of 8,192 beside 32 decodes", "its prefill", "mean gap of the others", "longest gap"],
    )
)  # fmt: skip
plan = next(s for s in found["mixed, budget 512"][0].steps() if any(r.request_id == "long" for r in s.rows))
print(f"a recorded plan of the engine: {sum(r.num_tokens == 1 for r in plan.rows)} decodes and a chunk of {max(r.num_tokens for r in plan.rows)} "
      f"in one step; decodes first: {plan.rows[0].num_tokens == 1}")  # fmt: skip

# %% [markdown] name="errata-idle"
# Alternation wastes the overlap: each chunk step leaves out the decodes, each decode step leaves the arithmetic idle.
# The gap is a chunk step *and* a decode step, and the prompt takes longer. And with whole prompts the longest gap is
# slightly shorter where the decodes are in the step.
#
# **A diagram of continuous batching in which a freed seat stays empty for a step.** (E03.3) Such a scheduler would
# waste a step. `refill-check` above asserts that each seat is refilled in the next step; here is the same from the
# engine's trace:

# %% name="errata-idle-cell"
steps = traces["the engine's own"].steps()
print("rows per step:", [len(s.rows) for s in steps], " waiting after it:", [s.num_waiting for s in steps])
assert all(len(b.rows) == 4 or not b.num_waiting for a, b in pairwise(steps) if a.num_waiting)
print("as long as somebody waits, the next step has all four seats taken")

# %% [markdown] name="errata-padding"
# **"No padding, and the attention mask keeps sequences apart."** (E03.4) There is no such mask here. As `selective`
# counted, attention runs row by row, over each row's own keys. A mask over one packed matrix would compute the pairs of
# *different* requests and throw them away; chapter 02c has the small example. And some padding remains. A captured CUDA
# graph (chapter 05) runs exactly one batch size, so the rows are padded to the next captured one:

# %% name="errata-padding-cell"
lens = (3, 5, 2)
print(f"sequences of {lens}: row by row {sum(n * n for n in lens)} scores, one packed matrix {sum(lens) ** 2}")
captured = [1, 2, 4, *range(8, 257, 8)]  # an example; engines choose their own lists
shares = np.array([1 - n / min(c for c in captured if c >= n) for n in range(1, 257)])
print(f"graphs for 1, 2, 4, 8, 16 ... 256 rows: share of the rows that is padding, in the mean: "
      f"{shares[:8].mean():.0%} for\n1 to 8 requests, {shares[8:64].mean():.0%} for 9 to 64, {shares[64:].mean():.1%} above")  # fmt: skip

# %% [markdown] name="errata-ratios"
# **"Continuous batching is 3 to 10 times faster." "5 times." "20 times."** (E03.6) Faster than what, under which load,
# at which latency? Published numbers have different baselines: Orca reported up to 36.9x over FasterTransformer at
# equal latency on GPT-3 175B; vLLM's paper 2-4x over Orca and FasterTransformer; its first announcement up to 24x over
# plain Hugging Face. Below is one load with several baselines: 32 requests of the course model, prompts of 12,
# exponential outputs, one burst, no latency objective.
# <!-- source: abstracts of Orca (OSDI 2022) and PagedAttention (SOSP 2023); vLLM's announcement of June 2023 -->

# %% name="errata-ratios-cell"
lens = loads["exponential"]
began = time.perf_counter()
sample = [0, 1, 2, 3]  # slow without a cache: four requests, then scaled
for i in sample:
    generate_no_cache(model, burst[i], lens[i])
no_cache = (time.perf_counter() - began) * sum(lens) / sum(lens[i] for i in sample)
seconds = {"no cache, one by one (scaled from 4)": no_cache}
for name, make, seats in (
    ("cache, one by one", None, 1), ("static, 8 seats", lambda kv: StaticBatching(kv, 8), 8),
    ("continuous, 8 seats", None, 8), ("continuous, 32 seats", None, 32),
):  # fmt: skip
    began = time.perf_counter()
    run(engine_with(make, seats=seats), burst, lens)
    seconds[name] = time.perf_counter() - began
best = seconds["continuous, 8 seats"]
widgets.table(
    [[name, f"{sum(lens) / s:.0f}", f"{s / best:.2f}"] for name, s in seconds.items()],
    ["32 requests in one burst", "tokens/s", "continuous, 8 seats: how many times as fast"],
)

# %% [markdown] name="errata-paging"
# Each row was measured on this machine, and could appear on a slide.
#
# **"Paging makes continuous batching possible."** (E03.7) Orca did it in 2022 on contiguous reservations, and
# preemption by recomputation needs no pages. Here is the engine's own scheduler over contiguous memory. Paging changes
# how many requests *fit* (chapter 04):

# %% name="errata-paging-cell"
rooms = 24  # blocks of 16 tokens: 384 tokens of cache
asked = [SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, stop_token_ids=()) for _ in range(12)]
results, shown = {}, []
for name in ("contiguous", "paged"):
    kv = ContiguousKVManager(rooms, 16) if name == "contiguous" else None
    config = EngineConfig(num_blocks=rooms, max_num_seqs=32, prefix_cache="off")
    parts = Parts(kv_manager=kv, scheduler=Scheduler(kv, 32, 2048)) if kv else Parts()
    engine = Engine(model, config, parts)
    done = [engine.add(p, s) for p, s in zip(burst, asked, strict=False)]
    together = []
    while engine.has_work():
        engine.step()
        together.append(len(engine.trace.steps()[-1].rows))
    results[name] = [r.output_tokens for r in done]
    gone = sum(len(s.preempted) for s in engine.trace.steps())
    shown.append([name, len(together), max(together), f"{np.mean(together):.1f}", gone])
assert results["contiguous"] == results["paged"]
caption = "12 requests, prompts of 12, outputs of 64, 384 tokens of cache"
widgets.table(shown, ["memory", "steps", "most requests in one", "mean", "preemptions"], caption)

# %% [markdown] name="errata-price"
# **"Chunked prefill lowers latency."** (E03.8) Whose? It shortens the *worst* gap. It lengthens the long request's own
# TTFT, and it can *raise* the 99th percentile of all gaps, since many steps become as long as a chunk, instead of a few
# becoming very long. (*TPOT* here is one number per request, its mean gap; *ITL* is every single gap of all requests.
# Both names are used for either, so a target has to state the formula.) The load: 12 requests per second, 90 % of them with 200
# tokens, 10 % with 8,192; outputs exponential, mean 200; 24 seconds, two seeds, the same arrivals for each design.


# %% name="errata-price-cell"
def price(make, budget, seed):
    load = poisson(12, 24, seed, (200, 8192), (0.9, 0.1), 200)
    trace = simulate(h100, load, EngineConfig(max_num_seqs=256, max_num_batched_tokens=budget), scheduler=make)
    w = trace.workload()
    ids = [str(i) for i, a in enumerate(load) if a.prompt > 200]
    itl, ttft = np.array(w.itl), percentile(trace.workload(ids).ttft, 50)
    return [percentile(w.ttft, 95), ttft, percentile(w.tpot, 99), np.percentile(itl, 99), itl.max()]


kinds = {
    "whole prompts first": (lambda kv: PromptsFirst(kv, 256), 16_384),
    "chunks, budget 2048": (None, 2048),
    "chunks, budget 512": (None, 512),
}
sweep = {
    name: np.mean([price(make, budget, seed) for seed in (0, 1)], axis=0) for name, (make, budget) in kinds.items()
}
widgets.table(
    [[name, *(f"{1e3 * seconds:,.1f}" for seconds in row)] for name, row in sweep.items()],
    ["mean of two seeds, ms", "p95 TTFT", "median TTFT of long prompts", "p99 TPOT", "p99 ITL", "worst ITL"],
)

# %% [markdown] name="errata-price-reading"
# So it is a tunable trade-off: smooth streams against the first token of long prompts. vLLM's tuning guide gives the
# rule for `max_num_batched_tokens`: smaller for inter-token latency, larger for TTFT. Here the second half holds for a
# single long prompt (the table of 10,000 tokens above). Under this load the long prompts' first tokens come no later
# with a budget of 512 than with 2,048. 512 tokens already keep the arithmetic busy. And a prompt's last chunk shares
# its step with later prompts: its first token is returned when the whole step has ended, which takes longer with 2,048.
# What a larger budget saves on a real machine, the fixed cost of each step, is not in these formulas.
#
# Two seeds show the order, not exact values. `tests/claims` asserts chunks against whole prompts over nine seeds of a
# simpler model, one prompt at a time.
#
# Continuous batching alone does not end head-of-line blocking either; the next notebook analyses that (E03.9).

# %% [markdown] name="worked-problem"
# ### Worked problem: a long prompt beside 32 streams
#
# The course's deployment: Llama-3-70B in 16 bits on four H100 with tensor parallelism. Here half of the peak (1,979
# TFLOP/s of all four) and 80 % of the bandwidth (10.72 TB/s) are reached; communication is left out. A step reads
# 139.0 GB of weights. The layers have 68.45 · 10⁹ weights, attention takes 4 · 64 · 128 · 80 FLOP per query-key pair.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03a_a_long_prompt_beside_32_streams_and_the_chunk_that_keeps_50_ms -->
#
# *32 requests decode at a context of 4,096. What is their TPOT? A prompt of 20,000 tokens arrives: how long is their gap
# if it is computed whole, before their step or in it? Which budget keeps each step below 50 ms to the end? What does that
# cost the prompt?*
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03a_a_long_prompt_beside_32_streams_and_the_chunk_that_keeps_50_ms -->
#
# <details><summary>Answer</summary>
#
# Bytes: 139.0 + 42.9 GB of cache = 182.0 GB, **17.0 ms**. The arithmetic of 32 tokens takes 2.2 ms, so bytes decide.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03a_a_long_prompt_beside_32_streams_and_the_chunk_that_keeps_50_ms -->
#
# The prompt: 2.74 PFLOP in the matrices, 0.52 in attention, together 3.26 PFLOP, 1,649 ms. With the 32 decodes in the
# step **1,651 ms**; prompt first and then their own step, **1,666 ms**. Mixing is not what hurts.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03a_a_long_prompt_beside_32_streams_and_the_chunk_that_keeps_50_ms -->
#
# 50 ms are 98.9 TFLOP, by the matrices alone 723 tokens, 691 of them for the prompt. That holds for the first chunk. The
# last one also attends to 20,000 keys: with 691 tokens its step takes 68 ms. Solved for the last chunk: 501. A **budget
# of 512** leaves 480 and keeps the last step at 48 ms.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03a_a_long_prompt_beside_32_streams_and_the_chunk_that_keeps_50_ms -->
#
# 42 steps, because the decodes take 32 tokens of each: 1.74 s until the first token, **5.5 % later** than in one step,
# and a longest gap of 48 ms instead of 1,651. Every chunk but the last takes longer than the 17.0 ms that its bytes
# take, so reading the weights 42 times costs nothing.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03a_a_long_prompt_beside_32_streams_and_the_chunk_that_keeps_50_ms -->
#
# </details>

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Names of options and their defaults change; look them up in the version you run.
#
# **vLLM** (V1, the default engine since 2025) schedules as this engine does: one step mixes decodes and chunks of
# prompts under `max_num_batched_tokens`; chunked prefill is on by default where the model allows it. Its documentation
# recommends smaller values (2,048) for inter-token latency and larger ones (above 8,192) for throughput with small
# models on large GPUs.
#
# **SGLang** runs a prefill batch or a decode batch per step, and cuts long prompts by `--chunked-prefill-size`.
# `--enable-mixed-chunk` puts both into one step; it is off by default. Overlap of host work with the GPU is on by
# default.
#
# **TensorRT-LLM** calls it in-flight batching. With chunked context enabled, a chunk and the generation steps of others
# share a pass. The admission policy is configurable (see `b_scheduling`).
#
# **Triton Inference Server** has a *dynamic batcher* with `max_queue_delay_microseconds`: the time window of this
# chapter. It is the right tool for models that answer in one pass, such as encoders and rankers, where all outputs take
# equally long.
#
# **Hugging Face transformers** `generate` takes a padded rectangle, a static batch. Since 2025 it also has continuous
# batching (`generate_batch`) for evaluation and training loops.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Then build static and continuous batching, the budget and the chunks yourself:
# [lab 03](../../labs/03_batching/scheduler.ipynb), sections 1 to 3.

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("03_batching").draw(seed=1, tag="batching"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Batching pays off because the weights are read once per step. That is true of static batching, too.
# - Continuous batching pays off because outputs differ in length and requests arrive at any time. Equal lengths, one
#   arrival: no gain.
# - Useful share of a static batch = all tokens / (rows · longest). Padding = 1 − mean / longest.
# - A window (dynamic batching) bounds the wait for other requests, not the wait for a running batch.
# - A freed seat is refilled in the next step.
# - Ragged batch: a flat list of tokens for the matrices, `query_start_loc` for the boundaries, attention per sequence.
# - A step takes max(arithmetic, bytes). A prompt and decodes in one step take less than apart, and the decodes wait no
#   longer than if the prompt went first. A long step is what stalls them; chunks make it short.
# - Up to about `ridge · MFU / MBU` tokens (16-bit weights, decodes included) cost no more time than one read of the
#   weights.
# - Chunked prefill: decodes first, then prompt chunks, in one step, under a token budget. Smaller: short gaps. Larger:
#   a long prompt shares fewer steps with the decodes, so its first token comes a little sooner if no other prompt is
#   ahead. Chunks shorten the worst gap; the 99th percentile may rise.
# - A speedup needs a stated baseline, load and latency objective.
