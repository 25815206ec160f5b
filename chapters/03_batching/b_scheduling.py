# %% [markdown] name="title"
# # 03b · Scheduling: which requests go first, and which wait
#
# About 45 minutes, without the parts whose headings say *(more)*, which take about 15. You need `a_batching`. The lab is [Build a
# scheduler](../../labs/03_batching/scheduler.ipynb).

# %% name="setup"
import heapq
import inspect
import math
import tempfile
import time
from collections import Counter, namedtuple
from pathlib import Path

import numpy as np
import torch
from IPython.display import display
from matplotlib.patches import FancyBboxPatch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, figure, show, tidy
from chapters.widgets.under_load import formula
from reference_impl import LLM, Engine, EngineConfig, Parts, SamplingParams, course_model
from reference_impl.assembly.batch import batch_of
from reference_impl.features.baselines.orca_batching import OrcaBatching
from reference_impl.features.baselines.static_batching import StaticBatching
from reference_impl.bench import under_load
from reference_impl.bench.host_work import scheduler_seconds
from reference_impl.bench.simulation import Arrival, poisson, simulate
from reference_impl.core.detokenizer import TextStream
from reference_impl.observe.metrics import percentile
from reference_impl.observe.perfetto import write_perfetto
from reference_impl.core.planner import output_of
from reference_impl.features.policies import ByPriority, EarliestDeadline, FairShare, ShortestFirst
from reference_impl.core.ranking import FirstCome
from reference_impl.core.scheduler import Scheduler
from reference_impl.theory import latency
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.links import link
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.units import format_bytes, format_seconds

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
# The prefix cache is off, so that a prompt asked twice is computed twice; chapter 06 turns it on.
llm = LLM(course_model("target"), dtype="float32", kv_cache_bytes=8 * 2**20, prefix_cache="off")
model = llm.engine.model
on_gpu = model.device.type == "cuda"
text = llm.encode(inspect.getsource(Engine)) * 2

llama = shape_of("llama-3-8b")
h100 = Deployment(llama, device("H100"), mfu=0.5, mbu=0.8)
print(
    f"Large machine, by formula: Llama-3-8B in bf16 on one H100 (SXM, dense peak), MFU {h100.mfu:.0%}, MBU {h100.mbu:.0%};"
)
print(f"its cache holds {h100.cache_tokens():,} tokens at 0.9 of the memory; tables below say where they give it fewer")

# %% [markdown] name="question"
# ## 1. A question with a number
#
# 120 requests are waiting at the same moment. Outputs have 200 tokens on average: many are short, a few are very long
# (exponential). 16 may run together. An oracle tells you each output's length before it starts.
#
# You can serve them in order of arrival, or the shortest first. The work is the same. **By what factor is the mean time
# to the first token shorter, if you take the shortest first?**

# %% name="predict"
widgets.predict(
    "03b-order", "By what factor does shortest-first shorten the mean TTFT of 120 waiting requests?", "times"
)

# %% [markdown] name="idea"
# ## 2. The idea
#
# Back to the lift, and now look at its **attendant**. Before each ride of one floor the attendant makes four decisions,
# without knowing how far any passenger goes.
#
# - **Whose turn is it?** The queue may be served in order of arrival, by ticket, or with the short trips first
#   (*policy*).
# - **Who may enter?** A passenger's luggage grows with every floor: that is the KV cache. Fill the cabin now and hope
#   that some get out in time, or admit only those who fit with the most luggage they can ever have (*admission*).
# - **Who must get out again?** If the luggage outgrows the cabin, somebody gets out half-way and resumes later, at the
#   price of rebuilding the luggage (*preemption by recomputation*) or of storing it in the basement and fetching it
#   again (*swapping*).
# - **How many crates per ride?** (*the token budget*, see `a_batching`.)
#
# And the attendant also takes time. If the lift stands still while the attendant thinks, everybody pays for it (*host
# work*).

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.7)
ax = fig.subplots()
boxes = {
    "waiting": (0.0, "policy:\nwhose turn?"),
    "running": (4.2, "budget:\nhow many tokens?"),
    "finished": (8.4, "its blocks\ncome back"),
}
for name, (x, words) in boxes.items():
    ax.add_patch(FancyBboxPatch((x, 0), 2.2, 1, boxstyle="round,pad=0.08", facecolor="white", edgecolor=INK))
    ax.text(x + 1.1, 0.78, name, ha="center", va="center", fontsize=11)
    ax.text(x + 1.1, 0.32, words, ha="center", va="center", fontsize=8)
for start, end, y, words, colour in (
    (2.35, 4.05, 0.75, "admission:\na seat and blocks?", GREEN),
    (6.55, 8.25, 0.5, "last token", BLUE),
    (4.05, 2.35, 0.2, "preemption:\nblocks ran out", RED),
):
    ax.annotate("", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.8})
    ax.text((start + end) / 2, y + (0.42 if y > 0.3 else -0.55), words, ha="center", va="center", fontsize=8)
ax.annotate("", (-0.15, 0.5), (-1.1, 0.5), arrowprops={"arrowstyle": "-|>", "color": INK})
ax.text(-1.1, 0.6, "arrives", fontsize=8)
ax.set_xlim(-1.2, 10.9)
ax.set_ylim(-0.9, 1.7)
ax.axis("off")
show(
    fig,
    "States of a request: waiting, running, finished. Admission leads from waiting to running and asks for a seat and "
    "blocks; preemption leads back when blocks run out. The policy orders the queue, the budget limits each step.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# First the question. All requests wait from the start, a step gives every running request a token, and the next request
# takes the seat that is free first. That is all that the mean needs.


# %% name="scratch-order"
def mean_ttft(lengths, seats):
    """Mean number of steps to the first token, if the requests start in this order; a prompt takes one step."""
    free_at, starts = [0] * seats, []
    for n in lengths:
        starts.append(heapq.heappop(free_at))
        heapq.heappush(free_at, starts[-1] + n)
    return 1 + np.mean(starts)


rng = np.random.default_rng(2)
lengths = np.maximum(1, rng.exponential(200, 120).astype(int))
by_arrival, by_length = mean_ttft(lengths, 16), mean_ttft(sorted(lengths), 16)
print(f"mean TTFT in steps: {by_arrival:.0f} in order of arrival, {by_length:.0f} with the shortest first")
widgets.reveal("03b-order", by_arrival / by_length)

# %% [markdown] name="scratch-toy-text"
# Now a scheduler, in four cells. Each does one thing more, because the one before fails on a trace that you predict
# first. A scheduler touches no tensors. It needs only integers: how many tokens of a request are known, how many are
# computed, how many blocks it holds. (The cache is allocated in *blocks* of, say, 16 tokens; chapter 04 says why.)
#
# The trace is always the same: r0 (a prompt of 20 tokens, 14 outputs) and r1 (14 and 10) arrive at step 1, r2 (30 and 6)
# at step 4. There are three seats. The folded cell is the world around the scheduler: it lets requests arrive, and gives
# a token to each whose known tokens are all computed.

# %% name="toy-world" jupyter={"source_hidden": true}
Arriving = namedtuple("Arriving", "step prompt outputs")
Planned = namedtuple("Planned", "tokens preempted blocks")  # of a step; blocks that its tokens fill
TRACE = (Arriving(1, 20, 14), Arriving(1, 14, 10), Arriving(4, 30, 6))


def serve(toy):
    """The steps of the trace under this scheduler, to the end or to the first in which nothing is computed."""
    requests = [
        {"id": f"r{i}", "arrival": i, "known": a.prompt, "computed": 0, "blocks": 0} for i, a in enumerate(TRACE)
    ]
    steps = []
    while not steps or toy.running or toy.waiting:
        toy.waiting += [r for r, a in zip(requests, TRACE, strict=True) if a.step == len(steps) + 1]
        plan = dict(toy.schedule())
        for r in toy.running:
            r["computed"] += plan.get(r["id"], 0)
        filled = sum(math.ceil(r["computed"] / 16) for r in toy.running)
        steps.append(Planned(plan, list(toy.preempted), filled))
        for r, a in zip(requests, TRACE, strict=True):
            if r in toy.running and r["computed"] == r["known"]:
                r["known"] += 1  # the model gives it a token
                if r["known"] - a.prompt == a.outputs:
                    toy.running.remove(r)
                    toy.free += r["blocks"]
        if not plan:
            break
    return steps


def told(steps):
    """The steps in which more happens than decoding, and the last one."""
    lines = []
    for i, step in enumerate(steps, start=1):
        if step.preempted or not step.tokens or max(step.tokens.values()) > 1 or i == len(steps):
            gone = f", preempted {', '.join(step.preempted)}" if step.preempted else ""
            lines.append(f"step {i}: {step.tokens or 'nothing'}{gone}")
    return "\n".join(lines)


# %% [markdown] name="scratch-seats-text"
# **One: seats.** A free seat goes to the request that ranks first, and each computes all the tokens it lacks. **Of the
# steps in which a request decodes, how many tokens does the largest compute?**

# %% name="toy-predict-seats"
widgets.predict("03b-seats", "Only seats: tokens in the largest step in which a request decodes?", "tokens")


# %% name="scratch"
class Toy:
    def __init__(self, seats, budget=math.inf, blocks=math.inf, rank=lambda r: r["arrival"]):
        self.seats, self.budget, self.free, self.rank = seats, budget, blocks, rank
        self.waiting, self.running, self.preempted = [], [], []

    def may_enter(self, r):
        return len(self.running) < self.seats

    def grant(self, r):  # how many tokens it computes in this step: all it lacks
        return r["known"] - r["computed"]

    def give(self, r):
        if tokens := self.grant(r):
            self.plan[r["id"]], self.left = tokens, self.left - tokens

    def schedule(self):  # -> tokens by request, before every step
        self.plan, self.left, self.preempted = {}, self.budget, []
        for r in sorted(self.running, key=lambda r: (r["known"] - r["computed"] > 1, self.rank(r))):  # decodes first
            self.give(r)
        self.waiting.sort(key=self.rank)
        while self.waiting and self.left and self.may_enter(self.waiting[0]):  # no overtaking
            self.running.append(self.waiting.pop(0))
            self.give(self.running[-1])
        return self.plan


# %% name="scratch-seats"
steps = serve(Toy(seats=3))
print(told(steps))
widgets.reveal("03b-seats", max(sum(s.tokens.values()) for s in steps if 1 in s.tokens.values()))

# %% [markdown] name="scratch-budget-text"
# It fails at step 4: r0 and r1 wait for their next token until the 30 of another request's prompt are computed.
#
# **Two: a budget.** No step computes more than 24 tokens; a prompt gets what the decodes leave, as a chunk. One line. But
# the machine's cache has 5 blocks of 16 tokens. **How many do the three fill at most, at the same time?**

# %% name="toy-predict-budget"
widgets.predict("03b-blocks", "A budget of 24: how many blocks of 16 tokens do the three fill at most?", "blocks")


# %% name="scratch-budget"
class ToyWithBudget(Toy):
    def grant(self, r):
        return min(super().grant(r), self.left)


steps = serve(ToyWithBudget(seats=3, budget=24))
print(told(steps))
print("tokens in the largest step:", max(sum(s.tokens.values()) for s in steps))
widgets.reveal("03b-blocks", max(s.blocks for s in steps))

# %% [markdown] name="scratch-blocks-text"
# It fails in memory: it fills two blocks more than there are.
#
# **Three: blocks.** A request is admitted if the free blocks hold all its known tokens, and takes them. One that runs
# takes another when its tokens outgrow what it holds. If none is free it computes nothing in this step. **There is a step
# in which no request computes anything. Which?**

# %% name="toy-predict-blocks"
widgets.predict(
    "03b-stuck", "5 blocks, and a request without a block waits: the step in which nothing is computed?", "step"
)


# %% name="scratch-blocks"
class ToyWithBlocks(ToyWithBudget):
    def lacking(self, r):  # blocks for its known tokens beyond those it holds
        return math.ceil(r["known"] / 16) - r["blocks"]

    def may_enter(self, r):
        return super().may_enter(r) and self.lacking(r) <= self.free

    def grant(self, r):
        if (blocks := self.lacking(r)) > self.free:
            return 0
        self.free, r["blocks"] = self.free - blocks, r["blocks"] + blocks
        return super().grant(r)


steps = serve(ToyWithBlocks(seats=3, budget=24, blocks=5))
print(told(steps))
widgets.reveal("03b-stuck", next((i for i, s in enumerate(steps, start=1) if not s.tokens), 0))

# %% [markdown] name="scratch-preempt-text"
# It fails for good: all three hold blocks, each lacks one more, and none is free.
#
# **Four: preemption.** The request that ranks last gives its blocks back. It keeps its tokens and loses its keys and
# values, so it waits, and computes them once more. No request is admitted in a step that preempts. **How many tokens are
# computed a second time?**

# %% name="toy-predict-preempt"
widgets.predict("03b-again", "With preemption: how many of the trace's tokens are computed a second time?", "tokens")


# %% name="scratch-preempt"
class ToyWithPreemption(ToyWithBlocks):
    def may_enter(self, r):
        return not self.preempted and super().may_enter(r)

    def grant(self, r):
        while r in self.running and self.lacking(r) > self.free:
            last = max((v for v in self.running if v["id"] not in self.plan), key=self.rank)
            self.free += last["blocks"]
            last.update(blocks=0, computed=0)
            self.running.remove(last)
            self.waiting.append(last)
            self.preempted.append(last["id"])
        return super().grant(r) if r in self.running else 0


toy = ToyWithPreemption(seats=3, budget=24, blocks=5)
steps = serve(toy)
print(told(steps))
assert toy.free == 5
once = sum(a.prompt + a.outputs - 1 for a in TRACE)
widgets.reveal("03b-again", sum(sum(s.tokens.values()) for s in steps) - once)

# %% [markdown] name="scratch-reading"
# All are served, and the blocks come back. What is left is waste: r2 entered, was preempted a step later, and its prompt
# was read twice. Section 6 treats that as a choice, *admission*; and `rank` is where a *policy* goes.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# Three short methods of the engine's scheduler: how a running request gets its tokens, how a request is admitted, and
# what a preempted request keeps. It keeps its tokens and its rank, so no output is lost, and it resumes early.
# (`preempt` returns whether blocks are free now. An engine that plans a step while the previous one still runs may
# have to wait for them; that is a feature, `reference_impl/features/overlap`, and so is swapping: the scheduler asks
# their hooks `may_preempt` and `gives_up`.)

# %% name="engine-source"
for method in (Scheduler.continue_running, Scheduler._admit, Scheduler.preempt):
    print(inspect.getsource(method))

# %% [markdown] name="engine-toy-text"
# Is it the same thing? The trace of section 3 in the real engine, with the course model: three seats, a budget of 24
# tokens, 5 blocks. Every step must have the same rows, the same tokens and the same victim as the toy's.

# %% name="engine-toy"
engine = Engine(model, EngineConfig(num_blocks=5, max_num_seqs=3, max_num_batched_tokens=24, prefix_cache="off"))
for step in range(1, len(steps) + 1):
    for i, a in enumerate(TRACE):
        if a.step == step:
            asked = SamplingParams(max_tokens=a.outputs, temperature=0, ignore_eos=True)
            engine.add(text[50 * i : 50 * i + a.prompt], asked, f"r{i}")
    engine.step()
real = [({r.request_id: r.num_tokens for r in s.rows}, list(s.preempted)) for s in engine.trace.steps()]
assert real == [(s.tokens, s.preempted) for s in steps]
assert not engine.has_work()
print(f"{len(real)} steps, each as the toy planned it")

# %% [markdown] name="engine-run-text"
# Now a larger run: 12 blocks of 16 tokens, 4 seats, a budget of 32 tokens. Request r5 arrives last and is urgent
# (`priority=-1`, smaller is more urgent). The policy is preemptive. Which requests pay? And do the outputs change? (They
# are equal here, in float32. Other neighbours and chunks mean another order of additions: logits agree up to rounding,
# and bit by bit only with `batch_invariant=True`.)
#
# **How many steps does r5 wait in order of arrival?** With its priority it starts in the next one.

# %% name="engine-predict"
widgets.predict("03b-urgent", "First come, 12 blocks, 4 seats: how many steps does r5 wait for its first?", "steps")


# %% name="engine-tight"
def tight(policy=None, blocks=12, seats=4, budget=32, admission="fill", preemption="recompute"):
    config = EngineConfig(num_blocks=blocks, max_num_seqs=seats, max_num_batched_tokens=budget, admission=admission,
                          preemption=preemption, prefix_cache="off")  # fmt: skip
    engine = Engine(model, config, Parts(policy=policy))
    done = []
    for i, (p, n) in enumerate(((30, 24), (12, 40), (50, 16), (20, 30), (16, 12))):
        done.append(
            engine.add(text[50 * i : 50 * i + p], SamplingParams(max_tokens=n, temperature=0, ignore_eos=True), f"r{i}")
        )
    for _ in range(6):
        engine.step()
    done.append(
        engine.add(text[400:424], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), "r5", priority=-1)
    )
    while engine.has_work():
        engine.step()
    return engine.trace, [r.output_tokens for r in done]


# %% name="engine-run"
first_come, texts = tight()
urgent, same = tight(ByPriority())
assert texts == same
waited = {}
for name, trace in (("first come", first_come), ("by priority", urgent)):
    arrived = sum(s.started_at < trace.arrival("r5") for s in trace.steps())
    started = next(i for i, s in enumerate(trace.steps()) if any(r.request_id == "r5" for r in s.rows))
    gone = Counter(i for s in trace.steps() for i in s.preempted)
    last = {r.request_id: i for i, s in enumerate(trace.steps(), start=1) for r in s.rows}
    waited[name] = started - arrived
    print(
        f"{name}: r5 waits {waited[name]} steps; {len(trace.steps())} steps in all; preempted: {dict(gone) or 'nobody'}"
    )
    print(f"   last token in step {dict(sorted(last.items()))}")
print("the texts are the same: scheduling changes when, not what")
widgets.reveal("03b-urgent", waited["first come"])

# %% [markdown] name="policies-text"
# The policies are short because each gives a request its rank **once**, when it arrives. Even aging needs no more: if
# each second of waiting counts the same for every request, the order of `cost − aging · waited` never changes, because
# it is the order of `cost + aging · arrival`.

# %% name="policies-source"
for policy in (FirstCome, ShortestFirst, ByPriority):
    print(f"{policy.__name__:14s}", inspect.getsource(policy.rank).split("return")[-1].strip())
print("EarliestDeadline", " ".join(inspect.getsource(EarliestDeadline.rank).split("return")[-1].split()))
print("\n" + inspect.getdoc(FairShare).split("\n\n")[0])

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# ### Batch size against latency
#
# The oldest trade-off in serving. 128 requests are waiting, prompts of 500, outputs of 100; the seats (`max_num_seqs`)
# go from 1 to 128. The engine runs on a *simulated* H100: real scheduler and trace, step times by formula. Beside it
# the formula of a pure decode step, `tpot(context, batch)`.

# %% name="seats"
burst = [Arrival(0.0, 500, 100) for _ in range(128)]
seats = (1, 4, 16, 32, 64, 128)
swept = {n: simulate(h100, burst, EngineConfig(max_num_seqs=n, max_num_batched_tokens=2048)).workload() for n in seats}
by_seats = []
for n, w in swept.items():
    tpot = percentile(w.tpot, 50)
    both = [f"{1e3 * tpot:.2f} ms", f"{1e3 * h100.tpot(550, n):.2f} ms"]
    by_seats.append([n, f"{np.mean(w.ttft):.2f} s", *both, f"{w.throughput:,.0f}", f"{1 / tpot:.0f}"])
widgets.table(by_seats, ["seats", "mean TTFT", "median TPOT", "by formula", "tokens/s together", "tokens/s per stream"])

# %% name="seats-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.9)
left, right = fig.subplots(1, 2)
left.plot(seats, [1e3 * h100.tpot(550, n) for n in seats], "--", color=INK, label="formula: decode step")
left.plot(
    seats, [1e3 * percentile(w.tpot, 50) for w in swept.values()], "o-", color=ORANGE, label="engine: median TPOT"
)
left.set_ylim(0)
tidy(left, "seats", "ms", "what a stream pays")
left.legend(fontsize=8, frameon=False)
right.plot(seats, [w.throughput for w in swept.values()], "o-", color=BLUE, label="tokens/s")
other = right.twinx()
other.plot(seats, [np.mean(w.ttft) for w in swept.values()], "^--", color=RED)
other.set_ylabel("mean TTFT, s (red)")
other.spines[["top"]].set_visible(False)
tidy(right, "seats", "tokens/s (blue)", "what everybody gains")
right.set_ylim(0)
other.set_ylim(0)
show(
    fig,
    "Left: TPOT over the number of seats, engine against the formula of a decode step; from 16 seats on the engine lies "
    "above, because prompts are read in the same steps. Right: throughput rises and mean TTFT falls with the number of seats.",
)

# %% [markdown] name="seats-reading"
# From 16 seats on the engine's TPOT is above the formula, because the formula counts decodes only, and here new prompts
# are prefilled in the same steps. With one seat there are no such prefills; with four they are too few to move the
# median.
#
# So *why does a larger batch raise throughput and hurt latency?* Throughput rises because one read of the weights
# yields more tokens. A stream slows down because each step also reads all requests' keys and values and computes all
# requests' tokens. But look at the red curve before you repeat the slogan: as long as requests *wait*, more seats make
# the time to first token shorter, not longer. What grows with the seats is TPOT.
#
# ### The attendant's time
#
# Between two passes of the model the host works: it schedules, prepares the batch, launches the kernels, samples,
# records the tokens, detokenizes them. Measured on this machine, for a step in which all requests decode. (The course
# model is tiny, so its pass is short; look at the host's times, not at its share.) The folded cell puts a clock between
# the parts of a step.


# %% name="host-parts" jupyter={"source_hidden": true}
def parts_of_a_step(n, steps=8):
    config = EngineConfig(num_blocks=n * 8, max_num_seqs=n, prefix_cache="off")
    engine = Engine(model, config)
    for i in range(n):
        engine.add(text[5 * i : 5 * i + 16], SamplingParams(max_tokens=64, temperature=0, ignore_eos=True), f"r{i}")
    streams = {f"r{i}": TextStream(llm.tokenizer, text[5 * i : 5 * i + 16]) for i in range(n)}
    engine.step()
    found = []
    for _ in range(steps):
        t = [time.perf_counter()]
        plan = engine.scheduler.schedule(0.0)
        t.append(time.perf_counter())
        step = engine.planner.step(plan, engine.requests)
        t.append(time.perf_counter())
        batch_of(step.rows, engine.executor.slots)  # `submit` also does this: repeated to time it alone
        t.append(time.perf_counter())
        output = output_of(engine.executor.collect(engine.executor.submit(step)), plan.rows)
        t.append(time.perf_counter())
        engine.scheduler.update(plan, output)
        t.append(time.perf_counter())
        for request_id, new in output.tokens.items():
            for token in new:
                streams[request_id].push(token)
        t.append(time.perf_counter())
        found.append(np.diff(t))
    schedule, planner, batch, run, update, detokenize = np.median(found, axis=0) * 1e3
    return {
        "schedule": schedule,
        "prepare": planner + batch,
        "model, sampling": run - batch,
        "update": update,
        "text": detokenize,
    }


# %% [markdown] name="host-predict-text"
# **How many microseconds of host work does each further request add to a step, in this engine written in Python?**

# %% name="host-predict"
widgets.predict("03b-host", "Host work per request and decode step, on this machine, in Python?", "microseconds")

# %% name="host"
rows = (1, 8, 32, 96)
spent = {n: parts_of_a_step(n, steps=4) for n in rows}
widgets.table(
    [[n, *(f"{value:.3f}" for value in parts.values())] for n, parts in spent.items()],
    ["rows", *spent[1]],
    caption="Milliseconds of a step",
)

# %% [markdown] name="host-scale-text"
# The host's time grows with every request. A GPU's step grows as well, by the keys and values of each request, but it
# begins at one read of the weights; so the host's *share* should be larger with more requests. Theory:
# `fixed + per request · n`, from the first and the last row, beside the decode step of the large machine. (Kernel
# launches are not included: on a CPU there are none.)

# %% name="host-scale"
host = {n: sum(value for name, value in parts.items() if name != "model, sampling") for n, parts in spent.items()}
slope = (host[rows[-1]] - host[rows[0]]) / (rows[-1] - rows[0])
fixed = host[rows[0]] - slope * rows[0]
print(f"host: {1e3 * fixed:.0f} microseconds + {1e3 * slope:.1f} per request (measured here, in Python)")
scaled = []
for n in (8, 32, 128, 256):
    ms, step = fixed + slope * n, 1e3 * h100.tpot(1000, n)
    times = [f"{t:.2f} ms" for t in (ms, step, step + ms, max(step, ms))]
    scaled.append([n, *times[:3], f"{ms / (step + ms):.0%}", times[3]])
headers = ["host by that line", "H100 decode step, 8B", "TPOT in turn", "host's share", "TPOT overlapped"]
display(widgets.table(scaled, ["requests", *headers]))
scheduling = 1e6 * np.median(scheduler_seconds(256)) / 256
print(f"scheduling and block operations alone: {scheduling:.1f} microseconds per request and step, 256 requests")
widgets.reveal("03b-host", 1e3 * slope)

# %% name="host-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 2.7)
ax = fig.subplots()
fine = np.arange(1, 129)
ax.plot(fine, fixed + slope * fine, "--", color=INK, label="a line through its ends: fixed + per request")
ax.plot(rows, list(host.values()), "o", color=ORANGE, label="measured: host's part of a step")
ax.plot(
    fine, [1e3 * h100.tpot(1000, n) for n in fine], color=BLUE, label="decode step of an 8B model on an H100, formula"
)
tidy(ax, "requests that decode together", "ms")
ax.set_ylim(0)
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Host time of a step over the number of requests, measured, with a straight line through its ends, beside the decode "
    "step of an 8B model on an H100 by formula. The host's part: "
    + ", ".join(f"{ms:.2f} ms for {n}" for n, ms in host.items())
    + ".",
)

# %% [markdown] name="host-reading"
# There are two remedies. **Make it small:** fewer objects, arrays instead of lists, C++ or Rust for the hot loop, CUDA
# graphs for the launches (one launch instead of hundreds; chapter 05). **Hide it:** plan step `t + 1` on the host while
# the GPU still computes step `t`. The problem is that the tokens of step `t` are not known yet. A plan does not need
# them: it needs only *how many* there will be, one per decoding request. So the plan holds a placeholder, and the GPU
# reads the token from where step `t` wrote it. The price: a request that ended with a stop token in step `t` has been
# scheduled once more, for nothing: one wasted row. `TPOT overlapped` above is the best this can reach. Work that
# depends on the tokens (grammar masks of guided decoding, stop strings) cannot be hidden so easily.
#
# "TPOT got worse after a change, what do you check?" Context and number of running requests (more bytes per step);
# preemptions; prompts in the same steps; a slower attention kernel; and the host: guided decoding, log-probabilities, a
# tokenizer on the critical path.

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# The schedule of the tight run of section 4, drawn from its trace. Find: the step in which the urgent r5 preempts
# another request; what the victim has to recompute (orange, hatched); a step whose budget is used up by chunks; a step
# with free seats although a request waits. Why does it wait?

# %% name="explore"
widgets.schedule(urgent, budget=32, seats=4)

# %% [markdown] name="perfetto-text"
# A longer trace needs a tool with zoom and search. `write_perfetto` writes it as a file for ui.perfetto.dev, which
# opens it in your browser: a track for the steps, a track for each request with its phases, and counters of running,
# waiting and free blocks. Give it a path of your own. `inferlab serve target --trace load.json` writes one when the
# server exits.

# %% name="perfetto"
with tempfile.TemporaryDirectory() as folder:
    write_perfetto(urgent, Path(folder) / "urgent.json")
    print(f"{(Path(folder) / 'urgent.json').stat().st_size:,} bytes for {len(urgent.steps())} steps")

# %% [markdown] name="policy-text"
# ### Whose turn: policies under load
#
# First the 120 requests of the question in the simulated engine, then starvation and fairness. What a scheduler *knows*
# about a length differs: everything (an oracle), a guess with an error, or only `max_tokens`. **A guess that is typically
# off by a factor of two: what percentage of the oracle's gain in mean TTFT remains?**

# %% name="policy-predict"
widgets.predict("03b-guess", "A guess typically off by x2: what part of the oracle's gain in mean TTFT remains?", "%")


# %% name="policy-orders"
waiting = [Arrival(0.0, 100, int(n), max_tokens=2000, name=f"r{i}") for i, n in enumerate(lengths)]
small = EngineConfig(max_num_seqs=16, max_num_batched_tokens=2048)


def knows(error):  # a guess that is off by a factor e^(error * normal)
    noise = np.random.default_rng(0).normal(0, 1, len(lengths))
    return lambda request: 100 + lengths[int(request.id[1:])] * float(np.exp(error * noise[int(request.id[1:])]))


orders = {
    "first come": FirstCome(),
    "shortest first, oracle": ShortestFirst(knows(0), aging=0),
    "guess, typically off by x2": ShortestFirst(knows(0.7), aging=0),
    "guess, typically off by x7": ShortestFirst(knows(2), aging=0),
    "shortest by max_tokens": ShortestFirst(aging=0),
}

# %% name="policy-burst"
seen = {name: simulate(h100, waiting, small, policy) for name, policy in orders.items()}
mean_of = {name: float(np.mean(trace.workload().ttft)) for name, trace in seen.items()}
longest = [f"r{i}" for i in np.argsort(lengths)[-12:]]
first, oracle_mean = mean_of["first come"], mean_of["shortest first, oracle"]
print(
    f"mean TTFT {first:.2f} s in order of arrival, {oracle_mean:.2f} s by the oracle: {first / oracle_mean:.1f} times"
)
ends = ", ".join(f"{trace.workload().duration:.2f}" for trace in seen.values())
print(f"last of all to end: {ends} s, in the order of `orders`")
widgets.reveal("03b-guess", 100 * (first - mean_of["guess, typically off by x2"]) / (first - oracle_mean))

# %% [markdown] name="policy-figure-text"
# What the mean gains, other requests pay for. Each point is a policy: to the left the mean TTFT is short, below the 12 longest
# of the 120 end early. The line joins the policies that no other beats in both; `pareto`, in the folded cell, finds them.


# %% name="pareto-drawing" jupyter={"source_hidden": true}
def pareto(ax, points, xlabel, ylabel, title="", up=False, logx=False):
    """points: name -> (x, y, colour, marker). x: less is better; y: less, or with `up` more. The best are joined."""

    def beats(a, b):
        ya, yb = (-a[1], -b[1]) if up else (a[1], b[1])
        return a[0] <= b[0] and ya <= yb and (a[0], ya) != (b[0], yb)

    best = [p for p in points.values() if not any(beats(other, p) for other in points.values())]
    ax.plot(*zip(*sorted(p[:2] for p in best), strict=True), color=GREY, linewidth=1.5, zorder=1)
    for i, (name, (x, y, colour, marker)) in enumerate(points.items(), start=1):
        ax.plot(x, y, marker, color=colour, markersize=8, label=f"{i}: {name}", linestyle="", alpha=0.85)
    tidy(ax, xlabel, ylabel, title)
    ax.margins(0.18)
    if logx:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
    ax.autoscale_view()
    seen = {}  # points so near each other that they share a label
    for i, (x, y, *_) in enumerate(points.values(), start=1):
        at = ax.transAxes.inverted().transform(ax.transData.transform((x, y)))
        near = next((place for place in seen if np.hypot(*(np.array(place) - at)) < 0.06), tuple(at))
        seen.setdefault(near, [(x, y), []])[1].append(str(i))
    for (right, _), ((x, y), numbers) in seen.items():
        ax.annotate(
            ", ".join(numbers), (x, y), textcoords="offset points", xytext=(8 if right < 0.8 else -8, 6), fontsize=9,
            ha="left" if right < 0.8 else "right",
        )  # fmt: skip


LOOKS = ((BLUE, "o"), (GREEN, "s"), (ORANGE, "D"), (RED, "^"), (PURPLE, "v"), (SKY, "P"))


# %% name="policy-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.1)
ax = fig.subplots()
points = {
    name: (mean_of[name], float(np.mean(trace.workload(longest).latency)), *look)
    for (name, trace), look in zip(seen.items(), LOOKS, strict=False)
}  # fmt: skip
pareto(ax, points, "mean TTFT, s", "mean latency of the 12 longest, s", "120 requests at once, 16 seats")
fig.legend(loc="outside right center", fontsize=9, frameon=False)
show(
    fig,
    "Five policies: mean TTFT of all, mean latency of the 12 longest. "
    + " ".join(f"{name}: {x:.2f} s and {y:.2f} s." for name, (x, y, *_) in points.items())
    + " A line joins those that no other beats in both.",
)

# %% [markdown] name="policy-burst-reading"
# Shortest-first shortens the mean, but not by working faster: the last request ends at about the same time. It shifts
# the waiting to the few long requests. A guess that is off by a factor of two still gives most of the gain, because
# what counts is the *order*, and lengths differ by much more than two. `max_tokens` is the same for all requests here,
# so it orders nothing.
#
# **Starvation.** One request of 1,500 tokens among short ones that keep arriving, about as fast as four seats can serve
# them. Without aging it starts when the short ones are done. **How many seconds does it wait if each second of waiting
# counts as much as 400 tokens?** Its cost is its 100 + 1,500 tokens.

# %% name="starvation-predict"
widgets.predict(
    "03b-aging", "Aging of 400 tokens per second, a request of 1,600 among short ones: how long it waits?", "s"
)

# %% name="starvation"
crowd = [Arrival(0.0, 100, 100, name=f"a{i}") for i in range(40)] + [Arrival(0.05, 100, 1500, name="long")]
crowd += [Arrival(0.1 + 0.15 * i, 100, 100, name=f"b{i}") for i in range(120)]
few = EngineConfig(max_num_seqs=4, max_num_batched_tokens=2048)
the_short = [a.name for a in crowd if a.name != "long"]
waits = {}  # name -> (seconds the long one waits, mean TTFT of the short ones)
for aging in (0, 100, 400, 2000, None):
    trace = simulate(h100, crowd, few, FirstCome() if aging is None else ShortestFirst(aging=aging))
    name = "first come" if aging is None else f"aging {aging} tokens/s" if aging else "no aging"
    waits[name] = (trace.metrics("long").queue, np.mean(trace.workload(the_short).ttft))
print("the long one waits", ", ".join(f"{name}: {w:.1f} s" for name, (w, _) in waits.items()))
widgets.reveal("03b-aging", waits["aging 400 tokens/s"][0])

# %% name="starvation-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.0)
ax = fig.subplots()
points = {name: (mean, long, *look) for (name, (long, mean)), look in zip(waits.items(), LOOKS, strict=False)}
pareto(ax, points, "mean TTFT of the short requests, s", "wait of the long one, s")
fig.legend(loc="outside right center", fontsize=9, frameon=False)
show(
    fig,
    "Aging as a trade-off, mean TTFT of the short requests against the wait of the long one. "
    + " ".join(f"{name}: short {x:.2f} s, long {y:.1f} s." for name, (x, y, *_) in points.items()),
)

# %% [markdown] name="starvation-reading"
# Without aging it waits until the short requests are done. With aging `a` no request that arrives more than `cost / a`
# seconds after it goes ahead of it: a bound you can choose. It costs the short requests something. That is the
# trade-off.
#
# | policy | orders by | good for | drawback |
# |---|---|---|---|
# | first come | arrival | one kind of request; undisputed fairness | one long request delays all behind it |
# | shortest first | estimated tokens | mean latency under overload | needs an estimate; starvation without aging |
# | priority | a class, by contract or SLO | interactive before batch; paid tiers | starvation of the low class; who sets it? |
# | preemptive | any of these, and running ones may be preempted | strict objectives for a few requests | work is done twice, or swapped |
# | earliest deadline | deadline minus estimated time | requests with different objectives | under overload it serves requests that miss anyway |
# | fair share | tokens of the tenant so far | several tenants on one machine | needs identities that are not free to create |
#
# Fairness in numbers: tenant A sends 90 requests at once, tenant B 10 at the same time, just behind them.

# %% name="fair"
flood = [Arrival(0.0, 200, 100, name=f"A{i}", tenant="A") for i in range(90)] + [
    Arrival(0.01, 200, 100, name=f"B{i}", tenant="B") for i in range(10)
]
tenants = []
for name, policy in (
    ("first come", FirstCome()),
    ("fair share", FairShare()),
    ("fair, B weighs 3", FairShare({"B": 3.0})),
):
    trace = simulate(h100, flood, few, policy)
    wait = {t: np.mean([trace.metrics(a.name).queue for a in flood if a.tenant == t]) for t in "AB"}
    tenants.append([name, f"{wait['A']:.2f} s", f"{wait['B']:.2f} s"])
widgets.table(tenants, ["policy", "mean wait of A", "mean wait of B"])

# %% [markdown] name="admission-text"
# ### Admission: two ways to treat memory
#
# A request may generate up to `max_tokens` tokens, and usually generates far fewer. At admission you know only the
# prompt.
#
# - **Worst case:** admit it only if prompt + `max_tokens` fits. No request is ever preempted. Much memory is reserved
#   and empty.
# - **Fill:** admit it if the prompt fits. More run together. When blocks run out, a request is preempted.
#
# 8B on an H100 with a cache of 24,000, 12,000 or 8,000 tokens; 10 requests per second for 20 s, prompts of 500, outputs
# of 200 on average, `max_tokens` 1,024. **With 8,000 tokens: how many times as many tokens per second does filling
# give?**
# <!-- printed: admission -->

# %% name="admission-predict"
widgets.predict("03b-fill", "A cache of 8,000 tokens: tokens per second of fill over worst case?", "times")


# %% name="admitted" jupyter={"source_hidden": true}
stream = poisson(10, 20, seed=3, prompts=(500,), mean_output=200, max_tokens=1024)


def admitted(blocks, admission="fill", preemption="recompute", seats=256, load=stream, policy=None):
    config = EngineConfig(num_blocks=blocks, max_num_seqs=seats, max_num_batched_tokens=1024, admission=admission,
                          preemption=preemption, swap_bytes=2**31)  # fmt: skip
    trace = simulate(h100, load, config, policy)
    steps = trace.steps()
    again = sum(r.num_tokens for s in steps for r in s.rows) - sum(
        500 + m.num_output_tokens - 1 for m in trace.workload().requests
    )
    return trace, sum(len(s.preempted) for s in steps), again, np.mean([s.num_running for s in steps])


# %% name="admission"
ADMISSIONS = {
    f"{16 * blocks:,} tokens, {name}": admitted(blocks, admission)
    for blocks in (1500, 750, 500)
    for name, admission in (("worst case", "worst_case"), ("fill", "fill"))
}
for name, (_, gone, again, running) in ADMISSIONS.items():
    print(f"{name}: {gone} preempted, {again:,} tokens computed again, {running:.1f} running in the mean")
rates = {name: trace.workload().throughput for name, (trace, *_) in ADMISSIONS.items()}
widgets.reveal("03b-fill", rates["8,000 tokens, fill"] / rates["8,000 tokens, worst case"])

# %% name="admission-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 4.0)
left, right = fig.subplots(1, 2)
gap, ttft = {}, {}
for i, (name, (trace, *_)) in enumerate(ADMISSIONS.items()):
    w, look = trace.workload(), (LOOKS[i // 2][0], "s" if i % 2 else "o")
    ttft[name] = (percentile(w.ttft, 95), w.throughput, *look)
    gap[name] = (max(w.itl), w.throughput, *look)
pareto(left, ttft, "p95 TTFT, s", "tokens/s", "what those who wait see", up=True, logx=True)
pareto(right, gap, "worst gap, s", "tokens/s", "what those who stream see", up=True, logx=True)
fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9, frameon=False)
show(
    fig,
    "Worst case and fill at three cache sizes. Throughput against p95 TTFT, and against the worst gap. "
    + " ".join(
        f"{n}: p95 TTFT {ttft[n][0]:.2f} s, worst gap {gap[n][0]:.2f} s, {ttft[n][1]:,.0f} tokens/s." for n in gap
    )
    + " A line joins those that no other beats in both.",
)

# %% [markdown] name="admission-reading"
# Compare in pairs, a circle and a square of one colour. Worst case keeps the streams smooth and lets requests wait in the queue. Fill gets more work
# out of the same memory, even with 8,000 tokens, where it thrashes: preempted, recomputed, preempted. The preempted
# requests pay the price: their stream stalls, which the *worst gap* shows. Which is better depends on how far
# `max_tokens` is above the actual output length: the tighter the cap, the cheaper the guarantee.
#
# In between is **admission control**: cap the seats by the KV budget, so that a typical load fits. A rule of thumb:
# prompt + mean output per request.

# %% name="admission-seats"
blocks = 500
fits = 16 * blocks // (500 + 200)
print(f"{16 * blocks:,} tokens of cache / (500 + 200) = {fits} seats")
oracle = ShortestFirst(lambda request: 500 + stream[int(request.id)].output, aging=0)
CAPS = {}
for n, policy in ((fits // 2, None), (fits, None), (2 * fits, None), (256, None), (fits, oracle)):
    name = f"{n} seats, {'shortest first' if policy else 'first come'}"
    CAPS[name] = admitted(blocks, seats=n, policy=policy)
    print(f"{name}: {CAPS[name][1]} preempted, {CAPS[name][2]:,} tokens computed again")

# %% name="admission-seats-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 4.0)
left, right = fig.subplots(1, 2)
ttft, gap = {}, {}
for (name, (trace, *_)), look in zip(CAPS.items(), LOOKS, strict=False):
    w = trace.workload()
    ttft[name] = (percentile(w.ttft, 95), w.throughput, *look)
    gap[name] = (max(w.itl), w.throughput, *look)
pareto(left, ttft, "p95 TTFT, s", "tokens/s", "what those who wait see", up=True, logx=True)
pareto(right, gap, "worst gap, s", "tokens/s", "what those who stream see", up=True, logx=True)
fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9, frameon=False)
show(
    fig,
    "Caps on the seats, 8,000 tokens of cache. "
    + " ".join(
        f"{n}: p95 TTFT {ttft[n][0]:.2f} s, worst gap {gap[n][0]:.2f} s, {ttft[n][1]:,.0f} tokens/s." for n in gap
    )
    + " A line joins those that no other beats in both.",
)

# %% [markdown] name="admission-seats-reading"
# The rule's cap halves the recomputed tokens and gives nearly the same throughput: over-admission only adds wasted
# work. Half of that cap never preempts, and lets requests wait instead. *Without* any control (256 seats) the memory
# itself is the only limit, and streams stop more often and for longer. Preferring short requests (the last point, by an
# oracle) shortens the waits further, since they free their blocks soon. But the long requests are the ones preempted,
# and later arrivals are shorter: without aging, look at the worst gap.

# %% [markdown] name="load-text"
# ### How long is the queue: load against waiting *(more)*
#
# So far the load was fixed. Now raise it, from a fifth to nine tenths of the engine's capacity. Queueing theory has a
# formula for this: one server, random arrivals, and the variance of the work per request (Pollaczek and Khinchine, see
# `01_prefill_decode/c_metrics`). Its mean is exact for an engine with **one seat**, which is one server. A p99 needs one
# assumption more: that those who wait do so exponentially long.
#
# The load of such an engine goes from 40 % to 90 %, a little more than double. **By what factor does the p99 of the
# wait grow?** Outputs are exponential.

# %% name="load-predict"
widgets.predict("03b-p99", "One seat, load from 40 % to 90 %: by what factor does the p99 of the wait grow?", "times")

# %% [markdown] name="load-check-text"
# First a check that the simulated engine is a single-server queue when it has one seat. A new request waits for the
# remaining work of the one before: `wait = max(0, wait before + service before - gap)`. Then the growth, by formula and
# in the engine. Capacities are measured with all requests arriving at once.

# %% name="load-check"
RANDOM = ("Poisson", "exponential, mean 100")
one = under_load.run("1 seat", *RANDOM, rate=1.2, num=200, seed=7)
order = np.argsort(one.arrival)
arrival, queue, service = one.arrival[order], one.queue[order], (one.latency - one.queue)[order]
wait = [0.0]
for gap, before in zip(np.diff(arrival), service, strict=False):
    wait.append(max(0.0, wait[-1] + before - gap))
print(f"200 requests: the largest difference between engine and queue is {np.abs(queue - wait).max():.0e} s")
np.testing.assert_allclose(queue, wait, atol=1e-9)

lines = {seats: under_load.recorded()[seats, *RANDOM] for seats in under_load.SEATS}
at = {seats: {p.load: p for p in line.points} for seats, line in lines.items()}
grown = at["1 seat"][0.9].wait["p99"][0] / at["1 seat"][0.4].wait["p99"][0]
by_formula = formula(lines["1 seat"], 1, 0.9, "p99") / formula(lines["1 seat"], 1, 0.4, "p99")
print(f"one seat, 40 to 90 %: the p99 of the wait grows {grown:.1f} times in the engine,")
print(f"{by_formula:.1f} times by formula, if waits are exponential")
widgets.reveal("03b-p99", grown)

# %% [markdown] name="load-tail-text"
# How good is that assumption? The formula over the engine's value, with one seat and each kind of output: the mean, which
# theory gives, and the p99, which it does not.

# %% name="load-tail"
for outputs in under_load.OUTPUTS:
    line = under_load.recorded()["1 seat", "Poisson", outputs]
    for p in line.points:
        ratio = {s: formula(line, 1, p.load, s) / p.wait[s][0] for s in ("mean", "p99")}
        if p.load in (0.2, 0.9):
            print(f"{outputs}, load {p.load:.0%}: mean {ratio['mean']:.2f}, p99 {ratio['p99']:.2f} of the engine's")

# %% [markdown] name="load-table-text"
# Now the same question with more seats.

# %% name="load-table"
rows, idle = [], under_load.alone()["tpot"]
for seats, line in lines.items():
    for load in (0.6, 0.9):
        counts = (1, max(1, round(line.servers)))
        seconds = [at[seats][load].wait["mean"][0], *(formula(line, count, load, "mean") for count in counts)]
        slower = at[seats][load].tpot["mean"][0] / idle
        rows.append(
            (seats, f"{load:.0%}", *(f"{1e3 * s:.1f}" for s in seconds), f"{slower:.2f}", f"{line.servers:.0f}")
        )
widgets.table(
    rows,
    ("seats", "load", "engine", "one server", "as many servers", "TPOT, times idle", "together when full"),
    caption="mean wait, ms",
)

# %% [markdown] name="load-explore-text"
# Each point of the widget is a precomputed simulation of several thousand requests (a p99 of a few hundred says
# little); a bar spans three runs. "One server" is the formula for a single server that is as fast as the whole engine;
# the other curve is for as many servers as the engine serves together when it is full (Erlang; Allen and Cunneen for
# other arrivals and outputs). Try:
#
# - one seat, and each kind of output: which of the three gives the longest waits, at the same load?
# - bursts in place of random arrivals;
# - 256 seats, and TPOT as the measure: what does no formula capture?
# - 256 seats and a small cache: the load at which requests are preempted, and how many are served together there;
# - a short run: five benchmarks of 100 requests, simulated when you choose them. How far apart are their p99s?

# %% name="load-explore"
widgets.under_load(under_load.recorded(), under_load.short_run, under_load.alone())

# %% [markdown] name="load-reading"
# - **One seat.** With random arrivals the means agree, within the accuracy of runs of several thousand requests. The
#   percentiles drawn beside them assume exponential waits, and are off as `load-tail` says. (With bursts even the mean
#   is a formula for high loads: at 20 % it gives less than half of the wait.) The engine has spare capacity at 90 %,
#   and yet the wait is many times longer: a server that is nearly always busy has no slack left when several requests
#   arrive at once. Bursts and outputs of unequal length use up more of it.
# - **Many seats.** Now neither formula holds. "One server" makes new requests wait for work that the engine does
#   concurrently. "As many servers" errs on either side. With eight seats it overestimates, since an engine that is not
#   full serves each request faster than a full one. With 256 seats and a moderate load it says that no request waits;
#   but a new request waits for the end of the running step and for its share of the token budget, long before seats run
#   out. No formula here captures that all requests slow down as others join: TPOT grows before the queue does. And a
#   long output no longer blocks others: with one seat the three kinds of outputs differ by factors, with 256 seats
#   hardly.
# - **The knee is where something is full:** one seat, eight seats, the blocks of the small cache (then requests are
#   preempted, too), or, with 256 seats and the whole memory, the arithmetic of the prefills. The right panel shows how
#   near you are. A formula has to be given the limit; a simulation finds it.
# - **A p99 of 100 requests is nearly the second-worst of them.** It differs by factors from run to run.
#
# So take the shape from the formula (waiting grows like `1 / (1 - load)`, times the variances), the capacity from a
# measurement, and the numbers from a simulation, or a load test, that is long enough.
#
# ### Preemption: recompute or swap
#
# The victim's keys and values can be dropped and recomputed (arithmetic), or copied to host memory and back (a link).
# By formula, for one victim, on the machine of this notebook and a 70B model on four H100, each with a quarter of the
# cache (8 KV heads over four GPUs; over 16 a GPU would still hold a whole head); PCIe 5 at 55 GB/s, since copies do not
# reach the specified 63.
# <!-- tested: tests/claims/test_chapter_14.py::test_e14_03_host_memory_is_as_fast_as_the_path_to_it -->

# %% name="recompute-or-swap"
per_second = 55e9  # byte/s; copies over PCIe 5 x16 see 50 to 60 of the 63 GB/s in the specification
assert per_second < link("PCIe 5 x16").per_direction
large = Deployment(shape_of("llama-3-70b"), device("H100"), num_devices=4, mfu=0.5, mbu=0.8)
victims = []
for context in (500, 2000, 8000):
    cells = []
    for d in (h100, large):
        moved = 2 * context * d.bytes_per_token / d.num_devices / per_second
        cells += [format_seconds(d.prefill_seconds(context)), format_seconds(moved)]
    victims.append([context, *cells])
machines = ["8B, one H100: recompute", "out and in", "70B, four H100, a link each: recompute", "out and in"]
widgets.table(victims, ["context", *machines])

# %% name="swap-run"
ways = []
for preemption in ("recompute", "swap"):
    trace, gone, again, _ = admitted(500, preemption=preemption)
    moved = sum(len(s.transfers.swap_out) + len(s.transfers.swap_in) for s in trace.steps()) * 16 * h100.bytes_per_token
    w = trace.workload()
    times = [f"{percentile(w.ttft, 95):.2f} s", f"{1e3 * percentile(w.tpot, 99):.1f} ms"]
    ways.append([preemption, gone, again, format_bytes(moved), *times, f"{w.throughput:,.0f}"])
headers = ["preemption by", "preempted", "tokens computed again", "moved", "p95 TTFT", "p99 TPOT", "tokens/s"]
display(widgets.table(ways, headers, caption="8,000 tokens of cache, the same stream"))
plain, a = tight(blocks=10)
swapped, b = tight(blocks=10, preemption="swap")
assert a == b
print(f"course model, really run, 10 blocks: {sum(len(s.preempted) for s in swapped.steps())} preemptions, "
      f"{sum(len(s.transfers.swap_out) for s in swapped.steps())} blocks out, the same texts")  # fmt: skip

# %% [markdown] name="swap-reading"
# Both work. By these formulas swapping is cheaper for both models; it needs host memory, a link that is otherwise idle
# at that time, and code. Recomputation needs none of that, shares its steps with the decodes (so part of it costs no
# extra time), and with a prefix cache (chapter 06) some of the blocks may still be cached. vLLM dropped swapping with
# V1 and recomputes.
#
# ### Tuning the token budget
#
# Two parameters: `max_num_seqs` and `max_num_batched_tokens`. A chat load and one of long prompts with short answers,
# each near the machine's capacity, over the token budget.

# %% name="budget"
chat = poisson(24, 10, seed=4, prompts=(300,), mean_output=200)
documents = poisson(6, 12, seed=4, prompts=(4000,), mean_output=40)
tuned = []
for budget in (128, 256, 512, 2048, 8192):
    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=budget)
    a, b = (simulate(h100, load, config).workload() for load in (chat, documents))
    for_chat, for_documents = (
        [f"{percentile(w.ttft, 95):.2f} s", f"{1e3 * percentile(w.tpot, 99):.1f} ms"] for w in (a, b)
    )
    prompts_read = f"{len(b.requests) / b.duration:.2f}"
    tuned.append([budget, *for_chat, f"{a.throughput:,.0f}", *for_documents, prompts_read])
headers = ["chat: p95 TTFT", "p99 TPOT", "tokens/s", "documents: p95 TTFT", "p99 TPOT", "prompts read per s"]
display(widgets.table(tuned, ["budget", *headers]))
free = latency.flat_prefill_tokens(h100.device, mfu=h100.mfu) / h100.mbu
print(f"up to about {free:.0f} tokens ride under one read of the weights: a smaller budget wastes reads")

# %% [markdown] name="budget-reading"
# For chat the budget hardly matters once it is well above the number of decodes: there is little to prefill. What
# matters is that every active chat has a seat. For documents the budget is decisive: below the number of tokens that
# one read of the weights covers, prompts queue up; far above it TPOT suffers and nothing is gained *here*, because in
# these formulas a step costs only its arithmetic and bytes. A real step also has a fixed cost (launches, host), which a
# larger budget pays less often. Rule: as many seats as memory holds, a budget above that number of tokens, and larger
# only while prompts per second rise and TPOT meets its objective.
#
# ### "Latency is fine, throughput is low"
#
# An interview question with a recipe. If latency is fine there is slack, and a larger batch turns slack into
# throughput. First ask why the batch is small:


# %% name="throughput-low"
def level(d, batch, context=1000):
    return batch / d.tpot(context, batch), d.tpot(context, batch)


base = level(h100, 8)
changes = {
    "8 seats, as it is": base,
    "64 seats (they waited outside)": level(h100, 64),
    "128 seats": level(h100, 128),
    "8-bit keys and values, 64 seats": level(Deployment(llama, device("H100"), mfu=0.5, mbu=0.8, kv_bytes=1), 64),
    "fp8 weights and arithmetic, 64 seats": level(
        Deployment(llama, device("H100"), mfu=0.5, mbu=0.8, weight_bits=8, precision="fp8"), 64
    ),
    "two replicas of 8 seats, twice the GPUs": (2 * base[0], base[1]),
}
widgets.table(
    [[name, f"{rate:,.0f}", f"{rate / base[0]:.1f}x", f"{1e3 * tpot:.2f} ms"] for name, (rate, tpot) in changes.items()],
    ["change", "tokens/s", "against the first row", "TPOT"],
    caption="Llama-3-8B, H100, context 1,000, decode only, by formula",
)  # fmt: skip

# %% [markdown] name="throughput-reading"
# 1. Do requests wait? If not, the load is low, and nothing on this machine raises throughput.
# 2. If they wait: which limit is reached? Seats (`max_num_seqs`), blocks (preemptions, reservations), or the token
#    budget?
# 3. Then use up the latency slack: more seats, a larger budget, more memory for the cache (8-bit cache, less
#    reservation), fewer bytes per step.
# 4. If the GPU is idle *between* steps, the host is the limit: the section above.

# %% [markdown] name="worked-problem"
# ### Worked problem: how many seats?
#
# The course's deployment: Llama-3-70B in 16 bits on four H100 with tensor parallelism, half of the peak (1,979 TFLOP/s of
# all four) and 80 % of the bandwidth (10.72 TB/s). A step reads 139.0 GB of weights, the layers have 68.45 · 10⁹ of them,
# attention takes 4 · 64 · 128 · 80 FLOP per pair, and the cache holds 448,280 tokens of 327,680 bytes. Logits and
# communication are left out.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03b_beyond_the_balance_of_bytes_and_arithmetic_seats_only_lengthen_tpot -->
#
# *Prompts have 1,500 tokens, outputs 500 (499 decode steps). Chunks are spread evenly over the steps, so that `seats / 499`
# prompts are computed in each. What is the largest rate, in requests per second? With how many seats is it reached? What
# do more seats bring, as many as memory holds? How many are right for a TPOT of 30 ms, and for 6 requests per second?*
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03b_beyond_the_balance_of_bytes_and_arithmetic_seats_only_lengthen_tpot -->
#
# <details><summary>Answer</summary>
#
# Work of a request: 1,999 tokens through the layers, 273.7 TFLOP, and attention, 5.2 TFLOP. Together 278.9 TFLOP: at
# 1,979 TFLOP/s **7.1 requests per second**, whatever the number of seats.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03b_beyond_the_balance_of_bytes_and_arithmetic_seats_only_lengthen_tpot -->
#
# With `n` seats a step takes the larger of two times. Bytes: `(139.0 + 0.57 n) / 10.72` ms, the caches at 1,750 tokens in
# the mean. Arithmetic: `n / 499 · 278.9 / 1,979` seconds. They are equal at **57** seats, 16.1 ms. With 32 seats bytes
# decide: 14.7 ms, 4.4 requests per second.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03b_beyond_the_balance_of_bytes_and_arithmetic_seats_only_lengthen_tpot -->
#
# Beyond 57 the rate stays, and TPOT grows with the seats: the 224 that memory holds (2,000 tokens each) give 63 ms and
# the same 7.1 requests per second. For a TPOT of 30 ms up to **106** seats are allowed, and 57 are enough.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03b_beyond_the_balance_of_bytes_and_arithmetic_seats_only_lengthen_tpot -->
#
# At 6 requests per second, 85 % of the largest rate, Little's law with steps bound by bytes gives **46** requests in
# service, 15.4 ms per step. Seats between 46 and 57 are slack for bursts. That is a mean, so some queue remains: arrivals
# are random.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_03b_beyond_the_balance_of_bytes_and_arithmetic_seats_only_lengthen_tpot -->
#
# </details>

# %% [markdown] name="errata-translation"
# ## 7. What the cheat sheets get wrong
#
# **"Batch translation is mostly prefill, so give it a large token budget."** (E03.5) A translation is about as long as
# its source. Each output token is a step of its own, while the whole prompt is one. Time per request on the large
# machine, in batches of 64 or as many as its cache holds, with the prefill on its own at the same MFU:

# %% name="errata-translation-cell"
shares = []
for name, prompt, output in (
    ("translation", 256, 256), ("chat", 500, 300), ("code completion", 2000, 40), ("retrieval, short answer", 6000, 150),
    ("summary of a long document", 8000, 200), ("extraction, classification", 3000, 8), ("score or embedding", 1000, 1),
):  # fmt: skip
    together = min(64, h100.cache_tokens() // (prompt + output))
    prefill = h100.prefill_seconds(prompt)
    decode = (output - 1) * h100.tpot(prompt + max(1, output // 2), together) / together
    shares.append([name, prompt, output, together, f"{prefill / (prefill + decode):.0%}"])
widgets.table(shares, ["load", "tokens in", "out", "together", "prefill's share of the time"])

# %% [markdown] name="errata-blocking"
# **"Continuous batching means no head-of-line blocking."** (E03.9) There are three kinds, and each needs its own
# remedy. The load: 8 requests per second for 20 seconds; 87 % short (300 tokens in), 11 % long prompts (8,000), and 2 %
# huge ones of 30,000. The machine has a cache of 40,000 tokens. Switch the remedies on one at a time and look at the
# *short* requests:


# %% name="errata-blocking-cell"
mixed = poisson(8, 20, seed=6, prompts=(300, 8000, 30_000), shares=(0.87, 0.11, 0.02), mean_output=150)
short = [str(i) for i, a in enumerate(mixed) if a.prompt == 300]
whole = EngineConfig(num_blocks=40_000 // 16, max_num_seqs=32, max_num_batched_tokens=131_072)
pieces = EngineConfig(num_blocks=40_000 // 16, max_num_seqs=32, max_num_batched_tokens=512)
remedies = {
    "static": {"config": whole, "scheduler": lambda kv: StaticBatching(kv, 32)},
    "continuous, whole prompts": {"config": whole, "scheduler": lambda kv: OrcaBatching(kv, 32)},
    "+ chunks of 512": {"config": pieces},
    "+ shortest first, with aging": {"config": pieces, "policy": ShortestFirst(aging=500)},
}
blocked = []
for name, options in remedies.items():
    trace = simulate(h100, mixed, **options)
    w, others = trace.workload(short), trace.workload([str(i) for i in range(len(mixed)) if str(i) not in short])
    ttft = [f"{percentile(kind.ttft, 95):.2f} s" for kind in (w, others)]
    streams = [f"{1e3 * percentile(w.tpot, 99):.1f} ms", f"{1e3 * max(w.itl):,.0f} ms"]
    blocked.append([name, ttft[0], *streams, ttft[1]])
widgets.table(blocked, ["", "short requests: p95 TTFT", "p99 TPOT", "longest gap", "long ones: p95 TTFT"])

# %% [markdown] name="errata-blocking-reading"
# Continuous batching removes the blocking by long *outputs*: the waits of the first row. (The first row's streams are
# smooth only because no request joins a running batch.) But now whole prompts enter, and the longest gap is the prefill
# of a huge prompt. Chunks remove that; the remaining gap is a preemption. What remains is the queue: in order of
# arrival, every request waits behind one whose prompt does not fit yet. The policy shortens that wait, and the long
# requests pay: look at the last column.
#
# **Facts about software that have moved.** (E15.4) Some sources send you to `vllm/core/scheduler.py`; since V1 the file
# is `vllm/v1/core/sched/scheduler.py`. TensorRT-LLM's policies are called `GUARANTEED_NO_EVICT`, `MAX_UTILIZATION` and
# `STATIC_BATCH`; none is called "capacity" (that is the family's name). TGI is in maintenance mode, according to its
# README (January 2026). Look such things up, and note the date.
#
# **One reference with the title of two papers.** (E19.3) SARATHI (2023) and Sarathi-Serve (2024) are two papers by
# overlapping authors; see below.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Names of options and their defaults change; look them up in the version you run.
#
# **vLLM** orders by `--scheduling-policy fcfs` (default) or `priority`, and preempts by recomputing since V1. It admits
# by *filling*, if a request's whole input fits (`scheduler_reserve_full_isl`, on by default). A warning in the log and a
# counter report preemptions; its guide suggests more memory for the cache, or fewer seats or tokens per step.
# Asynchronous scheduling overlaps the host with the GPU; if unset, the engine decides by itself.
#
# **SGLang** orders by arrival; longest prefix match (`lpm`) is one of several other choices of `--schedule-policy`. It
# estimates how much of `max_new_tokens` will actually be used, and *retracts* running requests when the estimate was
# too low; `--schedule-conservativeness` shifts the estimate. Its overlapped scheduler is on by default.
#
# **TensorRT-LLM** lets you choose the two policies of this chapter by name: `GUARANTEED_NO_EVICT` (worst case, the
# default) and `MAX_UTILIZATION` (fill and pause). `STATIC_BATCH` is kept as a legacy mode.
#
# **llama.cpp**'s server has a fixed number of slots (`--parallel`) that share one context, filled continuously: slots
# without a queue policy.

# %% [markdown] name="read-vllm"
# ### One page about a production scheduler
#
# Read `schedule()` in `vllm/v1/core/sched/scheduler.py` with this page beside it (written from a snapshot of 2026;
# line numbers would be wrong next week, the order has been stable).
#
# 1. There is no prefill and no decode phase: every request has a number of computed tokens that tries to catch up with
#    the number of tokens it has, drafts included. This covers chunks, prefix hits and speculation at once. The engine
#    of this course does the same.
# 2. The budget is `max_num_scheduled_tokens`. **Running requests first**, in the order of the running list. Decodes are
#    not picked out explicitly: requests still in prefill came last and are at the end of the list.
#    `long_prefill_token_threshold` caps one request's chunk.
# 3. For each it asks the KV manager for slots. If there are none, it **preempts**: the last of the list, or under
#    `priority` the one of lowest priority. The victim may already have been scheduled in this step; then its tokens are
#    taken back. (Ours never preempts a request that has a row in this step.)
# 4. Then, **only if none was preempted**, the waiting requests: look up the prefix cache, take what the budget leaves,
#    allocate. If blocks are missing, stop: no overtaking. Requests that wait for something else (a grammar, keys and
#    values from elsewhere) are skipped and put back.
# 5. The output lists how many tokens each request computes, which blocks are new and which requests were preempted.
#    `update_from_output` then appends the sampled tokens, checks stop conditions, and frees blocks.
#
# Now write your own page about a scheduler you use: what is the order, which request is the victim, which may overtake,
# what is undone?

# %% [markdown] name="sources"
# ### Where the ideas come from (more)
#
# | paper | year | contribution |
# |---|---|---|
# | Yu et al., *Orca* (OSDI) | 2022 | iteration-level scheduling, selective batching; memory reserved for the longest output |
# | Kwon et al., *PagedAttention*, vLLM (SOSP) | 2023 | blocks, so that more fit; preemption by recomputing or swapping |
# | Agrawal et al., *SARATHI* | 2023 | chunked prefills with decodes piggybacked on them, also to fill pipeline stages evenly |
# | Agrawal et al., *Sarathi-Serve* (OSDI) | 2024 | stall-free schedules: decodes first, chunks under a token budget chosen from the latency objective |
#
# The defaults of today's engines follow the last one.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Then build it: [lab 03](../../labs/03_batching/scheduler.ipynb). Its last section puts your scheduler into the engine.

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("03_batching").draw(seed=1, tag="scheduling"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Before every step: running requests first (decodes, then chunks), then admissions, under `max_num_batched_tokens`
#   and `max_num_seqs`.
# - Waiting grows like `1 / (1 - load)`, times the variance of arrivals and work. With one seat and random arrivals the
#   mean is exact; a percentile needs a further assumption. With many seats neither one server nor many describes the engine: TPOT grows first. The knee: seats, blocks or arithmetic full.
# - More seats: more tokens per second, longer TPOT, shorter queue. TPOT ≈ (weights + all caches) / bandwidth.
# - Shortest-first lowers the mean and shifts the waiting to the long requests. Without aging only the order of the
#   estimates counts, and long requests can starve. Bound with aging: no request that arrives `cost / aging` later goes
#   first.
# - Admission: worst case (no preemption, fewer run) or fill (more run, may thrash). Seats ≈ cache tokens / (prompt +
#   mean output).
# - Preempted requests keep their tokens. Recompute: arithmetic. Swap: `2 · bytes / link`. Neither changes the text, up
#   to rounding.
# - Long outputs block → continuous batching. Long prompts block → chunks. A long request at the head of the queue
#   blocks → policy.
# - Prefill-heavy: classification, scores, long documents with short answers. Not translation.
# - Host work: `gpu + host` one after the other, `max(gpu, host)` overlapped.
# - Throughput low, latency fine: do requests wait, which limit binds, then spend the slack on a larger batch.
