# %% [markdown] name="title"
# # 01c · What a user feels: latency, throughput, goodput
#
# About 45 minutes. Parts whose heading says *(more)* are optional, about 25 minutes together; nothing later needs them.
# You need `a_phases` and `b_floors`. The next notebook, `d_sampling`, is about choosing the token. The lab of both is
# [Metrics and sampling](../../labs/01_prefill_decode/metrics_sampling.ipynb).

# %% name="setup"
# Set-up: libraries, the course model, and the devices this notebook computes with.
import inspect
from collections import deque
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, RED, SKY, figure, show, tidy
from chapters.widgets.latency_budget import USES
from reference_impl import LLM, Engine, EngineConfig, Parts, SamplingParams, course_model
from reference_impl.models.config_json import parse_model_config
from reference_impl.interfaces import Reply
from reference_impl.observe.metrics import RequestMetrics, WorkloadMetrics, percentile
from reference_impl.theory import kv_cache, latency, queueing
from reference_impl.theory.deployment import Deployment, request_time
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.units import format_bytes, format_seconds

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
# The prefix cache is off, so that a prompt asked twice is computed twice; chapter 06 turns it on.
llm = LLM(course_model("target"), dtype="float32", kv_cache_bytes=32 * 2**20, prefix_cache="off")
model = llm.engine.model
on_gpu = model.device.type == "cuda"
text = llm.encode(inspect.getsource(Engine)) * 4

llama = shape_of("llama-3-8b")
h100 = Deployment(llama, device("H100"), mfu=0.5, mbu=0.8)  # half of the arithmetic, four fifths of the bandwidth
print(f"Llama-3-8B in bf16 on one H100 (SXM, dense peak) at MFU {h100.mfu:.0%} and MBU {h100.mbu:.0%}, by formula:")
print(f"a prompt of 1,000 tokens alone: {format_seconds(h100.prefill_seconds(1000))}")
print(
    f"a decode step, context 1,000: {format_seconds(h100.tpot(1000))} alone, {format_seconds(h100.tpot(1000, 32))} for 32"
)

# %% [markdown] name="question"
# ## 1. A question with a number
#
# That machine (MFU and MBU: the shares of its peak arithmetic and bandwidth that it reaches, see `b_floors`) serves
# requests with prompts of 1,000 tokens and about 100 tokens of output. When it is idle the first token comes after one
# prefill, the time printed above. Now 32 requests arrive per second, at random moments, a little more than it can
# sustain, for twenty seconds.
#
# **How many times longer than that prefill is the time to first token, at the 95th percentile?** That is the value that
# 95 of 100 requests stay below, p95 for short. And what happens to the prefill itself? Keep a guess in mind. It needs a
# GPU that we do not have; section 4 builds a virtual one, and section 5 asks for your number and measures.

# %% [markdown] name="idea"
# ## 2. The idea
#
# Picture an interpreter at a table with many people around it. Each has handed over a letter and waits for the reply,
# which the interpreter speaks word by word. The interpreter works in **rounds**: in each round everybody at the table
# hears one word. A newcomer first waits at the door. Once a seat is free, the interpreter reads the newcomer's whole
# letter within a round, and at its end speaks the first word of the reply.
#
# Everything a user feels is in this picture. First there is a pause, for the letter has to be read before a word can be
# said. Then words come one by one, because a round gives one word. They can be passed on as they come: the text *streams*,
# and the user need not wait for its end.
#
# - **The door** is the queue. How long you wait there does not depend on your letter. It depends on the others.
# - **Reading your letter** is the prefill. A longer letter takes longer.
# - **The wait for your first word** is both together: the *time to first token*, TTFT.
# - **The pauses between words** are the rounds: *inter-token latencies*, ITL. When somebody else's long letter is read
#   within a round, everybody at the table hears a long pause.
# - **Your mean pause** is your *time per output token*, TPOT.
# - **From the door to the last word** is the *end-to-end latency*.
# - The interpreter's employer asks something else: how many words a minute are spoken to everybody together. That is
#   *throughput*. And how many people were served in time: *goodput*.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.5)
ax = fig.subplots()
moments = [0, 2.2, 4.2, 5.2, 6.2, 8.4, 9.4]  # arrival, first step, five tokens
ax.barh(0, 2.2, left=0, height=0.5, color=GREY, hatch="..", edgecolor="white")
ax.barh(0, 2.0, left=2.2, height=0.5, color=BLUE)
for a, b in pairwise(moments[2:]):
    ax.barh(0, b - a, left=a, height=0.5, color=SKY, edgecolor="white", linewidth=1.5)
for x in moments[2:]:
    ax.plot(x, 0.42, marker="v", color=INK, markersize=6)
for x, words in (
    (1.1, "queue"),
    (3.2, "prefill"),
    (4.7, "gap"),
    (5.7, "gap"),
    (7.3, "gap, somebody's prompt"),
    (8.9, "gap"),
):
    ax.text(x, 0, words, ha="center", va="center", fontsize=8, color="white" if words == "prefill" else INK)
for y, start, end, words in (
    (-0.62, 0, 4.2, "TTFT"),
    (-0.62, 4.2, 9.4, "(N-1) x TPOT"),
    (-1.1, 0, 9.4, "end-to-end latency"),
):
    ax.annotate("", (end, y), (start, y), arrowprops={"arrowstyle": "<->", "color": INK})
    ax.text((start + end) / 2, y, words, ha="center", va="center", fontsize=9, backgroundcolor="white")
ax.text(0, 0.42, "arrives", fontsize=8, ha="left", va="center")
ax.text(9.4, 0.68, "N = 5 tokens, 4 gaps", fontsize=8, ha="right", va="center")
ax.set_xlim(-0.1, 9.6)
ax.set_ylim(-1.4, 0.85)
ax.axis("off")
show(
    fig,
    "One request on a time line: queue, then prefill, then four gaps between five tokens. TTFT covers queue and "
    "prefill; the gaps together are N minus 1 times TPOT; both together are the end-to-end latency.",
)

# %% [markdown] name="phases-table"
# | metric | one per | formula | phase it depends on | who cares |
# |---|---|---|---|---|
# | TTFT | request | first token − arrival | queue, then prefill | a reader who waits for a sign of life |
# | ITL | gap | one token − the token before | decode, and prefills that share the step | a reader while text streams |
# | TPOT | request | (last − first token) / (N−1) | decode | the speed of the stream |
# | latency | request | last token − arrival | all | code that needs the whole answer |
# | throughput | load | all output tokens / duration | all | whoever pays for the GPU |
# | goodput | load | requests that met their objectives / duration | all | whoever promised something |
# | attainment | load | requests that met their objectives / all requests | all | the same, as a share |
#
# **ITL has two meanings.** Here, and in most serving engines, it is a list: one gap per token after the first. Some
# tools call the mean of these gaps, which is our TPOT, "inter-token latency" (section 8 has an example). A percentile of
# the one is not a percentile of the other. Ask which.

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# A server's log is one list. Events of all requests are interleaved, and the event before yours usually belongs to
# another request. So first group by request id, then subtract. There are three traps: TTFT includes the queue, N tokens
# have N − 1 gaps, and some requests have one token or none. (A request that was preempted is scheduled again. The first
# time counts.)

# %% name="scratch"
log = [  # (seconds, what, who); the clock started anywhere
    (70.00, "arrived", "ann"), (70.01, "scheduled", "ann"), (70.05, "token", "ann"), (70.06, "arrived", "bob"),
    (70.07, "token", "ann"), (70.20, "scheduled", "bob"), (70.20, "arrived", "cyd"), (70.29, "token", "ann"),
    (70.29, "token", "bob"), (70.31, "token", "ann"), (70.40, "arrived", "dan"), (70.45, "scheduled", "cyd"),
]  # fmt: skip


def stamps_of(who):  # what happened to this request -> when
    return {what: [t for t, w, name in log if w == what and name == who] for what in ("arrived", "scheduled", "token")}


def of_one(times):
    arrived, tokens = times["arrived"][0], times["token"]
    gaps = [b - a for a, b in pairwise(tokens)]  # N tokens, N - 1 gaps
    return {
        "queue": times["scheduled"][0] - arrived if times["scheduled"] else None,
        "ttft": tokens[0] - arrived if tokens else None,  # from the arrival, not from "scheduled"
        "itl": tuple(gaps),
        "tpot": sum(gaps) / len(gaps) if gaps else None,  # a lone token has no gap, and no TPOT
        "latency": tokens[-1] - arrived if tokens else None,
    }


# %% [markdown] name="scratch-check-text"
# Four requests, each number compared with the engine's own module:


# %% name="scratch-check"
def rounded(value):
    return "-" if value is None or value == () else ", ".join(f"{v:.2f}" for v in np.atleast_1d(value))


shown = []
for who in ("ann", "bob", "cyd", "dan"):
    times = stamps_of(who)
    mine = of_one(times)
    ours = RequestMetrics.of(times["arrived"][0], times["token"], next(iter(times["scheduled"]), None))
    for name, value in mine.items():  # the same number, or None in both
        other = getattr(ours, name)
        assert value is other is None or np.allclose(value, other)
    shown.append([who, *map(rounded, mine.values())])
widgets.table(shown, ["seconds", "queue", "TTFT", "ITL", "TPOT", "latency"])

# %% [markdown] name="scratch-reading"
# Ann's third token came late: Bob's prompt was
# computed in the same step. Bob's only token gives a TTFT and no TPOT. Cyd and Dan have no token yet. They are not
# fast; they are *unmeasured*, and an average that leaves them out says nothing about how long they have been waiting.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The engine writes one event per step, and `reference_impl/observe/metrics.py` derives every number from these. All chapters
# use this one module.

# %% name="engine-source"
print(inspect.getsource(RequestMetrics.of))

# %% [markdown] name="engine-serve-text"
# Five requests at once, two slots (`max_num_seqs=2`), the real course model, the real clock. Prompts of 400, 60, 300,
# 60 and 200 tokens. r1 has a short prompt but the same prefill interval as r0, because both were prefilled in one step.


# %% name="engine-serve"
def real(prompts, outputs, seats):
    config = EngineConfig(num_blocks=512, max_num_seqs=seats, max_num_batched_tokens=2048, prefix_cache="off")
    engine = Engine(model, config)
    for i, (p, n) in enumerate(zip(prompts, outputs, strict=True)):
        engine.add(text[31 * i : 31 * i + p], SamplingParams(max_tokens=n, temperature=0, ignore_eos=True), f"r{i}")
    while engine.has_work():
        engine.step()
    return engine.trace


real([40], [4], 1)  # warm-up: the first steps of a process are slow
served = real([400, 60, 300, 60, 200], [24, 12, 16, 8, 1], seats=2)

# %% [markdown] name="engine-served-text"
# Each request's parts add up: queue and prefill to TTFT, TTFT and the gaps to the latency.

# %% name="engine-served"
parts = []
for i in range(5):
    m = served.metrics(f"r{i}")
    np.testing.assert_allclose(m.queue + m.prefill, m.ttft)
    np.testing.assert_allclose(m.ttft + sum(m.itl), m.latency)
    np.testing.assert_allclose(latency.request_seconds(m.queue, m.prefill, m.tpot or 0, m.num_output_tokens), m.latency)
    times = (m.queue, m.prefill, m.ttft, m.tpot, m.latency)
    parts.append([f"r{i}", m.num_output_tokens, *("-" if x is None else f"{1000 * x:,.1f}" for x in times)])
load = served.workload()
print(f"together: {load.num_output_tokens} tokens in {load.duration:.2f} s: {load.throughput:.0f} tokens/s")
widgets.table(parts, ["request", "tokens", "queue, ms", "prefill", "TTFT", "TPOT", "latency"])

# %% [markdown] name="breakdown-text"
# ### One request, taken apart
#
# The same trace as a picture: each request as queue, prefill and gaps. The table says what limits each part.

# %% name="breakdown" jupyter={"source_hidden": true}
fig = figure(7.6, 2.6)
ax = fig.subplots()
names = [f"r{i}" for i in range(5)]
for y, name in enumerate(names):
    m = served.metrics(name)
    ax.barh(y, m.queue, color=GREY, hatch="..", edgecolor="white", label="queue" if not y else None)
    ax.barh(y, m.prefill, left=m.queue, color=BLUE, label="prefill, up to the first token" if not y else None)
    left = m.ttft
    for k, gap in enumerate(m.itl):
        ax.barh(
            y, gap, left=left, color=SKY, edgecolor="white", linewidth=0.6, label="gaps" if not y and not k else None
        )
        left += gap
    ax.plot(m.ttft, y, marker="v", color=INK, markersize=5)
ax.set_yticks(range(5), names)
ax.invert_yaxis()
tidy(ax, "seconds since arrival")
fig.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
gaps = 1e3 * np.array(served.metrics("r0").itl)
show(
    fig,
    "Five requests with two slots. Two start at once. The others first wait in the queue, the last the longest; "
    f"their prefill is short against the wait. The longest gap of r0 is {gaps.max():,.0f} ms, the median {np.median(gaps):,.0f}.",
)

# %% [markdown] name="breakdown-table"
# | part | what bounds it | what shortens it |
# |---|---|---|
# | queue | slots, free KV cache blocks, and the requests ahead of you | more replicas, admission control, priorities; anything that shortens the other parts for everybody |
# | prefill | arithmetic, as long as the prompt is longer than the ridge allows; below that, one read of the weights | fewer tokens to compute (a shorter prompt, or a beginning that is cached already: a *prefix hit*, chapter 06), more FLOP/s, lower precision |
# | first token | the end of the prefill: the logits of the last position and one draw. No step of its own | `d_sampling` measures the draw |
# | gaps | bytes: all weights once per step, and every running request's keys and values; plus the prefills in the step | fewer bytes, more bandwidth, smaller chunks of prompts; several tokens per step (drafts, chapter 08) |
#
# What you measure at the client also includes network, tokenization and detokenization. None of that is in this trace.

# %% [markdown] name="virtual-text"
# ### A virtual GPU
#
# To see many requests on a machine we do not have, we keep the engine (the real scheduler, the real block accounting,
# the real trace) and replace two parts. The **executor** returns the same placeholder token for every request. The
# **clock** advances, in each step, by the time that the formula gives for that step. So the *order* of events is the
# scheduler's. The *times* are the formula's, for a stated MFU and MBU, without launches and host work. The tokens are
# meaningless. The code is folded; you need only its two functions. `serve(deployment, arrivals, budget)` runs a list of
# (second, prompt tokens, output tokens) and gives the trace. `poisson(rate, count, seed)` makes such a list.


# %% name="virtual" jupyter={"source_hidden": true}
class VirtualGPU:
    """Executor and clock in one: a step takes what theory says; every token is number 7."""

    def __init__(self, deployment):
        self.deployment, self.time = deployment, 0.0

    def now(self):
        return self.time

    max_in_flight = 1

    def submit(self, step):
        started, rows = self.time, step.rows
        self.time += self.deployment.step_seconds([r.num_tokens for r in rows], [r.start for r in rows])
        return Reply(step.step_id, tuple((7,) if r.samples else () for r in rows), {}, started, self.time)

    def collect(self, ticket):
        return ticket

    def close(self):
        pass


def weightless(shape, longest=16_384):  # what the engine asks a model for, without its weights
    # One thin layer: the engine checks that this machine has memory for the cache, and it lacks the GPU's.
    config = parse_model_config({
        "architectures": ["LlamaForCausalLM"], "vocab_size": shape.vocab_size, "hidden_size": 8,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5, "max_position_embeddings": longest, "torch_dtype": "bfloat16", "eos_token_id": 0,
    })  # fmt: skip
    rotary = SimpleNamespace(max_position=longest)
    return SimpleNamespace(config=config, dtype=torch.bfloat16, device=torch.device("cpu"), rotary=rotary)


def serve(deployment, arrivals, budget=1024, seats=256, names=()):
    """arrivals: (second, prompt tokens, output tokens), in order -> the trace."""
    gpu = VirtualGPU(deployment)
    config = EngineConfig(
        num_blocks=deployment.cache_tokens() // 16,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        prefix_cache="off",
    )
    engine = Engine(weightless(deployment.shape), config, Parts(executor=gpu, clock=gpu, kv_cache=object()))
    coming, names = deque(arrivals), iter(names)
    while coming or engine.has_work():
        if not engine.has_work():
            gpu.time = max(gpu.time, coming[0][0])
        while coming and coming[0][0] <= gpu.time:
            second, prompt, output = coming.popleft()
            step_end, gpu.time = gpu.time, second  # stamp it when it arrived, not when the loop next looks
            engine.add([1] * prompt, SamplingParams(max_tokens=output, ignore_eos=True), next(names, None))
            gpu.time = step_end
        engine.step()
    return engine.trace


def poisson(rate, count, seed, prompts=(1000,), shares=(1.0,), mean_output=100):
    rng = np.random.default_rng(seed)
    seconds = np.cumsum(rng.exponential(1 / rate, count))
    outputs = np.minimum(1 + rng.exponential(mean_output - 1, count).astype(int), 4 * mean_output)
    return list(zip(seconds.tolist(), rng.choice(prompts, count, p=shares).tolist(), outputs.tolist(), strict=True))


alone = serve(h100, [(0.0, 1000, 50)]).metrics("0")
np.testing.assert_allclose(alone.ttft, h100.prefill_seconds(1000))
print(f"one request alone: TTFT {format_seconds(alone.ttft)}, TPOT {format_seconds(alone.tpot)}")

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# Now the question from the top. Requests arrive at random (Poisson), at higher and higher rates, with two seeds. The
# budget is 1,024 tokens per step, so about one prompt is read per step. The dashed line is a classic formula of
# queueing theory (M/G/1, Pollaczek and Khinchine): customers are served *one at a time*, and each takes as long as the
# arithmetic of a mean request on this GPU. It gives a **mean**, and nothing about p95: for a percentile one would have to
# assume how waits are distributed. So compare it with the column of means only.

# %% name="sweep-loads"
work = latency.engine_pass_flops(llama, 1000) + 99 * latency.decode_flops(llama, 1050)
service = work / (h100.mfu * h100.device.peak())  # GPU arithmetic of one request, in seconds
rates, seeds = (6, 12, 19, 24, 29, 32), (0, 1)
loads = {rate: [serve(h100, poisson(rate, 20 * rate, seed)).workload() for seed in seeds] for rate in rates}


def over_seeds(rate, measure):
    return float(np.mean([measure(w) for w in loads[rate]]))


def p95_of(part):
    return lambda w: percentile([getattr(m, part) for m in w.requests], 95)


print(f"a request costs {format_seconds(service)} of arithmetic: at most {1 / service:.1f} requests per second")

# %% name="predict"
widgets.predict("01c-ttft", "p95 of the time to first token over one idle prefill, at 32 requests per second?", "times")

# %% name="sweep"
one_at_a_time = 0  # variance of the service time over its mean squared: all requests are alike


def sweep_row(rate):
    busy = queueing.utilization(rate, service)
    formula = queueing.mg1_wait_seconds(service, busy, one_at_a_time) + h100.prefill_seconds(1000)
    share = over_seeds(rate, lambda w: sum(m.queue for m in w.requests) / sum(w.ttft))
    p95 = [over_seeds(rate, p95_of(part)) for part in ("queue", "prefill", "ttft")]
    times = [*p95, over_seeds(rate, lambda w: np.mean(w.ttft)), formula]
    rest = f"{share:.0%}", f"{over_seeds(rate, lambda w: w.throughput):,.0f}"
    return [rate, f"{busy:.0%}", *(f"{1e3 * t:,.0f}" if np.isfinite(t) else "none" for t in times), *rest]


widgets.table(
    [sweep_row(rate) for rate in rates],
    ["requests/s", "busy", "p95 queue, ms", "p95 prefill", "p95 TTFT", "mean TTFT", "formula", "queue's share of TTFT",
     "tokens/s"],
)  # fmt: skip

# %% name="sweep-answer"
widgets.reveal("01c-ttft", over_seeds(rates[-1], p95_of("ttft")) / h100.prefill_seconds(1000))

# %% name="sweep-figure" jupyter={"source_hidden": true}
TTFT_OBJECTIVE, TPOT_OBJECTIVE = 0.25, 0.05
fig = figure(7.8, 3.3)
left, right = fig.subplots(1, 2)
fine = np.linspace(1, 0.995 / service, 200)
waits = queueing.mg1_wait_seconds(service, queueing.utilization(fine, service), one_at_a_time)
one_by_one = waits + h100.prefill_seconds(1000)
left.plot(fine, 1e3 * one_by_one, "--", color=INK, label="formula: mean TTFT, one at a time")
left.plot(rates, [1e3 * over_seeds(r, lambda w: np.mean(w.ttft)) for r in rates], "o-", color=BLUE, label="mean TTFT")
left.plot(rates, [1e3 * over_seeds(r, p95_of("ttft")) for r in rates], "^-", color=RED, label="p95 TTFT")
left.plot(
    rates, [1e3 * over_seeds(r, p95_of("prefill")) for r in rates], "s-", color=GREEN, label="p95 prefill interval"
)
left.axvline(1 / service, color=GREY, linewidth=1)
left.set_yscale("log")
tidy(left, "requests per second", "ms", "time to first token")
left.legend(fontsize=7, frameon=False)
right.plot(
    rates, [over_seeds(r, lambda w: len(w.requests) / w.duration) for r in rates], "o-", color=BLUE, label="finished"
)
met = [over_seeds(r, lambda w: w.goodput(TTFT_OBJECTIVE, TPOT_OBJECTIVE)) for r in rates]
right.plot(
    rates,
    met,
    "^--",
    color=RED,
    label=f"goodput: TTFT {1e3 * TTFT_OBJECTIVE:.0f} ms, TPOT {1e3 * TPOT_OBJECTIVE:.0f} ms",
)
right.axvline(1 / service, color=GREY, linewidth=1)
tidy(right, "requests per second", "requests per second", "served, and served in time")
right.legend(fontsize=7, frameon=False)
show(
    fig,
    "Left: TTFT over the arrival rate on a log axis. The p95 of the prefill interval goes from "
    f"{1e3 * over_seeds(rates[0], p95_of('prefill')):.0f} to {1e3 * over_seeds(rates[-1], p95_of('prefill')):.0f} ms, that of "
    f"TTFT from {1e3 * over_seeds(rates[0], p95_of('ttft')):.0f} to {1e3 * over_seeds(rates[-1], p95_of('ttft')):.0f} ms, "
    "steeply near the capacity, which is marked. Right: requests finished per second keep rising; those "
    "in time follow up to the capacity and then fall.",
)

# %% [markdown] name="sweep-reading"
# Read three things.
#
# - **The prefill interval is not what grows.** Its p95 doubles over most of the range, because the decodes of other
#   requests take part of each budget, and a prompt then needs two steps. What grows is the queue, and above the
#   capacity it grows for as long as the load lasts.
# - **The formula has the right shape and the wrong number.** Up to about two thirds of the capacity it agrees with the
#   mean by luck: in the engine a new request waits for the step in flight, in the formula for the customers ahead of
#   it. Near the capacity it is too pessimistic, because its customer occupies the server until the last token, while
#   the engine prefills a new prompt in a step that also serves all other requests. Above the capacity no steady-state
#   formula holds: the queue grows as long as the load lasts, and the number you report depends on when you stop
#   measuring. (Chapter 03, `b_scheduling`, has a widget in which you vary the load, the arrivals and the seats, with
#   more formulas.)
# - **Throughput does not show it.** At the highest rate the GPU produces the most tokens per second, and many users are
#   unhappy. Goodput shows it.
#
# The last column, on one GPU, is also the throughput *per GPU*. For a deployment on several GPUs, divide by their
# number.

# %% [markdown] name="streams-text"
# ### One stream and all streams
#
# Two rates are called "tokens per second". A *stream's* rate is 1 / TPOT: what one user sees. The *aggregate* is the
# sum over all users. For a single request they agree. Measured here on the course model, decode only (folded: the
# median step at each number of requests), and by formula for the large machine.

# %% name="streams-measure" jupyter={"source_hidden": true}
sizes = (1, 2, 4, 8, 16, 32) + ((64, 128) if on_gpu else ())
seen = []
for size in sizes:
    trace = real([16] * size, [24] * size, seats=size)
    steps = sorted(
        s.finished_at - s.started_at for s in trace.steps() if len(s.rows) == size and s.rows[0].num_tokens == 1
    )
    seen.append(steps[len(steps) // 2])  # the median step
seen = np.array(seen)
slope = (seen[-1] - seen[0]) / (sizes[-1] - 1)  # a step = a fixed part + a cost per row, from the two ends
line = seen[0] + slope * (np.array(sizes) - 1)

# %% name="streams"
large = np.array([h100.tpot(1000, size) for size in sizes])
widgets.table(
    [[size, f"{1 / t:.0f}", f"{size / t:,.0f}", f"{1e3 * t / size:.2f} ms", f"{1e3 * t:.2f} ms", f"{1 / f:.0f}",
      f"{size / f:,.0f}"] for size, t, f in zip(sizes, seen, large, strict=True)],
    ["requests", "here: tokens/s of a stream", "aggregate", "1 / aggregate", "ITL", "H100, formula: of a stream",
     "aggregate"],
)  # fmt: skip

# %% name="streams-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.9)
left, right = fig.subplots(1, 2)
for ax, times, title in (
    (left, seen, f"course model on this {model.device.type}, measured"),
    (right, large, "Llama-3-8B, H100, formula"),
):
    ax.plot(sizes, np.array(sizes) / times, "o-", color=BLUE, label="aggregate")
    ax.plot(sizes, 1 / times, "^-", color=ORANGE, label="per stream")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [str(s) for s in sizes])
    ax.minorticks_off()
    ax.set_yticks([50, 100, 200, 500, 1000, 2000, 5000], "50 100 200 500 1k 2k 5k".split())
    tidy(ax, "requests that decode together", "tokens/s", title)
left.plot(sizes, np.array(sizes) / line, "--", color=INK, linewidth=1, label="fixed part + cost per row")
left.legend(fontsize=7, frameon=False)
show(
    fig,
    "Tokens per second over the number of requests that decode together, log-log. By formula for an 8B model on an H100 the "
    "aggregate rises with the batch and the rate of one stream falls. Measured for the course model, from 1 request to "
    f"{sizes[-1]}: aggregate {1 / seen[0]:,.0f} to {sizes[-1] / seen[-1]:,.0f}, one stream {1 / seen[0]:,.0f} to "
    f"{1 / seen[-1]:,.0f}.",
)

# %% [markdown] name="streams-reading"
# Batching never makes a stream faster. It makes it slower, though only slightly as long as what all requests share is
# most of the step: reading the weights, and in a model this small the fixed cost of a pass. (A measured point that says
# otherwise was disturbed by other programs.) And `1 / aggregate` is not the gap of any stream: at 32 requests, the time
# between two tokens *of the system* is a 32nd of what each user waits.
#
# ### Why long chats slow down (more)
#
# Each turn of a chat includes the whole history. If nothing is kept between turns, the prompt grows and so does TTFT.
# And each decode step reads a longer cache, so every stream in the batch slows down.

# %% name="long-chat"
turns = np.array([1, 2, 4, 8, 16, 24])
history = turns * 300  # 100 tokens in and 200 out per turn
first = [h100.prefill_seconds(int(n)) for n in history]
kept = [h100.prefill_seconds(int(n), int(n) - 100) for n in history]
assert 48 * history[-1] <= h100.cache_tokens()  # 48 such chats fit into the memory of the GPU
stream = [h100.tpot(int(n), 48) for n in history]
widgets.table(
    [[int(turn), int(tokens), *map(format_seconds, times)]
     for turn, tokens, *times in zip(turns, history, first, kept, stream, strict=True)],
    ["turn", "tokens", "prefill", "with the history cached", "a step of 48 such chats"],
)  # fmt: skip

# %% name="long-chat-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.6)
ax = fig.subplots()
ax.plot(turns, 1e3 * np.array(first), "o-", color=BLUE, label="first token, nothing kept")
ax.plot(turns, 1e3 * np.array(kept), "s--", color=GREEN, label="first token, history cached")
ax.plot(turns, 1e3 * np.array(stream), "^-", color=ORANGE, label="each further token, 48 chats at once")
tidy(ax, "turn of the chat", "ms, no queue")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Times over the turns of a chat: the first token takes longer with every turn unless the history is cached; each "
    "further token also slows down, since a step reads longer caches.",
)

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# ### Two requests
#
# A has a prompt of 8,000 tokens. B comes 0.1 s later with 2,000. A step may compute 16,384 tokens, so A's prompt is read
# at once. Find: B waits until A's prompt is done. Then B's prompt shares a step with A's decode, and A's gap
# is long. The timeline comes from the engine's events.

# %% name="gantt"
pair = [(0.0, 8000, 30), (0.1, 2000, 30)]
whole = serve(h100, pair, budget=16_384, names="AB")
A, B = whole.metrics("A"), whole.metrics("B")
print(f"A: first token after {1e3 * A.ttft:.0f} ms, longest gap {1e3 * max(A.itl):.0f} ms. B: waits {1e3 * B.queue:.0f} ms, "
      f"then {1e3 * B.prefill:.0f} ms of prefill: TTFT {1e3 * B.ttft:.0f} ms")  # fmt: skip
widgets.timeline(whole, by="seconds")

# %% [markdown] name="server-text"
# ### The same numbers from a server *(more)*
#
# What you saw so far came from the engine's own trace. A client sees less, and measures what a user waits for. In two
# terminals:
#
# ```
# inferlab serve target
# inferlab bench serve --workload chat --rate 1 --num 30 --max-prompt 1000 --max-output 64 --vocab-size 4096
# ```
#
# The first is this engine as a server. Open <http://127.0.0.1:8000/status> while the second one runs: which requests
# wait, prefill and decode, how many blocks are free, and the prefix cache's hit rate. The second one sends chats at
# random moments, without waiting for answers, and prints the metrics of this notebook with confidence intervals: TTFT,
# TPOT, ITL, latency, goodput, attainment. (`inferlab bench serve` measures any OpenAI-compatible server.)
#
# Find three things. TTFT is given twice, from the moment a request was *planned* and from the moment it was *sent*: why
# is the first one the honest one, should the client fall behind? Raise `--rate` until the page shows waiting requests:
# which number grows first, TTFT or TPOT? And the interval for the p99 of 30 requests has no upper end: why?

# %% [markdown] name="targets-text"
# ### What an objective allows
#
# Objectives depend on the use. Those below are examples, not laws; the widget uses the same. Ask what they allow: after
# 30 % of the TTFT for network and queue, how long a prompt can be prefilled; and within the total, how many tokens can
# be generated. Llama-3-8B in bf16 on one H100, and Llama-3-70B in bf16 on four with tensor parallelism; MFU 50 %, MBU
# 80 %. The token counts are for a prompt of 1,000 tokens, in a batch of 16.

# %% name="targets"
large70 = Deployment(shape_of("llama-3-70b"), device("H100"), num_devices=4, mfu=0.5, mbu=0.8)


def allowed(use):
    ttft, total = USES[use].ttft, USES[use].total
    longest = [d.longest_prompt(0.7 * ttft) for d in (h100, large70)]
    times = [request_time(d, 1000, 100, queue=0.3 * ttft, batch=16) for d in (h100, large70)]
    return [use, f"{ttft:.2f} s", *longest, f"{total:.1f} s", *(t.tokens_within(total) for t in times)]


for what, words_per_minute in (("speech", 150), ("silent reading", 250)):
    per_token = 60 / (words_per_minute * 4 / 3)  # about 4 tokens for 3 English words
    print(f"{what} of {words_per_minute} words a minute uses up a token every {1e3 * per_token:.0f} ms: "
          "a TPOT below that is enough")  # fmt: skip
widgets.table(
    [allowed(use) for use in ("voice", "code completion", "chat")],
    ["use", "TTFT", "prompt that fits, 8B", "70B", "in all", "tokens that fit, 8B", "70B"],
)

# %% [markdown] name="targets-reading"
# A prompt above 8,192 tokens exceeds the context of Llama 3; Llama 3.1 has the same shapes and a longer context. Batch
# jobs are left out on purpose: nobody waits for their first token (section 7). For voice, the model's TTFT is only a
# part: speech recognition comes before it and speech synthesis after.
#
# The widget does this calculation for any pair. Try: 70B on one H100 (it says why not); fewer bits per weight; a longer
# queue, which costs TTFT and nothing else.

# %% name="explore"
widgets.latency_budget("llama-3-8b", use="chat", prompt=2048, output=256)

# %% [markdown] name="worked"
# ### Worked problem 5: does it keep its objectives?
#
# The course's deployment (chapter 00): Llama-3-70B in 16 bits on four H100 with tensor parallelism, 139.0 GB of weights
# to read, of which 2.1 GB are the output matrix. Assume half of the arithmetic and 80 % of the bandwidth, and 2 ms of
# all-reduces in a decode step. Chats have prompts of 2,000 tokens and get 200. The objective: a first token within 1 s,
# at most 25 ms per further token.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_5_a_load_of_chats_and_its_objectives -->
#
# *Which prefill and TPOT does a chat see, beside 31 others? How much queue does the TTFT allow? About how many chats per
# second are served? Leave the all-reduces of the prefill out.*
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_5_a_load_of_chats_and_its_objectives -->
#
# <details><summary>Answer</summary>
#
# Prefill: 2 · 68.45 · 10⁹ · 2,000 = 273.8 TFLOP, and 5.2 TFLOP of attention (4 · 80 · 64 · 128 · 2,000 · 2,001 / 2): 279
# TFLOP at 1,978 TFLOP/s: **141 ms**. So 859 ms are left for queue and network.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_5_a_load_of_chats_and_its_objectives -->
#
# TPOT at a mean context of 2,100: 139.0 + 32 · 2,100 · 327,680 bytes = 139.0 + 22.0 = 161.0 GB at 0.8 · 13.4 TB/s = 15.0
# ms, and 2 ms: **17.0 ms**, within the objective. 200 tokens take 0.141 + 199 · 0.017 = 3.5 s.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_5_a_load_of_chats_and_its_objectives -->
#
# Per chat the machine spends 141 ms of prefill and a 32nd of 199 steps, 106 ms: 247 ms, so about **4 chats per second**.
# More than half of the machine's time is prefill. And every one of these prefills, if it is computed whole in a step,
# lengthens a gap of all 31 others from 17 to more than 140 ms: the mean TPOT of a chat then is not 17 but about 40 ms, and
# misses. The next chapters are about that.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_5_a_load_of_chats_and_its_objectives -->
#
# </details>

# %% [markdown] name="remedies-text"
# ### "TTFT is too high." "ITL is too high."
#
# Which remedy helps which number? Computed for one request of 4,000 prompt tokens among 16 that decode at
# that context, at the same MFU and MBU unless the row says otherwise: the factor by which prefill and TPOT become shorter
# and capacity becomes larger, so above 1 is better. *Capacity* is how many such requests (200 tokens out) are served per
# second. It determines how long the queue gets.


# %% name="remedies"
def numbers(d, prompt=4000, cached=0, batch=16, replicas=1):
    prefill, tpot = d.prefill_seconds(prompt, cached), d.tpot(prompt, batch)
    return prefill, tpot, replicas / (prefill + 199 * tpot / batch)


def changed(**fields):
    return Deployment(**({"shape": llama, "device": device("H100"), "mfu": 0.5, "mbu": 0.8} | fields))


# %% [markdown] name="remedies-levers-text"
# Ten changes, one at a time:

# %% name="remedies-levers"
base, h200 = numbers(h100), device("H200")
levers = {
    f"H200: bandwidth x{h200.bandwidth / h100.device.bandwidth:.2f}, same FLOP/s": numbers(changed(device=h200)),
    "two GPUs, tensor parallel": numbers(changed(num_devices=2)),
    "two GPUs, two replicas": numbers(h100, replicas=2),
    "fp8 weights and arithmetic": numbers(changed(weight_bits=8, precision="fp8")),
    "4-bit weights, bf16 arithmetic": numbers(changed(weight_bits=kv_cache.bits_per_weight(4, 128))),
    "8-bit KV cache": numbers(changed(kv_bytes=1)),
    "prefix cache hit, 3,000 of 4,000": numbers(h100, cached=3000),
    "prompt and context halved": numbers(h100, prompt=2000),
    "batch 4 instead of 16": numbers(h100, batch=4),
    "kernels: MFU 50 -> 70 %": numbers(changed(mfu=0.7)),
}
print(f"before: prefill {format_seconds(base[0])}, TPOT {format_seconds(base[1])}")
widgets.table(
    [[name, f"{base[0] / found[0]:.2f}x", f"{base[1] / found[1]:.2f}x", f"{found[2] / base[2]:.2f}x"]
     for name, found in levers.items()],
    ["change", "prefill", "TPOT", "capacity"],
)  # fmt: skip

# %% [markdown] name="remedies-reading"
# - The prefill of a long prompt needs arithmetic: more FLOP/s, or fewer tokens. Faster memory does nothing for it, nor
#   do 4-bit weights that are computed in 16 bits. (In a real engine 4-bit weights may even slow it a little:
#   dequantizing them is work, too.)
# - TPOT needs fewer bytes. It also depends on the batch: a smaller one is faster per stream and costs capacity.
# - **If the queue is the problem, look at the last column.** Lists of remedies for TTFT tend to stop at the prefill.
#   But a second replica does not change any prefill and still fixes a TTFT that consists of waiting; so do admission
#   control (reject early) and priorities (decide which requests wait).
# - Paged KV (chapter 04) and fewer KV heads (chapter 09) raise how many requests fit. Drafts (chapter 08) shorten gaps.

# %% [markdown] name="chat-text"
# **A chat with 200 tokens in and 500 out: what do you optimise?** One request, on the same machine:

# %% name="chat"
for batch in (1, 64):
    r = request_time(h100, 200, 500, batch=batch)
    flops_in, flops_out = (
        latency.prefill_flops(llama, 200),
        sum(latency.decode_flops(llama, 200 + i) for i in range(1, 500)),
    )
    print(f"batch {batch:2d}: prefill {format_seconds(r.prefill)}, decode {format_seconds(r.decode)}: {r.decode / r.latency:.1%} of the "
          f"latency and {flops_out / (flops_in + flops_out):.0%} of the operations; {batch / r.tpot:,.0f} tokens/s together")  # fmt: skip

# %% [markdown] name="errata-ttft"
# Decode is nearly all of the time. For the user that means: fewer bytes per step. For the operator: larger batches, as
# far as KV memory and the TPOT objective allow. Here a batch of 64 slows each stream down by a quarter, and the GPU
# produces many times the tokens.
#
# ## 7. What the cheat sheets get wrong
#
# **"TTFT is the prefill latency."** (E01.8) Some sources say so, another says queue plus prefill. A user's clock starts
# when the request is sent. In section 5 the queue's share of TTFT grew with the load until it was most of it. Here is
# the same p95 with the clock started at the wrong place:


# %% name="errata-ttft-cell"
def two_clocks(rate):
    right, wrong = over_seeds(rate, p95_of("ttft")), over_seeds(rate, p95_of("prefill"))
    return [rate, f"{1e3 * right:,.0f} ms", f"{1e3 * wrong:,.0f} ms"]


widgets.table([two_clocks(rate) for rate in (6, 29, 32)], ["requests/s", "p95 from the arrival", "from the first step"])

# %% [markdown] name="errata-tpot"
# **"TPOT is a system metric and at least as large as ITL"; "ITL is the variance of token times"; "they are synonyms";
# "latency = TTFT + tokens × TPOT".** (E01.9) Four statements from three sources, each wrong as it stands. TPOT is one
# number per request. ITL is the list of gaps, and its variance is jitter. For *one* request the mean gap is TPOT. Over a load, one
# mean counts requests and the other counts tokens, and either can be larger:


# %% name="errata-tpot-cell"
def load_of(*gap_lists):
    requests = (RequestMetrics.of(0.0, list(np.cumsum([0.0, *gaps]))) for gaps in gap_lists)
    return WorkloadMetrics.of((0.0, m) for m in requests)


for gaps in (([10] * 9, [10, 10, 200]), ([100] * 9, [10] * 3)):
    w = load_of(*gaps)
    print(
        f"gaps {gaps[0][0]} ms x {len(gaps[0])} and {gaps[1]} ms: mean TPOT {np.mean(w.tpot):.1f}, mean ITL {np.mean(w.itl):.1f}"
    )
for n in (2, 20, 500):
    right = latency.request_seconds(0.0, 0.030, 0.006, n)
    print(f"{n:3d} tokens, TTFT 30 ms, TPOT 6 ms: {1e3 * right:.0f} ms; with N instead of N - 1 the part after the first "
          f"token is {n / (n - 1):.2f} times as long")  # fmt: skip
tokens = [0.03 + 0.006 * i for i in range(21)]
client = RequestMetrics.of(0.0, tokens[::2])  # a server that sends two tokens at a time
print(
    f"sent in pairs, the client sees {len(client.itl)} gaps of {1e3 * np.mean(client.itl):.0f} ms; TPOT is still {1e3 * (tokens[-1] - tokens[0]) / 20:.0f} ms"
)

# %% [markdown] name="errata-stutter"
# A related rule of thumb says that readers notice gaps above about 100 ms. A mean cannot tell you. Look at the *share*
# of gaps above it, and the worst. A load with 10 % prompts of 8,000 tokens, 8 requests per second, with a budget for a
# whole prompt per step, and with chunks:


# %% name="errata-stutter-cell"
def mixed(deployment, budget, rate=8, seeds=(0, 1)):
    return [
        serve(
            deployment, poisson(rate, 160, seed, prompts=(400, 8000), shares=(0.9, 0.1), mean_output=150), budget
        ).workload()
        for seed in seeds
    ]


def stutter(budget, found):
    itl = np.concatenate([w.itl for w in found])
    times = (f"{1e3 * t:.1f} ms" for t in (itl.mean(), np.percentile(itl, 99)))
    return [budget, *times, f"{1e3 * itl.max():.0f} ms", f"{np.mean(itl > 0.1):.2%}"]


sweep = {budget: mixed(h100, budget) for budget in (96, 128, 192, 512, 2048, 8192)}
widgets.table(
    [stutter(budget, found) for budget, found in sweep.items()],
    ["tokens per step", "mean gap", "p99", "worst", "above 100 ms"],
)

# %% [markdown] name="errata-tension"
# With the largest budget p99 looks better than with 2,048, and the worst gap is far longer: fewer than one gap in a
# hundred is stalled, so p99 does not see it. A single percentile is not enough either.
#
# **"TTFT and tokens per second are independent, and in tension."** (E01.11) Not both. Two metrics in tension depend on
# something in common: here, how many tokens a step may compute. The same sweep as a curve, p95 TTFT against p99 TPOT.
# And one lever that moves the whole curve: fp8 instead of bf16.

# %% name="errata-tension-cell"
sweep8 = {budget: mixed(changed(weight_bits=8, precision="fp8"), budget) for budget in (96, 192, 8192)}


def corner(found):
    return np.mean([(percentile(w.ttft, 95), percentile(w.tpot, 99)) for w in found], axis=0) * 1e3


widgets.table(
    [[name, budget, *(f"{t:,.1f} ms" for t in corner(found))]
     for name, curve in (("bf16", sweep), ("fp8", sweep8)) for budget, found in curve.items()],
    ["format", "tokens per step", "p95 TTFT", "p99 TPOT"],
)  # fmt: skip

# %% name="errata-tension-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 3.1)
ax = fig.subplots()
for name, curve, colour, mark in (("bf16", sweep, BLUE, "o-"), ("fp8 weights and arithmetic", sweep8, ORANGE, "s--")):
    points = np.array([corner(found) for found in curve.values()])
    ax.plot(points[:, 0], points[:, 1], mark, color=colour, label=name)
    for (x, y), budget in zip(points, curve, strict=True):
        ax.annotate(f"{budget}", (x, y), textcoords="offset points", xytext=(6, 3), fontsize=8)
tidy(ax, "p95 TTFT, ms", "p99 TPOT, ms", "numbers at the points: tokens that one step may compute")
ax.set_xlim(0)
ax.set_ylim(0)
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "p95 TTFT against p99 TPOT for several step budgets. Below 192 tokens TPOT stays and TTFT is much longer; from 192 "
    "to 512 TTFT falls and TPOT rises; beyond, TPOT rises further and TTFT falls no more. The curve for fp8 lies nearer "
    "to the origin.",
)

# %% name="errata-tension-floor"
flat = latency.flat_prefill_tokens(h100.device, mfu=h100.mfu) / h100.mbu
print(
    f"up to about {flat:.0f} tokens a step costs one read of the weights: a smaller budget gains nothing and reads more often"
)

# %% [markdown] name="errata-tension-reading"
# Read the curve from the right. Budgets below the number printed above no longer shorten a step. They only make prompts
# take more steps, so TTFT grows with no gain. From 192 to 512 you trade: TTFT falls, TPOT rises. Above 512 TPOT rises
# further and TTFT falls no more: a step then holds several prompts, and everybody in it waits for its end. (An engine
# that prefills first while decodes stall trades further; chapter 03.) So the two are not independent, and the tension
# is not a law either: there is a knee, and there are levers such as fp8, prefix hits or a second GPU that move the
# whole curve towards the origin.
#
# **A timeline in which the second request is prefilled beside the first one's decode, and neither slows down.**
# (E01.14) The bars of such a picture are drawn by hand. Section 6 drew ours from events: B waits until A's prompt is
# done, and A pays for B's prompt with a long gap. With chunks of 1,024 the two share steps:

# %% name="errata-gantt-cell"
chunked = serve(h100, pair, budget=1024, names="AB")


def pair_row(name, trace):
    a, b = trace.metrics("A"), trace.metrics("B")
    times = (a.ttft, max(a.itl), a.latency, b.queue, b.ttft, b.latency)
    return [name, *(f"{1e3 * t:.0f}" for t in times)]


widgets.table(
    [pair_row("whole", whole), pair_row("chunks of 1,024", chunked)],
    ["ms", "A: TTFT", "longest gap", "done after", "B: queue", "TTFT", "done after"],
)

# %% name="errata-gantt-figure"
widgets.timeline(chunked, by="seconds")

# %% [markdown] name="errata-batch"
# ### A batch job (more)
#
# **"Batch processing wants a TTFT below 2 s."** (E01.15) A batch job has no reader. Take 240 documents of 1,500 tokens
# that are all there at the start. What does it take to give *each* its first token within 2 s? And what if only a
# deadline of one minute counts?


# %% name="errata-batch-cell"
def job(gpus, documents=240):  # each GPU gets an equal share; all begin at 0
    rng = np.random.default_rng(0)
    outputs = 50 + rng.integers(0, 201, documents)
    mine = [(0.0, 1500, int(n)) for n in outputs[::gpus]]
    return serve(h100, mine, budget=8192).workload()


jobs = {gpus: job(gpus) for gpus in (1, 2, 4, 6, 8)}
widgets.table(
    [[gpus, f"{max(w.ttft):.1f} s", max(w.ttft) <= 2, f"{w.duration:.1f} s", f"{gpus * w.duration:.1f}",
      f"{w.throughput:,.0f}"] for gpus, w in jobs.items()],
    ["GPUs", "last first token", "meets 2 s", "done after", "GPU-seconds", "tokens/s per GPU"],
)  # fmt: skip

# %% [markdown] name="errata-batch-reading"
# One GPU meets the deadline with time to spare, and gives the most tokens per GPU-second. The TTFT objective requires
# several times the machines for a number that nobody looks at. Give interactive work TTFT and TPOT; give batch work a
# deadline, a price, or tokens per second.
#
# ### What bounds the gaps (more)
#
# **"FlashAttention and PagedAttention cut the bytes a decode step reads; the keys and values are the bottleneck."**
# (E05.14) Chapter 00b has the whole ledger. Here is what one step of Llama-3-8B must read for one request at a context
# of 8,192, with each lever applied. FlashAttention keeps the scores on the chip, so count the bytes they would take.
# Paging avoids reservations, so count the memory that is held. (The 4-bit weights leave the output matrix in 16 bits.)

# %% name="errata-bytes-cell"
weights, cache = kv_cache.read_bytes(llama), 8192 * kv_cache.bytes_per_token(llama)
every_head = cache * llama.num_heads / llama.num_kv_heads  # if keys and values were not shared by groups of heads
# One query per head: one row of scores, written, read by the softmax, written, and read again, 2 bytes each.
scores = 4 * 2 * llama.layers * llama.num_heads * 8192
reads = {
    "no FlashAttention": weights + cache + scores,
    "FlashAttention": weights + cache,
    "weights in 4 bits": kv_cache.read_bytes(llama, kv_cache.bits_per_weight(4, 128), 16) + cache,
    "cache in 8 bits": weights + cache / 2,
    "per token, batch 16": weights / 16 + cache,
    "without grouped heads": weights + every_head,
}
print(f"weights {format_bytes(weights)}, keys and values {format_bytes(cache)}: "
      f"{cache / (weights + cache):.0%} of the bytes")  # fmt: skip
request, block = 1000, 16  # a text of 1,000 tokens in an engine that allows 8,192
paged = -(-request // block) * block
print(f"a text of {request:,} tokens: paging holds {format_bytes(paged * kv_cache.bytes_per_token(llama))}, a reservation of 8,192 "
      f"tokens {format_bytes(cache)}; a step reads {format_bytes(request * kv_cache.bytes_per_token(llama))} in both")  # fmt: skip
widgets.table(
    [[name, format_bytes(total), f"{total / reads['FlashAttention']:.3f}"] for name, total in reads.items()],
    ["one step at 8,192", "read per token", "of the bytes"],
)

# %% [markdown] name="errata-bytes-reading"
# Both are good ideas for other reasons: FlashAttention for prefill's memory traffic (chapter 05), paging for capacity
# (chapter 04). The bytes of a decoded token shrink with fewer bits, shared heads, batching and drafts.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Names change; look them up in the version you run.
#
# **vLLM** exports histograms with the prefix `vllm:`, among them `time_to_first_token_seconds`,
# `inter_token_latency_seconds`, `request_queue_time_seconds`, `request_prefill_time_seconds` and
# `e2e_request_latency_seconds`. TTFT there starts when the frontend receives the request. Its newer *per-request*
# metrics, returned with an answer on request (`--enable-per-request-metrics`), define time to first token from when the
# request was *scheduled*, with the queue as a field of its own. Same name, different clock: read the definition before
# you compare.
#
# **`vllm bench serve`** computes TPOT as this course does, `(latency − TTFT) / (N − 1)`, pools ITL over all tokens, and
# takes objectives for goodput (`--goodput ttft:... tpot:...`). Its ITL is measured at the client, so it sees tokens
# that are sent together as one.
#
# **SGLang** exports similar metrics under `sglang:` and has `sglang.bench_serving`, which grew out of vLLM's script.
# Check in your version how it counts a message with several tokens.
#
# **NVIDIA's GenAI-Perf** and its successor AIPerf call `(latency − TTFT) / (N − 1)` of a request "inter-token latency",
# where this course says TPOT. For the gaps between messages AIPerf has a name of its own, "inter-chunk latency".
#
# **MLPerf Inference** (MLCommons) fixes objectives in writing, in the rules of each round. For Llama-2-70B the server
# scenario (v4.0, 2024) allows a p99 TTFT of 2 s and TPOT of 200 ms; the interactive one (v5.0, 2025) 450 ms and 40 ms.
# Its offline scenario has no latency objective at all.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Then compute the metrics from a log yourself: [lab 01](../../labs/01_prefill_decode/metrics_sampling.ipynb), parts 1 to
# 5. The same traps are there: the queue, single tokens, requests without tokens, and two kinds of mean.

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("01_prefill_decode").draw(seed=1, tag="metrics"))

# %% [markdown] name="quiz-more-text"
# Ten more questions on the same topics (more):

# %% name="quiz-more"
widgets.quiz(load_quiz("01_prefill_decode").draw(seed=1, tag="practice"))

# %% [markdown] name="card"
# ## 10. Card
#
# - TTFT = first token − arrival = queue + prefill. Near the capacity the queue is most of it. Stamp the arrival when it
#   happens.
# - N tokens, N − 1 gaps. TPOT = (last − first token) / (N − 1), one per request; undefined for a single token.
# - Latency = TTFT + sum of gaps = TTFT + (N − 1) · TPOT.
# - Mean TPOT counts requests, mean ITL counts tokens. Say which, with the formula.
# - A stream's rate is 1 / TPOT. The aggregate is batch / step time. Batching raises the second, never the first.
# - Stutter: report the share of gaps above 100 ms and the worst gap, not the mean.
# - Throughput per GPU = all output tokens / duration / GPUs. Goodput = requests per second that met every objective.
#   Attainment is the share; requests without a token stay in its denominator.
# - Step budget: too small costs TTFT, too large costs TPOT, far too large costs both. Under load fp8, prefix hits and
#   more GPUs improve both.
# - Long TTFT: is it queue or prefill? Queue: capacity, admission, priority. Prefill: FLOP/s, fewer tokens.
# - Interactive work gets TTFT and TPOT. Batch work gets a deadline or a price.
