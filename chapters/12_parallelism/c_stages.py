# %% [markdown] name="title"
# # 12c · Stages and replicas
#
# About 40 minutes. You need chapters 01 (prefill and decode) and 02 (the KV cache), and of this chapter the idea that a
# layer can be cut (tensor parallelism). Here the cut goes *between* layers, or nothing is cut at all and the model is
# there several times.
#
# **Required:** sections 1 to 5 and the card. Sections 6 to 8 may wait.

# %% name="setup"
import inspect
from dataclasses import replace

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREY, ORANGE, figure, show, tidy
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.parallel.loading import bytes_of_layers
from reference_impl.features.parallel.shares import stages_of
from reference_impl.features.stages.scheduling import Staged
from reference_impl.observe.trace import idle_share
from reference_impl.simulation import Result, simulate_replicas
from reference_impl.simulation.workloads import workload
from reference_impl.theory import pipeline
from reference_impl.theory.collectives import all_reduce_message
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.links import link, transfer_seconds
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.units import format_bytes, format_seconds

torch.set_num_threads(1)  # each stage is one thread with one core
COMMON = {"dtype": "float32", "device": "cpu", "kv_cache_bytes": 16 * 2**20,
          "prefix_cache": "off", "max_model_len": 1024}  # fmt: skip
PROMPT = 128  # tokens of a prompt, which are one step
GREEDY = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def prompts_of(num, length=PROMPT):
    return [[5 + i, *range(100, 99 + length)] for i in range(num)]


def run(llm, prompts, max_tokens=1):
    """The steps of one run, each with the times of its ranks."""
    llm.engine.trace.events.clear()
    llm.generate(prompts, replace(GREEDY, max_tokens=max_tokens))
    return llm.engine.trace.steps()


def decoding(steps):
    return [step for step in steps if all(row.num_tokens == 1 for row in step.rows)]


h100 = device("H100")
llama = shape_of("llama-3-8b")

# %% [markdown] name="question"
# ## 1. A question with a number
#
# A model of 32 layers is cut into four *stages* of eight layers, one on each of four GPUs. Four equal batches come at the
# same moment, and then nothing more. A stage works on one batch at a time, and hands what it has computed to the next
# stage. From the first start to the last end: **what share of the four GPUs' time is idle?**

# %% name="predict"
widgets.predict(
    "12c-bubble", "Idle share of four stages that do four batches and stop?", "percent"
)

# %% [markdown] name="idea"
# ## 2. The idea
#
# Four people wash up: one washes, one rinses, one dries, one puts away. With a single plate three of them stand idle at
# any moment, and the plate is not done sooner than if one person had done all four. With a stack of plates all four
# work, except at the beginning, when the last one has nothing yet, and at the end, when the first one has nothing more.
#
# - A **stage** (*pipeline parallelism*, PP) has some of the layers, their weights, and the keys and values of these
#   layers for all requests. So weights and cache are divided.
# - Between two stages go the hidden states: one vector of `hidden_size` for each token of the step, to one receiver.
#   Tensor parallelism exchanges as much twice in *every layer*, with all ranks.
# - What idles at both ends is the **bubble**.
# - A **replica** (*data parallelism*, DP) is the other extreme: a whole model on each GPU, and nothing exchanged at all.
#   Requests are divided, not the model.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.6)
axes = fig.subplots(1, 3)
names = ("tensor parallel", "pipeline parallel", "replicas")
for ax, name in zip(axes, names, strict=True):
    ax.set_title(name, fontsize=10, loc="left")
    ax.set_xlim(-0.1, 4.1)
    ax.set_ylim(-0.55, 4.2)
    ax.axis("off")
    for gpu, colour in enumerate((BLUE, ORANGE, "#009E73", "#CC79A7")):
        if name == names[0]:
            boxes = [(gpu + 0.05, layer + 0.1, 0.9, 0.75) for layer in range(4)]
        elif name == names[1]:
            boxes = [(0.05, 3 - gpu + 0.1, 3.9, 0.75)]
        else:
            boxes = [(gpu + 0.05, layer + 0.1, 0.9, 0.75) for layer in range(4)]
        for x, y, w, h in boxes:
            hatch = ("", "//", "..", "xx")[gpu]
            patch = {
                "facecolor": colour,
                "alpha": 0.55,
                "hatch": hatch,
                "edgecolor": "white",
            }
            ax.add_patch(
                __import__("matplotlib").patches.Rectangle((x, y), w, h, **patch)
            )
        if name == names[1]:
            ax.text(
                2,
                3 - gpu + 0.47,
                f"GPU {gpu}: eight layers",
                ha="center",
                va="center",
                fontsize=8,
            )
        else:
            ax.text(gpu + 0.5, -0.3, f"GPU {gpu}", ha="center", fontsize=8)
    if name == names[0]:
        ax.text(2, 4.0, "each has a part of every layer", ha="center", fontsize=8)
    elif name == names[2]:
        ax.text(2, 4.0, "each has every layer, whole", ha="center", fontsize=8)
show(
    fig,
    "Three ways to use four GPUs. Tensor parallel: each GPU has a part of every "
    "layer. Pipeline parallel: each GPU has eight layers, whole, one group above the "
    "other. Replicas: each GPU has every layer, whole.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# One rule makes the whole schedule: a stage begins a batch when it is free **and** the batch has left the stage before.


# %% name="scratch-schedule"
def starts(stage_seconds, batches, turns=1):
    """(batch, stage, start, end) of all work; a batch comes back when it is sampled."""
    free = [0.0] * len(stage_seconds)  # when each stage has nothing more to do
    ready = [0.0] * batches  # when each batch may enter the first stage
    work = []
    for _ in range(turns):
        for batch in range(batches):
            at = ready[batch]
            for stage, seconds in enumerate(stage_seconds):
                start = max(at, free[stage])
                at = free[stage] = start + seconds
                work.append((batch, stage, start, at))
            ready[batch] = at
    return work


def idle(work, num_stages):
    """The share of all stages' time in which they have nothing to do."""
    busy = sum(end - start for _, _, start, end in work)
    return 1 - busy / (num_stages * max(end for *_, end in work))


found = idle(starts([1.0] * 4, 4), 4)
widgets.reveal("12c-bubble", 100 * found)
print(f"four stages, four batches: {found:.0%} idle")

# %% [markdown] name="scratch-formula-text"
# With $p$ stages and $m$ batches each stage works $m$ units of the $m + p - 1$ that the whole takes, so
#
# $$\text{bubble} = \frac{p - 1}{m + p - 1}$$

# %% name="scratch-formula"
rows = []
for p in (2, 4, 8):
    shares = [idle(starts([1.0] * p, m), p) for m in (1, 4, 8, 32)]
    assert np.allclose(shares, [(p - 1) / (m + p - 1) for m in (1, 4, 8, 32)])
    rows.append([p, *(f"{share:.0%}" for share in shares)])
headers = ["stages", *(f"{m} batches" for m in (1, 4, 8, 32))]
widgets.table(rows, headers)

# %% [markdown] name="scratch-serving-text"
# That is a pipeline which is *flushed*: filled, used, emptied. Training does it in every step, since the optimizer needs
# all gradients. **A server need not.** When a batch's token is sampled its next one can begin, and a finished request's
# place goes to another one. What limits it is another rule: the next token of a request cannot enter the first stage
# before the last one has sampled the token before.
#
# Four stages decode with two batches in flight, for a long time. *What share of the stages' time is idle?*

# %% name="scratch-serving-predict"
widgets.predict(
    "12c-two",
    "Idle share of four stages with two decoding batches, in the long run?",
    "percent",
)

# %% name="scratch-serving"
rows = []
for m in (1, 2, 3, 4, 8):
    share = idle(starts([1.0] * 4, m, turns=200), 4)
    rows.append([m, f"{share:.0%}", f"{max(0, 1 - m / 4):.0%}"])
widgets.reveal("12c-two", 100 * idle(starts([1.0] * 4, 2, turns=200), 4))
widgets.table(
    rows, ["batches in flight", "idle, 200 tokens each", "1 - m/p, or nothing"]
)

# %% [markdown] name="scratch-serving-reading"
# In steady serving the bubble is $\max(0, 1 - m/p)$: with as many batches in flight as stages there is none. A bubble in
# a server comes from too few batches, from stages or batches of unequal length, and from what happens between two steps.

# %% [markdown] name="scratch-stream-text"
# ### One stream
#
# A single request decodes. Its model takes 24 ms a token on one GPU with room enough; now it has four stages on four such
# GPUs, and handing over takes 0.02 ms. **How long does a token take?**

# %% name="scratch-stream-predict"
widgets.predict(
    "12c-stream", "One stream's time per token in four stages, 24 ms on one GPU?", "ms"
)

# %% name="scratch-stream"
rows = []
for p in (1, 2, 4, 8):
    stage = [24 / p] * p
    alone = pipeline.token_seconds(stage, batches=1, hop=0.02)
    full = pipeline.token_seconds(stage, batches=p, hop=0.02)
    rows.append([p, f"{alone:.2f} ms", f"{full:.2f} ms", f"{1000 * p / full:.0f}"])
widgets.reveal("12c-stream", pipeline.token_seconds([6] * 4, 1, hop=0.02))
widgets.table(rows, ["stages", "one stream", "each of p streams", "tokens/s of all p"])

# %% [markdown] name="scratch-stream-reading"
# **A pipeline does not shorten a token.** The token goes through all layers, one after another, each read by one GPU at
# one GPU's bandwidth; three of four wait. What four stages give is room for four times the weights and caches, and four
# times the tokens per second *if* four batches are in flight. (Tensor parallelism shortens a token, since all GPUs read
# at once.)

# %% [markdown] name="unequal-text"
# ### Equal layers are not equal work
#
# Eight layers each sounds fair. But the first GPU also has the embedding, and the last one the output projection (the
# *head*). An embedding is a look-up of one row per token; the head is a matrix of `vocab_size` times `hidden_size` that
# a decode step reads as a whole. Llama-3-8B has 32 layers and a large vocabulary. *How many layers' worth of bytes is its head,
# and which cut of the layers is the best for decoding?*

# %% name="unequal-predict"
widgets.predict(
    "12c-last",
    "Best cut for decoding: how many of 32 layers on the last of four GPUs?",
    "layers",
)

# %% name="unequal"
head = llama.vocab_size * llama.hidden_size / llama.layer_params  # in layers
cuts = [(a, b, c, 32 - a - b - c) for a in range(1, 30)
        for b in range(1, 31 - a) for c in range(1, 32 - a - b)]  # fmt: skip


def decode_work(cut):  # of each stage, in layers' worth of bytes
    return [*cut[:3], cut[3] + head]


best = min(cuts, key=lambda cut: (max(decode_work(cut)), max(cut) - min(cut)))
engine_cut = tuple(map(len, stages_of([1000] * 32, round(1000 * head), 4)))
named = {"equal layers": (8, 8, 8, 8), "best": best, "the engine's": engine_cut}
rows = []
for name, cut in named.items():
    idle_of = [pipeline.serving_idle_share(w, 4) for w in (decode_work(cut), cut)]
    longest = f"{max(decode_work(cut)):.1f}"
    rows.append([name, cut, longest, *(f"{share:.0%}" for share in idle_of)])
print(f"{llama.vocab_size:,} tokens: the head has the bytes of {head:.2f} layers")
widgets.reveal("12c-last", best[3])
headers = ["cut", "layers", "slowest stage", "idle, decoding", "idle, prompts"]
widgets.table(rows, headers)

# %% [markdown] name="unequal-reading"
# All stages wait for the slowest, so an equal cut loses in every step, however many batches there are. But **no cut is
# right for both phases**: a prompt's step needs the head for its last token only, so there the equal cut is the fair one.
# Hence the engine counts the head half (`stages_of`); vLLM lets you set the cut by hand. A small model with a large
# vocabulary is where it hurts; for a 70B of 80 layers the head is little more than one layer.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# `pipeline_parallel_size=2`. In this notebook the ranks are threads of this process and compute on the CPU, also where
# there is a GPU (there is no transport between GPUs here). `inferlab serve --pp 2` makes each rank a process of its own.

# %% name="engine-run"
one = LLM(course_model(), **COMMON, max_num_batched_tokens=PROMPT)
two = LLM(course_model(), **COMMON, max_num_batched_tokens=PROMPT,
          pipeline_parallel_size=2, worker="threads")  # fmt: skip
asked = ["def open_file(", "import os\n", "class Queue:", "for i in range("]
texts = []
for llm in (one, two):
    results = llm.generate(asked, replace(GREEDY, max_tokens=24))
    texts.append([result.outputs[0].text for result in results])
assert texts[0] == texts[1]
print("one process and two stages write the same texts:", repr(texts[0][0]), "...")

# %% [markdown] name="engine-stages-text"
# What each stage has. This model's embedding is its head as well (tied), so both stages hold that matrix. Counted half, as
# the engine does, it is less than a layer here, and the layers are cut in the middle:

# %% name="engine-stages"
layers, head_bytes = bytes_of_layers(course_model(), 8)
sizes = [format_bytes(size) for size in (layers[0], head_bytes)]
print(f"in the file a layer has {sizes[0]}, the head {sizes[1]}")
rows = []
for rank in two.engine.executor.executors:
    part, cache = rank.executor.model, rank.executor.kv_cache
    own = [layer.index for layer in part.layers]
    rows.append([rank.collectives.place, own, len(part.embedding), cache.data.shape[0]])
widgets.table(
    rows, ["stage", "layers", "rows of the embedding", "layers in its KV cache"]
)

# %% [markdown] name="engine-plan-text"
# And how steps are planned for it. As many steps are in flight as there are stages, and a request whose token is in
# flight is left out of the next step. So the requests that decode have to be *divided* among steps: if the first step
# took all of them, the second stage's next step would be empty.

# %% name="engine-plan"
print(inspect.getsource(Staged.able))
print(inspect.getsource(Staged._decoding_share))

# %% [markdown] name="engine-trace-text"
# A trace has for each step when each rank did it, and how long it waited for another. Six prompts of one step each, then
# a few tokens for all of them. *Choose a step: which ranks are busy with which step while it runs?*

# %% name="engine-trace"
steps = run(two, prompts_of(6), max_tokens=5)
widgets.rank_timeline(steps)

# %% [markdown] name="engine-trace-reading"
# (Waiting is drawn at the beginning of a step; the trace has its length only. The second rank waits for the first one's
# hidden states.) After the prompts, six decoding requests go three by three: two steps in flight, each with half of the
# requests.

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# The formula wants equal stages and nothing between two steps. Sixteen prompts, one step each, submitted at once, two
# stages. By the formula 1/17 of the time is idle. **What will the trace say, on this machine?**

# %% name="measure-predict"
widgets.predict(
    "12c-sixteen",
    "Idle share of sixteen prompts through two stages, measured?",
    "percent",
)

# %% name="measure-flushed"
FILLED = (1, 2, 4, 8, 16)


def measured(prompts, max_tokens=1):  # the less disturbed of two runs
    runs = [run(two, prompts, max_tokens) for _ in range(2)]
    return min(idle_share(s if max_tokens == 1 else decoding(s)) for s in runs)


flushed = {m: measured(prompts_of(m)) for m in FILLED}
decoded = {m: measured(prompts_of(m, 16), 16) for m in (1, 2, 4)}
widgets.reveal("12c-sixteen", 100 * flushed[16])
rows = [("filled once", m, pipeline.bubble(2, m), flushed[m]) for m in FILLED]
for m, share in decoded.items():
    rows.append(("decoding", m, pipeline.serving_idle_share([1, 1], m), share))
rows = [[load, m, f"{formula:.1%}", f"{found:.1%}"] for load, m, formula, found in rows]
headers = ["load", "prompts, or requests", "idle by formula", "idle in the trace"]
widgets.table(rows, headers)

# %% name="measure-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.8)
left, right = fig.subplots(1, 2, sharey=True)
left.plot(
    FILLED,
    [100 * pipeline.bubble(2, m) for m in FILLED],
    "--",
    color=GREY,
    label="formula",
)
left.plot(
    FILLED, [100 * flushed[m] for m in FILLED], marker="o", color=BLUE, label="trace"
)
left.set_xscale("log", base=2)
left.set_xticks(FILLED, FILLED)
left.minorticks_off()
tidy(left, "prompts, one step each", "idle, percent", "filled once")
right.plot(
    list(decoded),
    [100 * max(0, 1 - m / 2) for m in decoded],
    "--",
    color=GREY,
    label="formula",
)
right.plot(
    list(decoded),
    [100 * share for share in decoded.values()],
    marker="o",
    color=BLUE,
    label="trace",
)
right.set_xticks(list(decoded))
tidy(right, "requests that decode", "", "decoding")
left.set_ylim(0, 80)
left.legend(fontsize=8, frameon=False)
said = "; ".join(f"{m} prompts {100 * flushed[m]:.0f}" for m in FILLED)
also = "; ".join(f"{m} requests {100 * share:.0f}" for m, share in decoded.items())
show(
    fig,
    f"Idle percent of two stages here. Filled once: {said}. Decoding: {also}.",
)

# %% [markdown] name="measure-reading"
# The shape is the formula's, the level is higher. Three things are missing in it. The stages are not equal (the last one
# has the head, and samples). Between two steps the planner collects tokens and plans, and a stage waits for that; in
# decoding a step of this small model is so short that it counts most, and it is why decoding with enough requests does
# not come to zero. And two threads of one process share its interpreter, and your two cores are not idle either.

# %% [markdown] name="measure-stream-text"
# One stream, and one long prompt. A prompt of 768 tokens is cut into six chunks, and the next chunk needs of each layer
# only the keys and values of those before it, which that stage has already. So chunks follow each other through the
# stages like different requests. *Which of the two gains from the second stage: the prompt, or the token?*

# %% name="measure-stream-predict"
widgets.predict(
    "12c-gain",
    "Two stages against one process: times as fast for ONE prompt of 768 tokens?",
    "times",
)

# %% name="measure-stream"
rows, gains = [], []
for name, prompt, tokens in (
    ("one prompt of 768", 768, 1),
    ("24 tokens of one stream", 8, 25),
):
    seconds = []
    for llm in (one, two):
        took = []
        for _ in range(2):
            steps = run(llm, prompts_of(1, prompt), tokens)
            steps = steps if tokens == 1 else decoding(steps)
            took.append(steps[-1].finished_at - steps[0].started_at)
        seconds.append(min(took))
    gains.append(seconds[0] / seconds[1])
    rows.append([name, *map(format_seconds, seconds), f"{gains[-1]:.2f}"])
widgets.reveal("12c-gain", gains[0])
widgets.table(rows, ["what", "one process", "two stages", "times as fast"])

# %% [markdown] name="measure-stream-reading"
# With $p$ equal stages and $c$ equal chunks a prompt alone takes $(c + p - 1)/(c\,p)$ of one GPU's time: six chunks in two
# stages 7/12. What you measured is less of a gain, if your cores were busy or chunks wait for the planner. One stream's
# tokens gain nothing and pay for the hand-over; where your ratio is above 1, that is the noise of two times so short.

# %% [markdown] name="layouts-text"
# ### Tensor, pipeline or replicas
#
# An 8B in 16 bits fits one H100, so eight of them may be used in all three ways. By formula, at half the peak arithmetic
# and 80 % of the bandwidth; links of NVLink 4; the pipeline with equal stages and eight batches in flight. *Which has the
# shortest token, and which has the most prompt tokens per second?*


# %% name="layouts"
def layouts(batch, context):
    """Seconds per token of so many requests, eight H100s used in three ways."""
    single = Deployment(llama, h100, mfu=0.5, mbu=0.8)
    each = max(1, batch // 8)
    message = all_reduce_message(each, llama.hidden_size)
    hop = transfer_seconds(message, link("NVLink 4").per_direction, 2e-6)
    whole = single.tpot(context, each)  # of an eighth of the requests, on one GPU
    staged = pipeline.token_seconds([whole / 8] * 8, min(8, batch), hop)
    return replace(single, num_devices=8).tpot(context, batch), staged, whole


single = Deployment(llama, h100, mfu=0.5, mbu=0.8)
eight = replace(single, num_devices=8)
rows = []
for batch, context in ((1, 2000), (64, 2000), (512, 2000), (4096, 500)):
    seconds = layouts(batch, context)
    rates = [f"{batch / s:,.0f}" for s in seconds]
    rows.append([f"{batch} of {context:,}", *map(format_seconds, seconds), *rates])
headers = ["requests, context", "token, TP", "PP", "DP", "tokens/s, TP", "PP", "DP"]
widgets.table(rows, headers)

# %% name="layouts-more"
prompt = 8192
tensor, alone = eight.prefill_seconds(prompt), single.prefill_seconds(prompt)
chunked = alone * (16 + 8 - 1) / (16 * 8)  # sixteen chunks, eight stages
per_link = all_reduce_message(1, llama.hidden_size)
sent = format_bytes(2 * llama.layers * 2 * 7 / 8 * per_link), format_bytes(per_link)
found = (
    ("TP 8", tensor, prompt / tensor, eight.cache_tokens(), sent[0]),
    ("PP 8", chunked, 8 * prompt / alone, eight.cache_tokens(), sent[1]),
    ("DP 8", alone, 8 * prompt / alone, 8 * single.cache_tokens(), "0 B"),
)
rows = [[name, format_seconds(t), f"{rate:,.0f}", f"{room:,}", each]
        for name, t, rate, room, each in found]  # fmt: skip
headers = [
    "layout",
    f"prompt of {prompt:,}",
    "prompt tokens/s",
    "KV tokens",
    "sent per token",
]
widgets.table(rows, headers)

# %% [markdown] name="layouts-reading"
# - **TP** has the shortest token, and the most tokens per second in small batches, since eight GPUs read each weight once
#   for *all* requests. It pays two all-reduces a layer, so with large batches and with prompts it falls behind.
# - **PP** decodes as replicas do: each batch is an eighth of the requests, and its weights are read for that batch alone.
#   Against replicas it saves seven copies of the weights and may span slow links; against TP it sends the least.
# - **DP** exchanges nothing, and gives the most prompt tokens per second beside PP. It needs a model that fits one GPU, and
#   divides the cache into pieces: a request too long for one replica's room fits nowhere.
#
# In interviews: *latency of one user: TP, inside a node. Model larger than a node, slow link between: PP. More users than
# one copy serves: replicas of the smallest layout that fits and meets the latency.*

# %% [markdown] name="routers-text"
# ### Replicas have caches
#
# Four replicas of an 8B, each on an H100 by formula, each with the engine's scheduler, blocks and prefix cache, under the
# load `agents` (16 calls per second, each of which sends its whole run again). Only the router differs: in turn, or by
# what it has sent where, and the load. *If replicas share nothing, it cannot matter much. Which share of the prompt
# tokens do the caches have in turn, and which by prefix?*
# <!-- stands: datasets/traces/agents.yaml -->

# %% name="routers-predict"
widgets.predict(
    "12c-found", "Share of prompt tokens found in caches, routed by prefix?", "percent"
)

# %% name="routers"
rows, served = [], {}
for router in ("round_robin", "prefix"):
    calls = workload("agents", seed=1, rate=16, num_requests=160)
    results = simulate_replicas(calls, 4, single, router=router)
    served[router] = together = Result.fold(results)
    busy = [result.busy_seconds for result in results]
    ttft = [f"{np.percentile(together.ttft, at):.2f} s" for at in (50, 99)]
    share = f"{max(busy) / np.mean(busy):.2f}"
    rows.append([router, f"{together.hit_rate:.0%}", *ttft, share])
widgets.reveal("12c-found", 100 * served["prefix"].hit_rate)
widgets.table(rows, ["router", "found", "median TTFT", "p99 TTFT", "busiest over mean"])

# %% [markdown] name="explore"
# ## 6. Explore
#
# Step through a schedule. *With four stages and a longer last one ("the last has the head"), how many batches does it take
# until more of them gain nothing? And where do the idle parts lie then?*

# %% name="explore-widget"
widgets.stages(num_stages=4, batches=2, turns=4)

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"Activations go forward through the stages, and gradients go back."** (E12.9) That is training. Inference has no
# backward pass: no gradient, no activation kept for one, no optimizer that waits for all batches. What goes where, counted
# in the engine:

# %% name="errata-forward"
first, last = (rank.collectives for rank in two.engine.executor.executors)
before = first.num_bytes, last.num_sent
steps = run(two, prompts_of(3), max_tokens=8)
tokens = sum(row.num_tokens for step in steps for row in step.rows)
sent = first.num_bytes - before[0]
assert sent == tokens * 256 * 4  # hidden_size, float32
assert last.num_sent == before[1] == 0
trained = [
    name for rank in two.engine.executor.executors
    for name, weight in rank.executor.model.named_parameters() if weight.requires_grad
]  # fmt: skip
print(f"{tokens} tokens: {sent:,} bytes from stage 0 to stage 1, none back")
print(f"weights that want a gradient: {len(trained)}")

# %% [markdown] name="errata-forward-reading"
# The last stage sends no tensor. The token that it sampled, one integer, goes to the planner and with the next step to the
# first stage. So cures for training's bubble (one forward, one backward in turn; interleaved stages) are not what a server
# needs. It needs enough batches in flight, and stages of equal length.
#
# **"Replicas share no state, so they need no coordination."** (E12.10) They share no *weights*. But each has a prefix cache,
# and where a request is sent decides what is found there: the table of section 5 had the same replicas and the same load
# twice. Routing is stateful. (`d_experts` shows a second coupling: where attention is replicated but experts are divided,
# all replicas meet in every layer, and one without requests takes part.)

# %% name="errata-replicas"
in_turn, by_prefix = served["round_robin"], served["prefix"]
computed = [
    result.prompt_tokens - result.cached_tokens for result in (in_turn, by_prefix)
]
assert in_turn.prompt_tokens == by_prefix.prompt_tokens
assert computed[1] < computed[0]
print(f"prompt tokens computed: {computed[0]:,} in turn, {computed[1]:,} by prefix")

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026.
#
# **vLLM** has `--pipeline-parallel-size` and `--tensor-parallel-size`, and an environment variable for a cut by hand. Its
# documentation advises tensor parallelism inside a node and stages between nodes, and stages also where GPUs of one
# node have no NVLink. `--data-parallel-size` starts replicas behind one address, chiefly for mixtures of experts with
# data-parallel attention.
#
# **SGLang** has stages, too, and sends long prompts through them in chunks that shrink as the prompt goes on, since a later
# chunk has more keys to attend to and stages want equal work. **TensorRT-LLM** converts a checkpoint for a number of stages.
#
# Replicas stand behind a gateway: the router of SGLang, llm-d and NVIDIA Dynamo route by prefix and load, some from events
# that the engines' caches send. Here it is `inferlab serve --dp 2`, with a router that knows what it has sent.

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

two.engine.close()
widgets.quiz(load_quiz("12_parallelism").draw(seed=1, tag="stages"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Flushed: bubble = (p − 1)/(m + p − 1). Decoding in the steady state: max(0, 1 − m/p). Keep p batches in flight.
# - A pipeline does not shorten a token: the sum of its stages and the hops. It does shorten a prompt in c chunks, to
#   (c + p − 1)/(c p).
# - All stages wait for the slowest. The head is on the last one and costs as much as several layers in decoding, and next
#   to nothing in a prompt's step.
# - Between stages: one vector of `hidden_size` for each token, one way. No backward pass.
# - TP: shortest token, needs fast links. PP: least traffic, room, many batches. DP: nothing exchanged, a model on each.
# - Replicas share no weights, but routing decides what their caches have.
