# %% [markdown] name="title"
# # 00a · The map: what happens to a request, and what can run out
#
# You type a question, and the words of an answer come back one by one. What happens in between determines how long you
# wait, how fast the words come, and what they cost. This notebook follows one request all the way, writes the loop
# behind it in a few lines, and finds the four things that can run out. The rest of the course is about these four.
#
# About 45 minutes. You need some Python and an idea of what a neural network is. Everything here runs on a laptop; with
# a GPU it runs there. `b_roofline` follows and puts numbers on the map.

# %% name="setup"
# Set-up: libraries, the course model, and the devices this notebook computes with.
import inspect
import textwrap
from dataclasses import replace

import numpy as np
import torch
from matplotlib.patches import FancyBboxPatch, Rectangle

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, figure, show, tidy
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.core.engine import Engine as CoreEngine
from reference_impl.theory import collectives, cost, kv_cache, latency, roofline
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import MODELS, model
from reference_impl.theory.units import GB, GiB, MiB, format_bytes, format_seconds

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
# The prefix cache is off, so that a prompt asked twice is computed twice; chapter 06 turns it on.
llm = LLM(course_model("target"), dtype="float32", kv_cache_bytes=32 * 2**20, prefix_cache="off")
decoder = llm.engine.model
small, big, h100 = model("llama-3-8b"), model("llama-3-70b"), device("H100")
print(f"the course model has {decoder.num_parameters():,} parameters and runs on {decoder.device}")

# %% [markdown] name="question"
# ## 1. A question with a number
#
# You send a prompt of 1,000 tokens to Llama-3-8B, a model of 8 billion parameters, in 16 bits on one H100 (the SXM
# version with 80 GB), and get an answer of 200 tokens. No other request is running, and everything runs at the limits
# of the hardware. **What percentage of the time goes into writing the answer, and not into reading the prompt?**

# %% name="predict" jupyter={"source_hidden": true}
# The box for your guess.
widgets.predict("00a-writing", "What percentage of the time is writing 200 tokens, after a prompt of 1,000?", "%")

# %% name="answer"
reading = latency.prefill_seconds(small, 1000, h100)
writing = sum(latency.decode_seconds(small, 1001 + i, h100) for i in range(199))
print(f"1,000 tokens in, 200 out: {format_seconds(reading)} reading, {format_seconds(writing)} writing")
widgets.reveal("00a-writing", 100 * writing / (reading + writing))

# %% [markdown] name="answer-reading"
# (The first token of the answer comes with the prompt's pass, so 200 outputs are 199 further ones.) Why it is so
# lopsided is what the rest of this notebook explains.

# %% [markdown] name="idea"
# ## 2. The idea
#
# Picture a ferry. The model's weights are the water: to bring anything across, the ferry has to cross all of it, and a
# crossing takes the same time whether it carries one car or a hundred. Each car is a token. While the ferry is under
# way, the terminal does the paperwork for the cars on board. That is the arithmetic.
#
# - **Reading a prompt (prefill).** All cars stand on the dock. They go over together, in one crossing. With enough of
#   them the paperwork takes longer than the crossing, and then the *terminal* sets the pace.
# - **Writing an answer (decode).** The next car is built on the far side, and only when the one before it has arrived.
#   One crossing, one car. The deck is empty, the terminal idle, and the *water* sets the pace.
# - **Many travellers (batching).** Cars of other people may share the crossing. It costs almost nothing, until
#   the terminal falls behind.
# - **Trailers (the KV cache).** What the model has computed about each token so far is kept, so that it need not be
#   computed again: the *keys and values* of chapter 02. Each traveller tows a trailer on every crossing, one box longer
#   each time, and long trailers slow the ferry. They are not shared. (Chapter 06 finds an exception.) The yard for
#   trailers is small.
# - **Several ferries (more GPUs).** They split the water between them, but have to meet after every few metres.
#
# So four things can run out: **compute** (the terminal), **bandwidth** (the water), **capacity** (the yard),
# **network** (the meetings). Nearly everything in this course is an attack on one of the four. The picture has two limits.
# A real forward pass also has a fixed overhead: the launches of many small GPU routines (*kernels*) and the Python
# around them. You will see this overhead in every measurement on a small model. And a *mixture of experts* crosses only
# a part of the water with one car, and nearly all of it with many (chapter 11).

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.6)
top, bottom = fig.subplots(2, 1)
for ax, loads, title in (
    (top, [12], "prefill: 12 prompt tokens, one crossing"),
    (bottom, [1, 1, 1, 1, 1], "decode: 5 output tokens, five crossings, each waits for the one before"),
):
    for i, cars in enumerate(loads):
        ax.add_patch(Rectangle((i * 14, 0), 13, 1.0, facecolor="white", edgecolor=INK))
        for car in range(cars):
            ax.add_patch(Rectangle((i * 14 + 0.5 + car, 0.2), 0.8, 0.6, facecolor=BLUE if ax is top else ORANGE,
                                   hatch="" if ax is top else "//", edgecolor="white"))  # fmt: skip
        if i + 1 < len(loads):
            ax.annotate("", (i * 14 + 14, 0.5), (i * 14 + 1.5, 0.5), arrowprops={"arrowstyle": "->", "color": GREY})
    ax.set_xlim(-0.5, 70)
    ax.set_ylim(-0.1, 1.2)
    ax.set_title(title, fontsize=10, loc="left")
    ax.axis("off")
show(
    fig,
    "Above: one ferry full of twelve cars, the prompt. Below: five ferries with one car each, the outputs; an arrow leads "
    "from each car to the next ferry, because each token is needed to make the next.",
)

# %% [markdown] name="map-text"
# ### The map
#
# A request arrives as text, is split into tokens, waits until its cache fits, is prefilled, and is then answered token
# by token. Under each station is the resource that usually runs out there. Two times describe what a user feels:
# **TTFT**, time to first token, from arrival to the first token of the answer, and **TPOT**, time per output token, for
# each one after.

# %% name="map-figure" jupyter={"source_hidden": true}
fig = figure(7.8, 2.7)
ax = fig.subplots()
stations = (
    ("arrive", "text to tokens", GREY, ""), ("wait", "until its cache\nhas room", RED, "capacity"),
    ("prefill", "read the prompt:\nfew, large passes", BLUE, "compute"),
    ("decode", "write: one pass\nper token", ORANGE, "bandwidth"), ("finish", "tokens to text,\ncache freed", GREY, ""),
)  # fmt: skip
for i, (name, what, colour, limit) in enumerate(stations):
    ax.add_patch(
        FancyBboxPatch((i * 2, 0), 1.5, 1, boxstyle="round,pad=0.08", facecolor="white", edgecolor=colour, linewidth=2)
    )
    ax.text(i * 2 + 0.75, 0.72, name, ha="center", va="center", fontsize=10, weight="bold")
    ax.text(i * 2 + 0.75, 0.3, what, ha="center", va="center", fontsize=8)
    ax.text(i * 2 + 0.75, -0.35, limit, ha="center", va="center", fontsize=9, color=INK, style="italic")
    if i + 1 < len(stations):
        ax.annotate("", (i * 2 + 1.92, 0.5), (i * 2 + 1.58, 0.5), arrowprops={"arrowstyle": "->", "color": INK})
for x0, x1, y, text in ((-0.05, 5.5, 1.45, "TTFT: time to first token"), (5.95, 7.55, 1.45, "TPOT: per output token")):
    ax.annotate("", (x1, y), (x0, y), arrowprops={"arrowstyle": "<->", "color": INK})
    ax.text((x0 + x1) / 2, y + 0.13, text, ha="center", fontsize=8)
ax.text(
    4.75,
    -0.75,
    "network: wherever several devices share one model, or a cache moves",
    ha="center",
    fontsize=9,
    style="italic",
)
ax.set_xlim(-0.3, 9.9)
ax.set_ylim(-0.95, 1.85)
ax.axis("off")
show(
    fig,
    "Five stations of a request: arrive, wait (capacity), prefill (compute), decode (bandwidth), finish. The time to first "
    "token spans the first three, the time per output token belongs to decode; the network lies under all of them.",
)

# %% [markdown] name="chapters-text"
# ### Which chapter attacks which
#
# | runs out | you see it as | what helps |
# |---|---|---|
# | compute | a long TTFT on long prompts | compute nothing twice (02, 06), fewer operations (11), more devices (12, 13) |
# | bandwidth | a long TPOT, idle arithmetic | share the read (03), fewer bytes (05, 07, 09), more tokens per pass (08) |
# | capacity | requests that wait, or are preempted | paging (04), smaller caches (07, 09), more devices (12), host memory (14) |
# | network | more GPUs without a speedup | what to split, and how (11, 12), when to move a cache (13) |
#
# Chapter 01 gives the formulas, and chapter 10 is about long contexts, where three of the four bind. Chapters 15 to 19
# put it together: serving under latency objectives, cost, images and audio, quality, the interview. (Some
# are planned: the map in START.ipynb marks them. Where a text names one, it says what that chapter will be about.)

# %% name="chapters-figure" jupyter={"source_hidden": true}
MAIN, SIDE = 2, 1
attacks = (  # compute, bandwidth, capacity, network
    ("01 prefill and decode", (2, 2, 0, 0)), ("02 KV cache", (2, 0, 2, 0)), ("03 batching", (1, 2, 1, 0)),
    ("04 paged attention", (0, 0, 2, 0)), ("05 flash attention", (1, 2, 1, 0)), ("06 prefix caching", (2, 0, 1, 0)),
    ("07 quantization", (1, 2, 2, 0)), ("08 speculative decoding", (0, 2, 0, 0)), ("09 attention variants", (0, 2, 2, 0)),
    ("10 long context", (2, 1, 2, 1)), ("11 mixture of experts", (2, 1, 0, 2)), ("12 parallelism", (1, 1, 2, 2)),
    ("13 disaggregation", (1, 1, 0, 2)), ("14 KV tiering", (1, 0, 2, 1)),
)  # fmt: skip
fig = figure(6.6, 4.2)
ax = fig.subplots()
for y, (_, marks) in enumerate(attacks):
    for x, mark in enumerate(marks):
        if mark:
            ax.plot([x], [y], "o", markersize=11 if mark == MAIN else 6, color=(BLUE, ORANGE, RED, PURPLE)[x],
                    markerfacecolor=(BLUE, ORANGE, RED, PURPLE)[x] if mark == MAIN else "white")  # fmt: skip
ax.set_yticks(range(len(attacks)), [name for name, _ in attacks], fontsize=9)
ax.set_xticks(range(4), ["compute", "bandwidth", "capacity", "network"])
ax.xaxis.tick_top()
ax.set_xlim(-0.6, 3.6)
ax.set_ylim(len(attacks) - 0.4, -0.6)
tidy(ax)
ax.spines[["left", "bottom"]].set_visible(False)
show(
    fig,
    "Chapters 01 to 14 against the four bottlenecks; a large dot is what a chapter is mainly about, a small open one a "
    "side effect. Batching, attention kernels, quantization, speculation and attention variants stand at bandwidth; the "
    "cache, paging and tiers at capacity; experts, parallelism and disaggregation at the network.",
)

# %% [markdown] name="goals"
# ### After this course you can
#
# The chapters stand in parentheses; the map in START.ipynb marks those that are planned.
#
# - say for any step of any model whether compute, bandwidth, capacity or network binds, with numbers (00, 01, 16);
# - compute the operations of prefill and decode, and TTFT and TPOT from them, by hand (01);
# - derive the bytes of a KV cache from a config, with the right number of heads, and how many users fit (02, 09);
# - build a cache, a scheduler, a block pool, a prefix index and a speculative verifier, and have them tested (02, 03,
#   04, 06, 08);
# - explain continuous batching, chunked prefill and preemption, and which requests pay for each (03);
# - write the online softmax and an attention kernel that never stores the scores (05);
# - choose a format for weights, activations and cache, and predict what it does to TTFT, TPOT and quality (07, 18);
# - judge when speculative drafts pay off, and prove that they do not change the output distribution (08);
# - split a model over devices, count the messages, and say when to separate prefill and decode (11, 12, 13);
# - budget tokens and memory for many users at once, on the device and below it (02, 14, 15);
# - run a real engine, read its metrics, set objectives, and size a fleet with its cost (15, 16);
# - explain all of this aloud, in order, in an interview (19).

# %% [markdown] name="stance"
# ### How to answer
#
# An interviewer says: "It is slow. What do you do?" Do not start with a technique. Three steps, in this order:
#
# 1. **Find the bottleneck.** Which metric is bad, TTFT, TPOT, or the cost per token? At what load? Which of the four
#    runs out?
# 2. **Put numbers on it.** What is the floor for this model on this machine? How far away are you?
# 3. **Choose the lever that moves that term**, on the side of the system (batching, caching, placement) *and* of the
#    model (bits, heads, experts, drafts). Say what it costs, and what will bind next.

# %% name="stance-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 1.9)
ax = fig.subplots()
steps = (("1 · find", "which metric?\nwhich of the four?", BLUE), ("2 · quantify", "floor, measured,\nand the ratio", GREEN),
         ("3 · choose", "system lever,\nmodel lever, price", ORANGE))  # fmt: skip
for i, (name, what, colour) in enumerate(steps):
    ax.add_patch(
        FancyBboxPatch(
            (i * 2.6, 0), 1.9, 1, boxstyle="round,pad=0.08", facecolor="white", edgecolor=colour, linewidth=2
        )
    )
    ax.text(i * 2.6 + 0.95, 0.74, name, ha="center", va="center", fontsize=11, weight="bold")
    ax.text(i * 2.6 + 0.95, 0.3, what, ha="center", va="center", fontsize=9)
    if i < 2:
        ax.annotate("", (i * 2.6 + 2.5, 0.5), (i * 2.6 + 2.0, 0.5), arrowprops={"arrowstyle": "->", "color": INK})
ax.annotate(
    "",
    (0.95, -0.12),
    (6.15, -0.12),
    arrowprops={"arrowstyle": "->", "color": GREY, "connectionstyle": "arc3,rad=-0.12"},
)
ax.text(3.55, -0.6, "what binds now?", ha="center", fontsize=9, style="italic")
ax.set_xlim(-0.2, 7.3)
ax.set_ylim(-0.75, 1.2)
ax.axis("off")
show(
    fig,
    "Three boxes in a row: find the bottleneck, quantify it, choose a lever; an arrow leads back from the third to the "
    "first, because after a change something else binds.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# A language model is a function: tokens in, one row of scores (*logits*) per token out. The row of the last token
# scores every candidate for the next token. Generation is a loop around it: **run, take the last row, choose, append,
# repeat.** Here it is by hand, with the course model (which was trained on Python code).


# %% name="scratch"
def run(tokens, rows=None):
    """One pass over `tokens` without a cache. Logits [len(rows), vocabulary]; rows None: the last one only."""
    batch = ragged_batch([(tokens, 0)], len(tokens), decoder.device)
    if rows is not None:
        batch = replace(batch, logits_indices=torch.tensor(rows, device=decoder.device))
    with torch.inference_mode():
        return decoder(batch, None, RecomputeAttention(decoder.config.head_dim**-0.5))


def greedy(logits):
    return int(logits.argmax())


def sample(logits, temperature=0.8):  # scores to probabilities, then a draw
    return int(torch.multinomial((logits / temperature).softmax(-1), 1))


# %% [markdown] name="scratch-loop-text"
# One pass and two ways to choose. The loop puts them together:


# %% name="scratch-loop"
def generate(prompt, count, choose):
    tokens = list(prompt)
    for _ in range(count):
        logits = run(tokens)[-1]  # run the model, take the last row
        tokens.append(choose(logits))  # choose, append
    return tokens[len(prompt) :]


prompt = llm.encode("def read_lines(path):\n    ")
torch.manual_seed(0)
by_hand = generate(prompt, 24, greedy)
print("greedy: ", repr(llm.tokenizer.decode(by_hand)))
print("sampled:", repr(llm.tokenizer.decode(generate(prompt, 24, sample))))

# %% [markdown] name="training-text"
# ### Why training is parallel and this is not
#
# Look at the loop: pass number two needs what pass number one chose. No amount of hardware can run them at the same
# time. In training nothing is chosen. The whole text is there from the start, every position is asked "what comes
# next?" at once, and the causal mask keeps each from looking ahead. So one pass over a text of `n` tokens makes `n`
# predictions.
#
# The same model, both ways: *checking* 24 tokens takes one pass, *making* them took 24.

# %% name="training"
whole = prompt + by_hand
at_once = run(whole[:-1], rows=list(range(len(prompt) - 1, len(whole) - 1)))  # every position that predicts an output
assert at_once.argmax(-1).tolist() == by_hand
print(f"{len(by_hand)} passes made the tokens; one pass over the finished text predicts the same {len(at_once)}")
best = at_once.topk(2, -1).values
print(f"the two best scores are nowhere closer than {float((best[:, 0] - best[:, 1]).min()):.1g}")
other = 1 + max(by_hand[0], 100)  # force another first token: everything after it may change
forced = [other, *generate([*prompt, other], len(by_hand) - 1, greedy)]
changed = sum(a != b for a, b in zip(forced[1:], by_hand[1:], strict=True))
print(f"another first token: {changed} of the {len(by_hand) - 1} after it change")

# %% [markdown] name="training-reading"
# Keep both halves in mind. Prefill is like training: known tokens, one pass. Decode is the loop. And because checking
# is cheaper than making, one may guess several tokens and check them in one pass (chapter 08).

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The engine of this course serves many requests at once, keeps a cache, and should still give the same tokens. "The
# same" means up to rounding: a cache adds the same numbers up in another order, and where two candidates score nearly
# alike, the last digit can decide. The two closest of this text are printed above; float32 moves such
# scores by less than a hundredth of that. The cell checks.

# %% name="engine"
before = len(llm.engine.trace.steps())  # other cells, or this one run twice
engine_output = llm.generate([prompt], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))[0]
assert engine_output.token_ids == by_hand
print("the engine's greedy output equals the loop by hand")
steps = llm.engine.trace.steps()[before:]
for step in steps[:4]:
    row = step.rows[0]
    print(f"step {step.step_id}: {row.num_tokens} token{'s' * (row.num_tokens > 1)} in, from position {row.start}")
print(f"... {len(steps)} steps for {len(by_hand)} tokens")
assert len(steps) == len(by_hand)
assert [row.num_tokens for step in steps for row in step.rows] == [len(prompt)] + [1] * (len(by_hand) - 1)

# %% [markdown] name="engine-reading"
# Both phases are visible: one step with the whole prompt, then steps with one token each. The first step already gives
# the first output, so 24 outputs take 24 steps. The loop by hand read the whole text again every time; how the engine
# avoids that is chapter 02. The core of its own loop is this: the scheduler plans a step; `_submit` maps request ids to
# slots in the worker, which starts to compute; `_collect` waits for it and appends the sampled tokens to their
# requests. (`depth` is 1 here. With 2 the next step is planned while one runs. `hooks` are what features add.)

# %% name="engine-source"
print(inspect.getsource(CoreEngine.step))

# %% [markdown] name="vllm-step-text"
# ### The same step in vLLM
#
# Most of what you learn here carries over by name. One step of vLLM's V1 engine on the left, with the functions you
# would open or find in a profile, and on the right the one of this engine (`reference_impl/core`) that does it. (As of November 2026. The
# model runner is being rewritten: the older one prepares its inputs in `_prepare_inputs`. With asynchronous scheduling,
# `step_with_batch_queue` plans and submits the next step before this one is collected.)

# %% name="vllm-step" jupyter={"source_hidden": true}
from reference_impl.core.decoder import Decoder
from reference_impl.core.llm import LLM as CoreLLM
from reference_impl.core.planner import Planner
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.scheduler import Scheduler
from reference_impl.core.worker import StepRun, Worker

rows = (  # what happens, vLLM V1, ours: the functions themselves, so that a name that moves is noticed
    ("one pass: plan, compute, append", "EngineCore.step", CoreEngine.step, INK),
    ("which tokens of which requests, and their blocks", "Scheduler.schedule", Scheduler.schedule, RED),
    ("the plan goes to the workers", "Executor.execute_model", Planner.step, GREY),
    (
        "token ids, positions, slots: one ragged batch",
        "GPUModelRunner.execute_model: prepare_inputs",
        Worker.submit,
        GREY,
    ),
    ("all layers, with the paged cache", "GPUModelRunner.execute_model: the model", StepRun.compute, BLUE),
    (
        "hidden states to logits, of the last tokens",
        "GPUModelRunner.sample_tokens: compute_logits",
        Decoder.logits,
        BLUE,
    ),
    ("logits to tokens", "GPUModelRunner.sample_tokens: sampler", TorchSampler.choose, GREEN),
    ("the tokens come back to the host", "ModelRunnerOutput", Worker.collect, GREY),
    ("append them, finish requests, free blocks", "Scheduler.update_from_output", Scheduler.update, RED),
    ("tokens to text, in the front end", "OutputProcessor.process_outputs", CoreLLM.step, ORANGE),
)
fig = figure(7.8, 4.6)
ax = fig.subplots()
for y, (what, theirs, ours, colour) in enumerate(rows):
    for x, wide, words in ((0, 3.8, theirs), (7.2, 2.6, ours.__qualname__)):
        ax.add_patch(
            FancyBboxPatch((x, y - 0.22), wide, 0.44, boxstyle="round,pad=0.06", facecolor="white", edgecolor=colour)
        )
        ax.text(x + wide / 2, y, words, ha="center", va="center", fontsize=7, family="monospace")
        if y:
            ax.annotate(
                "", (x + wide / 2, y - 0.3), (x + wide / 2, y - 0.7), arrowprops={"arrowstyle": "->", "color": GREY}
            )
    ax.text(5.5, y, textwrap.fill(what, 32), ha="center", va="center", fontsize=8, style="italic")
for x, words in ((1.9, "vLLM, V1 engine"), (5.5, "what happens"), (8.5, "this engine")):
    ax.text(x, -0.65, words, ha="center", weight="bold", fontsize=10)
ax.set_xlim(-0.2, 10)
ax.set_ylim(len(rows) - 0.6, -1.0)
ax.axis("off")
show(
    fig,
    "One step in two columns, from top to bottom. "
    + "; ".join(f"{what}: {theirs} in vLLM, {ours.__qualname__} here" for what, theirs, ours, _ in rows)
    + ".",
)

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# One request, 512 tokens in, 64 out, on this machine; and the same lengths for Llama-3-8B on one H100 SXM at its limits
# (16 bit, dense peak and full bandwidth, `reference_impl.theory.latency`). What fraction of its time has each spent by
# the end of the prefill?

# %% name="measure"
engine = Engine(decoder, EngineConfig(num_blocks=64, block_size=16, prefix_cache="off"))
text = (llm.encode(inspect.getsource(Engine)) * 2)[:512]
engine.add(text, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True), request_id="one")
while engine.has_work():
    engine.step()
lengths = [step.rows[0].num_tokens for step in engine.trace.steps()]
assert lengths == [512] + [1] * 63
measured = np.array([step.finished_at - step.started_at for step in engine.trace.steps()])
theory = np.array(
    [latency.prefill_seconds(small, 512, h100)] + [latency.decode_seconds(small, 513 + i, h100) for i in range(63)]
)


def phases(name, times):
    read, write = times[0] / 512, times[1:].mean()
    return [name, *map(format_seconds, (times[0], times[1:].sum(), read, write)), f"{write / read:.0f} times"]


widgets.table(
    [phases("course model, measured here", measured), phases("8B on an H100, at its limits", theory)],
    ["", "prefill", "decode", "a token read", "a token written", "written / read"],
)

# %% name="measure-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 3.0)
ax = fig.subplots()
done = np.concatenate([[0], np.cumsum(lengths)])
for times, colour, style, name in (
    (measured, ORANGE, "-", "measured: course model, here"),
    (theory, BLUE, "--", "theory: 8B on one H100"),
):
    share = np.concatenate([[0], np.cumsum(times)]) / times.sum()
    ax.plot(100 * share, done, style, color=colour, label=name)
    ax.plot([100 * share[1]], [512], "o", color=colour)
tidy(ax, "share of the request's time, %", "tokens in the model")
ax.set_ylim(0, 600)
ax.legend(fontsize=8, frameon=False, loc="lower right")
here, there = (100 * times[0] / times.sum() for times in (measured, theory))
show(
    fig,
    "Tokens that went through the model over the share of the request's time. Both curves rise to 512 in the first step, "
    f"the prefill, and then climb slowly to {sum(lengths)}. The prefill takes {there:.0f} % of the time on an H100 at its "
    f"limits and {here:.0f} % measured here.",
)

# %% name="measure-flops"
per_read = latency.prefill_flops(small, 512) / 512
per_written = latency.decode_flops(small, 544)
print(f"operations per token of the 8B: {per_read / 1e9:.1f} GFLOP read, {per_written / 1e9:.1f} GFLOP written")

# %% [markdown] name="measure-reading"
# A token costs about the same number of operations, read or written. Yet writing one takes many times as long. So
# arithmetic is not what limits decode: each pass of a dense model reads all weights to produce one token.
#
# Why is the measured gap another one? A CPU's arithmetic is slow compared with its memory, so 512 tokens at once take
# a good part of the time, and the gap is smaller. `b_roofline` measures how much. A pass of a model this small also
# has a fixed cost, on a GPU its kernel launches, the same for one token as for 512; that makes the gap larger.
#
# ### Four limits, four requests
#
# Step 2 of the answer, as code. Four workloads of Llama-3-70B in 16 bits, split over several GPUs. For each, the time
# that operations (dense peak), bytes and messages would take at the hardware's limits, and the share of the memory it
# needs (90 % of the capacity is 100 % here, because an engine needs the rest). The longest time binds, unless memory is
# short.


# %% name="limits"
def limits(machine, count, batch, cached, new):
    """Seconds by compute, bandwidth and network, and the share of usable memory, for one step of the 70B."""
    step = roofline.place(big, machine, batch, cached, new)
    message = collectives.all_reduce_message(batch * new, big.hidden_size)
    each = collectives.ring_all_reduce(message, count, 2e-6, machine.link_per_direction)  # 2 us per hop: an assumption
    memory = kv_cache.weight_bytes(big) + kv_cache.cache_bytes(big, cached + new, batch)
    return (
        step.flops / (count * machine.peak()),
        step.num_bytes / (count * machine.bandwidth),
        collectives.all_reduces_per_token(big.layers) * each,
        memory / (0.9 * count * machine.capacity),
    )


# %% [markdown] name="four-limits-text"
# And the four workloads:


# %% name="four-limits"
def limit_row(what, name, count, *load):
    *times, memory = limits(device(name), count, *load)
    longest = ("compute", "bandwidth", "network")[int(np.argmax(times))]
    return [what, f"{count} x {name}", *map(format_seconds, times), f"{memory:.0%}",
            longest if memory <= 1 else "capacity"]  # fmt: skip


widgets.table(
    [
        limit_row("one prompt of 8,192", "H100", 4, 1, 0, 8192),
        limit_row("one chat at 8,192", "H100", 4, 1, 8191, 1),
        limit_row("100 chats at 8,192", "H100", 4, 100, 8191, 1),
        limit_row("one prompt of 8,192", "RTX4090", 8, 1, 0, 8192),
    ],
    ["workload", "machine", "compute", "bandwidth", "network", "memory", "binds"],
)

# %% [markdown] name="four-limits-reading"
# The same model, four different answers to "it is slow". Eight gaming cards have a good deal of arithmetic, but their
# messages go over PCIe. And 100 chats do not fit at all, so some wait, however fast the step is. Levers follow from the
# last column, not from the model's name. (The times say which limit is nearest, not how long a step takes:
# communication rarely overlaps completely with the arithmetic, and PCIe between gaming cards reaches less than its
# specification.)
#
# ### What is a speedup worth?
#
# Thirty percent more throughput on a thousand H100s: how many do you save if the work stays the same? Not 30 %. The
# rent is an assumption you can change. (If the work grows instead, count the GPUs that you need not add.)

# %% name="worth"
DOLLARS_PER_HOUR = 2.5  # per H100: an assumption, because prices change by the month
saved = cost.devices_saved(1000, 0.30)
print(f"the same work needs {1000 - saved:.0f} GPUs instead of 1,000: {saved:.0f} saved, {saved / 1000:.0%}; "
      f"30 % more work would have needed {1000 * 0.30:.0f} more")  # fmt: skip
print(f"at ${DOLLARS_PER_HOUR} an hour: ${cost.dollars_per_year(saved, DOLLARS_PER_HOUR) / 1e6:.1f} million a year, "
      f"of ${cost.dollars_per_year(1000, DOLLARS_PER_HOUR) / 1e6:.1f} million")  # fmt: skip

# %% [markdown] name="worked"
# ### Worked problem 1: what fits?
#
# The worked problems of this course share one deployment: **Llama-3-70B in 16 bits on four H100 SXM with tensor
# parallelism** (80 layers, 8 KV heads of 128, 70.55 billion parameters; 80 GB, 3.35 TB/s and 989 TFLOP/s dense bf16
# each). In code it is `reference_impl.theory.deployment.WORKED`. Take paper, then unfold.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_1_what_fits_beside_a_70b_on_four_h100 -->
#
# *An engine may use 90 % of the memory. How many requests of 8,192 tokens fit at once? And if the cache is 8 bit?*
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_1_what_fits_beside_a_70b_on_four_h100 -->
#
# <details><summary>Answer</summary>
#
# Weights: 70.55 · 10⁹ · 2 bytes = 141.1 GB. Usable: 0.9 · 4 · 80 = 288 GB. Left for the cache: 146.9 GB.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_1_what_fits_beside_a_70b_on_four_h100 -->
#
# One token: 2 · 80 layers · 8 heads · 128 · 2 bytes = 327,680 bytes. One request: 8,192 times that, 2.684 GB.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_1_what_fits_beside_a_70b_on_four_h100 -->
#
# So **54** requests, or 448,280 tokens in all. With 8-bit keys and values each request takes half of the same room:
# **109** requests.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_1_what_fits_beside_a_70b_on_four_h100 -->
#
# What did you forget? Counting the 64 query heads instead of the 8 KV heads gives 6 requests. Forgetting the
# weights gives 107.
# <!-- tested: tests/claims/test_worked_problems.py::test_worked_1_what_fits_beside_a_70b_on_four_h100 -->
#
# </details>

# %% [markdown] name="models-text"
# ### The models of this course
#
# One table, read by every calculator and widget. Weights and cache in 16 bits. Look at the cache column: it does not
# scale with the parameters, because layers, KV heads and head dimension determine it. (A token has a key and a value
# per KV head and layer; several query heads may share a KV head. *latent*: one compressed vector per layer instead.) In
# a *mixture of experts* each token is routed to a few of many parallel blocks and uses only those, the *active*
# weights. All of them have to be in memory. What a pass *reads* depends on its tokens: about the active weights for
# one, nearly all for a large batch (chapter 11).


# %% name="models"
def model_row(name):
    s = MODELS[name]
    heads = f"{s.num_heads}/latent" if s.kv_lora_rank else f"{s.num_heads}/{s.num_kv_heads}"
    active = f"{s.active_params / 1e9:.1f}B" if s.active_params else "all"
    weights, token = kv_cache.weight_bytes(s), kv_cache.bytes_per_token(s)
    size = [f"{s.num_params / 1e9:.1f}B", active, s.layers, heads, s.head_dim]
    return [name, *size, format_bytes(weights), format_bytes(token, binary=True)]


NAMES = """llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.1-405b qwen2.5-72b mistral-7b mixtral-8x7b
    deepseek-v2 deepseek-v3 deepseek-r1 falcon-7b palm-540b gemma-7b"""
widgets.table(
    [model_row(name) for name in NAMES.split()],
    ["model", "params", "active", "layers", "q/KV heads", "head", "weights", "KV per token"],
)

# %% [markdown] name="pope-text"
# ### The classic account
#
# Pope et al., *Efficiently Scaling Transformer Inference* (2022, [arXiv
# 2211.05102](https://arxiv.org/abs/2211.05102)), wrote this analysis down for PaLM-540B on TPU v4: operations, bytes
# and messages per step, and a layout of the model chosen from them. Their two best-known numbers are 29 ms per
# generated token at what they call a low batch, which is 64 requests (8-bit weights, 64 chips, a context of 2,048
# tokens), and 76 % of the peak in a prefill of 512 requests. With a chip of 275 TFLOP/s and 1.2 TB/s, what are the
# floors?
# <!-- source: Pope et al. 2022, abstract and table 2 -->

# %% name="pope"
palm, chips, batch = model("palm-540b"), 64, 64
peak, bandwidth = 275e12, 1.2e12  # TPU v4: dense bf16, HBM (Google's documentation)
moved = roofline.step_bytes(palm, batch, 2048, weights=kv_cache.read_bytes(palm, 8)) / (chips * bandwidth)
compute = batch * latency.decode_flops(palm, 2048) / (chips * peak)
print(
    f"batch {batch}: read {format_seconds(moved)}, compute {format_seconds(compute)} -> the reported 29 ms are {0.029 / max(moved, compute):.1f} times the floor"
)
alone = roofline.step_bytes(palm, 1, 2048, weights=kv_cache.read_bytes(palm, 8)) / (chips * bandwidth)
print(f"batch 1 would have nearly the same floor, {format_seconds(alone)}, for one token instead of {batch}")
print(f"prefill of 512 x 2,048 tokens at the peak: {format_seconds(512 * latency.prefill_flops(palm, 2048) / (chips * peak))}; at 76 %: "
      f"{format_seconds(512 * latency.prefill_flops(palm, 2048) / (chips * peak) / 0.76)}")  # fmt: skip
multi_head = kv_cache.attention_bytes_per_token(palm.layers, palm.num_heads, palm.head_dim)
print(
    f"its one KV head: {kv_cache.bytes_per_token(palm):,} bytes per token; with a KV head per query head {multi_head / kv_cache.bytes_per_token(palm):.0f} times as many"
)

# %% [markdown] name="pope-reading"
# Decode is far from its floor and prefill is close. Part of the gap in decode is communication between 64 chips, which
# shrinks more slowly than the work per chip, or not at all. That is why the paper spends so many pages on layouts. One
# KV head for all query heads (multi-query attention), with the cache split over the chips by requests, is what made
# long contexts affordable there.

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# Four requests in the engine, arriving together. A step takes at most 64 tokens, and the cache has 10 blocks of 16
# tokens, not quite enough for all four. Move the step with the slider or the arrow keys. Find the stations of the map:
# waiting, prefill, decode. The lower curve shows free blocks of cache.
#
# Two questions. What do two requests wait for in the first step? And why is one stopped half way (*preempted*) and
# prefilled again later (*recompute*)?

# %% name="explore"
busy = Engine(decoder, EngineConfig(num_blocks=10, block_size=16, max_num_batched_tokens=64, prefix_cache="off"))
for i, (reads, writes) in enumerate(((40, 12), (24, 20), (56, 8), (16, 10))):
    busy.add(
        text[i * 60 : i * 60 + reads],
        SamplingParams(max_tokens=writes, temperature=0, ignore_eos=True),
        request_id=f"r{i}",
    )
while busy.has_work():
    busy.step()
widgets.timeline(busy.trace)

# %% name="explore-answer"
first = busy.trace.steps()[0]
print(
    f"step 1: {sum(row.num_tokens for row in first.rows)} tokens of at most 64, so the others wait for a turn, not for room"
)
for step in busy.trace.steps():
    if step.preempted:
        print(f"step {step.step_id}: {', '.join(step.preempted)} gives up its blocks, so that the others can go on")

# %% [markdown] name="errata-one-at-a-time"
# ## 7. What the cheat sheets get wrong
#
# A tag such as (E00.9) is the number of an entry in our list of 159 errors that study materials repeat. Where a
# calculator or the engine of this course can show the right value, a test does (`tests/claims/` in the repository).
# <!-- tested: tests/claims/test_register.py::test_there_are_159_errata_each_once_and_in_order -->
#
# **"Models produce one token at a time."** They *write* one at a time. They read as many as you give them. The trace
# in section 4 shows both. A sentence about "the model" that does not name the phase is usually wrong for one of them.
#
# **GB and GiB in one breath.** (E00.9) "2.68 GB", "about 2.6 GB" and "2.5 GB" for the same cache; "268 MB" and "256 MB"
# for the same matrix. One of them is wrong in either unit: which? Data sheets and bandwidths are decimal, allocators
# and drivers binary. Say which you mean.

# %% name="errata-units-cell"
sizes = {
    "cache of 8,192 tokens, Llama-3-70B": kv_cache.cache_bytes(big, 8192),
    "cache of 32,768 tokens": kv_cache.cache_bytes(big, 32768),
    "an 8192 x 8192 matrix in fp32": 8192**2 * 4,
    "what the driver of an '80 GB' H100 reports, 81,559 MiB": 81559 * MiB,
}
print(f"a GiB is {GiB / GB - 1:.1%} larger than a GB")
widgets.table(
    [[what, size, format_bytes(size), format_bytes(size, binary=True)] for what, size in sizes.items()],
    ["what", "bytes", "decimal", "binary"],
)

# %% [markdown] name="errata-size-of-what"
# The second question is **a size of what?** Per head, per layer or for the model; keys only or values too; in which
# format. Each of these rows is what somebody means by "the cache of one token":

# %% name="errata-size-of-what-cell"
key = small.head_dim * 2
sizes = {
    "one key, one head, one layer, 16 bit": key,
    "key and value, one head, one layer, 16 bit": 2 * key,
    "one layer, 8 KV heads, 16 bit": 2 * key * small.num_kv_heads,
    "all 32 layers, 16 bit": kv_cache.bytes_per_token(small),
    "all layers, 8 bit": kv_cache.bytes_per_token(small, 1),
    "all layers, 16 bit, counted with the 32 query heads: wrong": kv_cache.attention_bytes_per_token(
        small.layers, small.num_heads, small.head_dim
    ),
}
widgets.table(
    [[what, size, format_bytes(size, binary=True)] for what, size in sizes.items()],
    ["one token of Llama-3-8B", "bytes", "binary"],
)

# %% [markdown] name="errata-formulas"
# Some sheets announce formulas that were lost in rendering (E19.4). The one behind these lines gives the bytes of keys
# and values per token:
#
# $$ 2 \cdot L \cdot n_{kv} \cdot d_h \cdot b $$
#
# with layers $L$, KV heads $n_{kv}$, head dimension $d_h$ and bytes per value $b$. The cell checks it against the cache
# size it should give, 8,192 tokens of Llama-3-70B.

# %% name="errata-formulas-cell"
by_formula = 2 * big.layers * big.num_kv_heads * big.head_dim * 2
assert by_formula == kv_cache.bytes_per_token(big)
print(
    f"2 x {big.layers} x {big.num_kv_heads} x {big.head_dim} x 2 = {by_formula:,} bytes; 8,192 tokens: {8192 * by_formula / GB:.2f} GB = {8192 * by_formula / GiB:.2f} GiB"
)
print(f"query heads per KV head: {big.num_heads} / {big.num_kv_heads} = {big.num_heads // big.num_kv_heads}")

# %% [markdown] name="errata-batching"
# **"Sharing the weights is the whole reason for continuous batching."** (E00.10) It is the reason for *batching*. A
# static batch shares them just as well, as long as all its slots are in use. Continuous batching, where new requests
# may join at every step, solves another problem: outputs end at different times, and requests arrive at different
# times. Count steps with eight slots, with and without it:


# %% name="errata-batching-cell"
def count(lengths, arrivals, seats, continuous):
    """(steps in all, steps that a request waits for its first one, on average)"""
    clock, waited, running, waiting = 0, 0, [], list(zip(arrivals, lengths, strict=True))
    while running or waiting:
        if continuous or not running:  # a static batch admits none before all are done
            while waiting and len(running) < seats and waiting[0][0] <= clock:
                arrival, length = waiting.pop(0)
                running.append(length)
                waited += clock - arrival
        running = [left - 1 for left in running if left > 1]
        clock += 1
    return clock, waited / len(lengths)


# %% [markdown] name="errata-batching-loads"
# 64 requests: of equal lengths and at once, of varied lengths, and spread over time.

# %% name="errata-batching-steps"
draw = np.random.default_rng(0)
equal, varied = [100] * 64, np.ceil(draw.exponential(100, 64)).astype(int).tolist()
together, spread = [0] * 64, [15 * i for i in range(64)]
counted = []
for name, lengths, arrivals in (
    ("equal lengths, together", equal, together), ("varied lengths, together", varied, together),
    ("equal lengths, one every 15 steps", equal, spread),
):  # fmt: skip
    static, joined = (count(lengths, arrivals, 8, continuous) for continuous in (False, True))
    counted.append([name, static[0], f"{static[1]:,.1f}", joined[0], f"{joined[1]:,.1f}"])
    assert static == joined if (lengths is equal and arrivals is together) else static != joined
widgets.table(counted, ["64 requests", "static: steps", "mean wait", "continuous: steps", "mean wait"])

# %% [markdown] name="errata-batching-reading"
# With equal lengths that arrive together nothing is gained: eight requests share every read of the weights either way.
# Lengths that differ cost a static batch steps, because it waits for its longest. Arrivals that differ cost waiting.
# (The count assumes that every step takes equally long, even with fewer requests. That holds as long as decode is bound
# by reading the weights.)

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Names change; look them up in the version you run.
#
# **vLLM** has had one scheduler for both phases since its V1 engine (2025): a request has tokens and a count of those
# already computed, and a step lets the count catch up. The engine of this course follows that idea.
#
# **SGLang** shows the map in its server log: lines for prefill batches and lines for decode batches, with the share of
# the cache in use and the length of the queue. They are worth a look before any profiler.
#
# **TensorRT-LLM** calls it *in-flight batching* when requests of both phases share a step. The idea was published as
# iteration-level scheduling in Orca (2022).
#
# **Disaggregated stacks** (NVIDIA Dynamo, llm-d, Mooncake) can run prefill and decode on different machines, so that
# neither delays the other and each gets hardware that suits it. The price is a transfer of the cache: the network
# enters the map (chapter 13).
#
# **Hugging Face transformers** has the loop of section 3 in `generate`, with a cache: the simplest reference for
# comparison.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Each wrong option stands for a particular mistake, and the feedback names it. Change the seed for other numbers. You
# will write the generation loop yourself in [lab 02](../../labs/02_kv_cache/kv_cache.ipynb).

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("00_orientation").draw(seed=1, tag="map"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Generation: run, take the last row, choose, append, repeat. `N` outputs take `N` passes; the prefill gives the
#   first. (Prompts in chunks take more passes, accepted drafts fewer.)
# - Prefill: known tokens, one pass, like training. Decode: one token per pass, because each needs the one before.
# - Operations per token are about the same in both at a similar context. A decode pass of a dense model reads all
#   weights for one token per request; one of experts reads those that its tokens choose.
# - Four things run out: compute, bandwidth, capacity, network. And overhead, on small models.
# - Answer in three steps: find the bottleneck, put numbers on it, choose the lever that moves that term.
# - A gain `g` in throughput saves `g / (1 + g)` of a fleet with the same work: 30 % saves 23 %.
#   <!-- printed: worth -->
# - Batching shares the read of the weights. Continuous batching is for output lengths and arrivals that differ.
# - Say GB (10⁹) or GiB (2³⁰), of what (head, layer, model), and in which format.
