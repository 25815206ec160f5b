# %% [markdown] name="title"
# # 08e · What pays
#
# About 40 minutes. You need `a_guesses` and `c_drafters`. Fewer steps are not less time. Here the speed-up is predicted,
# for machines and loads, and then measured; and the engine decides by itself how many drafts to make.

# %% name="setup"
import inspect
from dataclasses import replace

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, RED, figure, show, tidy
from chapters.widgets.speculation import Measured
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.speculative.adapting import Adapting
from reference_impl.bench.draft_pair import measure
from reference_impl.bench.speculative import workload
from reference_impl.observe.trace import DraftUse
from reference_impl.serving.metrics import Counts
from reference_impl.theory import speculative as theory
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.units import format_seconds

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
COMMON = {"dtype": "float32", "kv_cache_bytes": 16 * 2**20, "prefix_cache": "off", "max_model_len": 1024}
GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
METHODS = {
    "n-grams": {"speculative": "ngram"},
    "draft model": {"draft_model": course_model("draft")},
    "feature head": {"draft_model": course_model("eagle")},
}
h100, h100x4 = (
    Deployment(shape_of(name), device("H100"), n, mfu=0.5, mbu=0.8)
    for name, n in (("llama-3-8b", 1), ("llama-3-70b", 4))
)


def drafting(method=None, num_drafts=4, adaptive="off"):
    """The course target with a method's drafts, or without any."""
    options = METHODS[method] | {"num_drafts": num_drafts, "adaptive_drafts": adaptive} if method else {}
    return LLM(course_model("target"), **options, **COMMON)


def prompts_of(kind, batch):
    """As many different prompts as are asked for; the workload has eight."""
    some = workload(kind, 8)
    return [some[i % 8] if i < 8 else f"# {i}\n{some[i % 8]}" for i in range(batch)]


def run(llm, prompts, sampling=GREEDY):
    """-> (seconds of decoding steps, tokens of a row and step, drafts of a row and step, use)."""
    llm.engine.trace.events.clear()
    llm.generate(prompts, sampling)
    steps = [s for s in llm.engine.trace.steps() if all(row.num_tokens == 1 for row in s.rows)]
    rows, use = sum(len(s.rows) for s in steps), DraftUse.of(steps)
    tokens = sum(sum(s.num_new_tokens) for s in steps)
    return sum(s.finished_at - s.started_at for s in steps), tokens / rows, use.num_draft_tokens / rows, use


def gain(where, a, k, c, batch, context):
    return theory.speed_up(theory.expected_tokens(a, k), k, c, theory.verify_cost(where, batch, context, k))


# %% [markdown] name="question"
# ## 1. A question with a number
#
# An 8B model on one H100, context 500 for each request; half of the peak and 80 % of the bandwidth are reached. A draft
# model makes four drafts, each costs 5 % of a step, and each is kept with probability 0.8. At batch 1 that is nearly three times as fast.
#
# The batch grows: 2, 4, 8, ... **At which of these batches is it slower than without drafts for the first time?**

# %% name="predict"
widgets.predict("08e-batch", "Smallest power of two at which four drafts lose (a = 0.8)?", "requests")

# %% name="question-run"
batches = [2**n for n in range(10)]
gains = {batch: gain(h100, 0.8, 4, 0.05, batch, 500) for batch in batches}
first = next(batch for batch, found in gains.items() if found < 1)
widgets.reveal("08e-batch", first)
widgets.table([["times as fast", *(f"{gains[b]:.2f}" for b in batches)]], ["requests", *map(str, batches)])

# %% [markdown] name="idea"
# ## 2. The idea
#
# A bus leaves with two passengers. Another eight cost nothing: there are free seats. If it leaves full, each one who comes
# along on the chance of being useful takes the seat of somebody who is.
#
# A round makes $k$ drafts of $c$ each and verifies them in $v(k)$, counted in steps without drafts, and gives $E$ tokens:
#
# $$\text{speed-up} = \frac{E(a, k)}{v(k) + k\,c}$$
#
# - **a**, acceptance: who drafts, what is written, how it is sampled.
# - **c**, the cost of a draft in steps without drafts.
# - **v(k)**, what verifying costs: model, machine, **batch**, **context**.
#
# a belongs to drafter, text and sampling. c and v belong to machine and *load*, and change by the minute. "2 to 3 times
# faster" is a point in this space, not a property of the method.

# %% name="idea-figure" jupyter={"source_hidden": true}
contexts = [250, 500, 1000, 2000, 4000, 8000, 16000]
sizes = [2**n for n in range(10)]
grid = np.array([[gain(h100, 0.7, 4, 0.05, b, ctx) for b in sizes] for ctx in contexts])
fits = np.array([[b * (ctx + 5) <= h100.cache_tokens() for b in sizes] for ctx in contexts])
fig = figure(7.6, 3.0)
ax = fig.subplots()
ax.imshow(np.ma.masked_where(~fits, grid), cmap="cividis", aspect="auto", vmin=0.5, vmax=2.5, origin="lower")
ax.set_facecolor("lightgrey")
for y in range(len(contexts)):
    for x in range(len(sizes)):
        if not fits[y, x]:
            ax.text(x, y, "no room", ha="center", va="center", fontsize=7.5)
            continue
        loses = grid[y, x] < 1
        ax.text(x, y, f"{grid[y, x]:.1f}" + ("*" if loses else ""), ha="center", va="center", fontsize=8,
                color="white" if grid[y, x] < 1.6 else "black", fontweight="bold" if loses else "normal")  # fmt: skip
ax.set_xticks(range(len(sizes)), sizes)
ax.set_yticks(range(len(contexts)), [f"{n:,}" for n in contexts])
ax.set_xlabel("requests in the batch")
ax.set_ylabel("context of each")
show(
    fig,
    "Speed-up of an 8B on one H100 by formula, a = 0.7, k = 4, c = 0.05, over batch and context. Small batches gain 2.3 "
    "times at every context. Large batches with a short context lose, marked with a star; with a longer one they gain. Grey, "
    f"{np.sum(~fits)} of {fits.size} cells: the caches do not fit beside the weights.",
)

# %% [markdown] name="idea-reading"
# (By formula, a = 0.7; a star marks a loss; grey: the caches do not fit beside the weights, with 90 % of the memory in use.)
# Small batches gain everywhere. In a large batch it is the **context** that decides: reading the caches is bound by bytes again, and
# the drafts of one request share its cache.
#
# At long contexts the formula gives too much: it lets the products of the matrices run while caches are read. Layers run one
# after another, so an engine gets less. Without that overlap, with all of the bandwidth and 70 % of the peak FLOP/s in the
# products (80 % and 50 % in the picture), three drafts at batch 256 make a step of the 8B on this GPU 1.81 times as long at
# a context of 1,500, and 2.6 times at 500.
# <!-- tested: tests/claims/test_chapter_08.py::test_e08_08_verifying_drafts_in_a_large_batch_costs_a_longer_step_unless_the_context_is_long -->

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# How many drafts? One more is worth it as long as what it adds pays for what it takes.


# %% name="scratch-best"
def best(a, c, v, most=16):
    """(speed-up, k) of the best number of drafts; v(k): a function. k = 0: none."""
    found = (1.0, 0)
    for k in range(1, most + 1):
        expected = sum(a**i for i in range(k + 1))
        found = max(found, (expected / (v(k) + k * c), k))
    return found


rows = []
for a in (0.3, 0.5, 0.7, 0.9):
    row = []
    for batch in (1, 64, 256):
        speed, k = best(a, 0.05, lambda k, b=batch: theory.verify_cost(h100, b, 500, k))
        assert k == theory.best_num_drafts(a, 0.05, lambda k, b=batch: theory.verify_cost(h100, b, 500, k))
        row.append(f"k = {k}, {speed:.2f}x")
    rows.append([a, *row])
widgets.table(rows, ["acceptance", "batch 1", "batch 64", "batch 256"])

# %% [markdown] name="scratch-reading"
# No fixed k is right: the best one falls with the batch and rises with the acceptance. And **the win condition** has a
# simple form for one draft: 1 + a > v(1) + c.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The j-th draft is kept with all before it with probability a^j, so it adds a^j tokens. It is worth its time while that is
# more than its **price**: the tokens that come anyway in the time that one more draft takes. Where the two cross is the
# number of drafts. *An 8B on an H100, a = 0.8: how many drafts are worth it at batch 64, where the price was small at
# batch 16?*

# %% name="engine-price-predict"
widgets.predict("08e-price", "Drafts worth their price at batch 64, a = 0.8?", "drafts")


# %% name="engine-price"
def price(a, c, v, j):
    """The tokens that the best number of drafts gives in the time of the j-th one."""
    return best(a, c, v)[0] * (v(j) - v(j - 1) + c)


prices = {}
for batch in (16, 64):
    v = lambda k, b=batch: theory.verify_cost(h100, b, 500, k)  # noqa: E731
    prices[batch] = [price(0.8, 0.05, v, j) for j in range(1, 9)]
    worth = sum(0.8**j > p for j, p in enumerate(prices[batch], 1))
    assert worth == best(0.8, 0.05, v, most=8)[1]  # the same number as by trying all
    print(f"batch {batch}: {worth} of 8 drafts are worth their price")
widgets.reveal("08e-price", worth)

# %% name="engine-price-figure" jupyter={"source_hidden": true}
fig = figure(6.4, 2.8)
ax = fig.subplots()
ax.bar(range(1, 9), [0.8**j for j in range(1, 9)], color=BLUE, width=0.6, label="tokens it adds, 0.8^j")
for (batch, found), style in zip(prices.items(), (":", "-"), strict=True):
    ax.step(range(1, 9), found, style, where="mid", color=RED, label=f"price at batch {batch}")
tidy(ax, "the j-th draft", "tokens")
ax.legend(fontsize=8, frameon=False)
said = "; ".join(f"at batch {b}: " + ", ".join(f"{p:.2f}" for p in found) for b, found in prices.items())
show(fig, f"What the first to the eighth draft add, 0.8 to {0.8**8:.2f} tokens, and their prices {said}.")

# %% [markdown] name="engine-price-reading"
# The engine knows neither a nor v. It measures, while it serves, what steps of different sizes take, and how often each
# request's drafts are kept: at first it assumes 0.8, and what a request's own drafts show counts the more, the more of
# them there were. Two things the picture leaves out: a model that drafts runs once for each further draft for *all*
# requests of a step, so how deep a step drafts is decided for all together (the second function); and it computes every
# token of a step, to keep up with the text, so the engine switches it off where tokens do not come at least 8 % faster
# than without, and tries it again seldom. The two functions: <!-- stands: reference_impl/features/speculative/payoff.py -->

# %% name="engine-source"
print(inspect.getsource(Adapting._num_that_pay))
print(inspect.getsource(Adapting._depth_that_pays))

# %% [markdown] name="engine-run-text"
# A request with its own acceptance, in a load with its own price. One request that repeats and one that does not, alone
# and among others:

# %% name="engine-run"
rows = []
for batch in (1, 16):
    for kind in ("repeats", "code"):
        llm = drafting("feature head", adaptive="on")
        _, tokens, drafts, use = run(llm, prompts_of(kind, batch))
        rows.append([kind, batch, f"{drafts:.2f}", f"{tokens:.2f}", use.num_steps_off])
widgets.table(
    rows, ["text", "batch", "drafts of a row", "tokens of a row", "steps without drafts, since they would lose"]
)

# %% [markdown] name="engine-run-reading"
# What it chooses depends on the times that it measures, so your numbers differ, and on a busy machine from run to run.
# Greedy and seeded *texts* do not depend on it.
#
# ### What a server shows
#
# vLLM's counters under vLLM's names (with `inferlab:` in front), and one of our own, `spec_decode_num_lossy_drafts`: drafts judged
# by a rule that is not exact.

# %% name="engine-metrics"
llm = drafting("feature head")
counts = llm.engine.trace.counts = Counts(llm.engine.trace)
run(llm, prompts_of("code", 4))
for event in llm.engine.trace.events:
    counts.count(event)
page = counts.text().decode().splitlines()
print("\n".join(line for line in page if "spec_decode" in line and "created" not in line and not line.startswith("#")))

# %% [markdown] name="engine-metrics-reading"
# In the first name a draft is a row of draft tokens. Acceptance length = 1 + accepted / rows; share of drafts kept = accepted /
# draft tokens; by position: each counter over the rows. None of these is a speed-up: watch time per output token beside them.

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# **When does it stop paying as the batch grows? First predict, then measure**, on this machine, with n-grams on text that
# repeats (c almost 0). The prediction uses two things: tokens and drafts of a row, from one run at batch 1; and the time
# of a step with drafts at each batch, from drafts that are always wrong.

# %% name="measure-prepare"
BATCHES = (1, 4, 16)


class Wrong:  # in place of the n-grams
    def propose(self, request, k):
        return [request.tokens[-1]] * k


plain, lookup, wrong = drafting(), drafting("n-grams"), drafting("n-grams")
wrong.engine.scheduler.host_proposer, wrong.engine.scheduler._keeper = Wrong(), None
_, tokens_of_row, drafts_of_row, _ = run(lookup, prompts_of("repeats", 1))
v_full = {}
for batch in BATCHES:
    seconds = {}
    for name, llm in (("plain", plain), ("wrong", wrong)):
        took, tokens, drafts, _ = run(llm, prompts_of("repeats", batch), replace(GREEDY, max_tokens=10))
        seconds[name] = took * tokens  # of as many tokens: a step's time
    v_full[batch] = 1 + (seconds["wrong"] / seconds["plain"] - 1) * 4 / drafts
predicted = {b: tokens_of_row / (1 + (v_full[b] - 1) * drafts_of_row / 4) for b in BATCHES}
print("v(4) here: " + ", ".join(f"{v:.2f} at batch {b}" for b, v in v_full.items()))
print("predicted: " + ", ".join(f"{gain:.2f} at batch {b}" for b, gain in predicted.items()))

# %% [markdown] name="measure-batches-text"
# **What will be measured at batch 16?**

# %% name="measure-batches-predict"
widgets.predict("08e-sixteen", "Speed-up with n-grams on repeating text at batch 16, on this machine?", "times")

# %% name="measure-batches"
measured = {"n-grams": {}, "feature head": {}}
feature = drafting("feature head")
for batch in BATCHES:
    prompts = prompts_of("repeats", batch)
    served = {"plain": plain, "n-grams": lookup, "feature head": feature}
    rounds = [{name: run(llm, prompts)[0] for name, llm in served.items()} for _ in range(2)]
    seconds = {name: min(found[name] for found in rounds) for name in served}
    for name in measured:
        measured[name][batch] = seconds["plain"] / seconds[name]
widgets.reveal("08e-sixteen", measured["n-grams"][16])
rows = [[b, f"{predicted[b]:.2f}", *(f"{found[b]:.2f}" for found in measured.values())] for b in BATCHES]
widgets.table(rows, ["batch", "n-grams, predicted", "n-grams, measured", "feature head, measured"])

# %% name="measure-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.9)
ax = fig.subplots()
ax.plot(BATCHES, [predicted[b] for b in BATCHES], "--", color=GREY, label="n-grams, predicted from batch 1 and v")
for (name, found), marker, colour in zip(measured.items(), "o^", (BLUE, GREEN), strict=True):
    ax.plot(BATCHES, [found[b] for b in BATCHES], marker=marker, color=colour, label=f"{name}, measured")
ax.axhline(1, color=RED, linestyle=":", label="without drafts")
ax.set_xscale("log", base=2)
ax.set_xticks(BATCHES, BATCHES)
ax.minorticks_off()
ax.set_ylim(0, None)
tidy(ax, "requests in the batch", "times as fast, decoding")
ax.legend(fontsize=8, frameon=False)
values = {"predicted for n-grams": predicted, **{f"measured with {name}": found for name, found in measured.items()}}
words = "; ".join(f"{name} " + ", ".join(f"{found[b]:.2f}" for b in BATCHES) for name, found in values.items())
show(fig, f"Speed-up over the batch on this machine, k = 4, text that repeats, at batch 1, 4 and 16: {words}.")

# %% [markdown] name="measure-gap"
# Both depend on v(4), which need not grow with the batch in your run. What the prediction leaves out: other requests have other
# acceptances than the first, a step waits for its longest row, and near the end fewer requests are left than the batch
# began with (a smaller batch mostly has a smaller v). On a machine that does other work, all of these are times with noise.
#
# ### Acceptance by kind of text and by temperature
#
# Text is generated at the temperature, and drafted for at the same. *Which of the three ways suffers most from
# temperature?*

# %% name="measure-kinds"
prose = [llm.encode(text)[:60] for text in (measure.__doc__, Adapting.__doc__ + inspect.getdoc(DraftUse))]
texts = {"repeats": workload("repeats", 2), "code": workload("code", 2), "prose": prose}
rows = []
for name in METHODS:
    llm = drafting(name)
    for kind, prompts in texts.items():
        tokens = []
        for temperature in (0, 0.6, 1.2):
            sampling = replace(GREEDY, temperature=temperature, max_tokens=24)
            tokens.append(f"{run(llm, prompts, sampling)[1]:.2f}")
        rows.append([name, kind, *tokens])
widgets.table(rows, ["who drafts", "text", "T = 0", "T = 0.6", "T = 1.2"])

# %% [markdown] name="measure-kinds-reading"
# (Tokens of a row and step, with a few dozen steps each: look at the large differences only.) n-grams lose twice: hot text repeats less, so fewer drafts
# are made; and a copied draft is kept with probability p(x), which falls. What is *drawn* from a model at the same
# temperature suffers less, since both distributions flatten.
#
# **When it fails**, then: drafters that are badly aligned; drafts that are expensive (see the exercise); full batches at short
# context; a mixture of experts in a batch of a few (`a_guesses`); temperature, for drafts that are not drawn (copies, and
# drafts by argmax, which most engines take by default). The adaptive k of section 4 is there for these: it makes fewer drafts or none, so
# that what is left of the loss is what finding out costs.

# %% [markdown] name="exercise"
# ### Exercise: a 1B drafts for a 7B
#
# On a GPU that holds both, with two models of one vocabulary:
#
# ```
# inferlab bench draft_pair
# ```
#
# with the two folders as options (`--help` names them). Without them it takes the course models, which are the declared form of
# this exercise for a CPU: the ratio of their sizes is about that of a 1B and a 7B. First the prediction, then the run.
# **By bytes alone (batch 1, all weights read once), a draft costs the ratio of the sizes. What is c, measured here?**

# %% name="exercise-predict"
widgets.predict("08e-pair", "c of the course's draft model on this machine, in steps of the target?", "steps")

# %% name="exercise-run"
found = measure(course_model("target"), course_model("draft"), (1, 2, 4), dtype="float32", kv_cache_bytes=2**23)
widgets.reveal("08e-pair", found[1]["c"])
rows = [[r["k"], f"{r['acceptance']:.0%}", f"{r['tokens_per_row']:.2f}", f"{r['v']:.2f}", f"{r['c']:.2f}", f"{r['bound']:.2f}",
         f"{r['speed_up']:.2f}"] for r in found]  # fmt: skip
print(f"by bytes c = {0.82 / 7.35:.2f}")
one = found[0]
print(
    f"one draft: {one['tokens_per_row']:.2f} tokens a step, in the time of v(1) + c = {one['v'] + one['c']:.2f} steps"
)
widgets.table(rows, ["k", "drafts kept", "tokens a step", "v", "c", "by formula, decoding", "measured, whole run"])

# %% [markdown] name="exercise-reading"
# The draft model costs more than its bytes say, between a fifth more and nearly four times as much in the runs that we took: on a CPU, and for models this small
# on a GPU too, a pass has fixed costs (launches, Python, layout of a batch), and it also computes the text's own tokens. One draft a step gains only where
# its tokens are more than v(1) + c: the line above the table has both. On a large machine by formula, an 8B for a 70B on four
# H100 (the draft model reads with one GPU's bandwidth, the target with that of four, so c is not the ratio of the sizes):

# %% name="exercise-gpu"
draft = replace(h100, num_devices=1)
rows = []
for batch in (1, 16, 64, 256):
    c = theory.draft_cost(h100x4, draft, batch, 1000)
    speed, k = best(0.75, c, lambda k, b=batch: theory.verify_cost(h100x4, b, 1000, k))
    rows.append([batch, format_seconds(theory.verify_seconds(h100x4, batch, 1000, 0)), f"{c:.2f}", k, f"{speed:.2f}"])
widgets.table(rows, ["batch", "step of the 70B", "c of the 8B on one H100", "best k at a = 0.75", "times as fast"])

# %% [markdown] name="explore"
# ## 6. Explore
#
# The formula, with this machine's measured points. *Find a load on the H100 in which k = 8 is best, and one in which no
# draft is.*


# %% name="explore-widget"
def here(batch, k):
    near = min(BATCHES, key=lambda b: abs(np.log2(b / batch)))
    return 1 + (v_full[near] - 1) * k / 4


points = [Measured(f"{name}, repeats", b, 4, speed) for name, found in measured.items() for b, speed in found.items()]
widgets.speculation(points, {"this machine, course model": here}, acceptance=0.75, machine="this machine, course model")

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"At high batch it still helps if the draft is fast" and "the gain is only at batch 1".** (E08.8) Both, and neither: it
# depends on what binds the step. 8B, three drafts, a = 0.8, a drafter that costs *nothing*:

# %% name="errata-batch"
fast = Deployment(shape_of("llama-3-8b"), device("H100"), mfu=0.7, mbu=0.8)
rows = []
for context in (100, 500, 1500):
    row = []
    for b in (1, 64, 256, 512):
        fits_in = b * (context + 4) <= fast.cache_tokens()
        row.append(f"{gain(fast, 0.8, 3, 0.0, b, context):.2f}" if fits_in else "no room")
    rows.append([f"{context:,}", *row])
widgets.table(rows, ["context", "batch 1", "64", "256", "512"])

# %% [markdown] name="errata-batch-reading"
# At a context of 100 a free and good drafter still *loses* in the two large batches: what costs is verification. The cited
# criterion ("γ-tolerance", a submission to ICLR 2026) says the same: the ratio of drafting and verifying times has to stay
# below what the acceptance gives; its authors find that most drafters violate it at large batches. In this chapter's terms
# $k c + v(k) < E$, so the ratio $k c / v(k)$ has to stay below $E / v(k) - 1$, and a draft may cost at most
# $(E - v(k)) / k$ steps. Below 0, no drafter pays:

# %% name="errata-tolerance"
rows, expected = [], theory.expected_tokens(0.8, 3)
for context in (100, 500):
    for b in (1, 64, 256, 512):
        v = theory.verify_cost(fast, b, context, 3)
        rows.append([context, b, f"{v:.2f}", f"{expected / v - 1:.2f}", f"{(expected - v) / 3:.2f}"])
print(f"a = 0.8, k = 3: E = {expected:.2f}")
widgets.table(rows, ["context", "batch", "v(3)", "drafting over verifying, below", "c below"])

# %% [markdown] name="errata-claim-text"
# **"2-3x faster."** (E08.8) Where? Count the part of the space in which it holds, at batch 1 and at 128:

# %% name="errata-claim"
space = [(a, k, c) for a in np.arange(0.3, 0.96, 0.05) for k in range(1, 9) for c in (0.0, 0.05, 0.1, 0.2, 0.3)]
for batch in (1, 128):
    found = np.array([gain(h100, a, k, c, batch, 1000) for a, k, c in space])
    print(f"batch {batch}: {np.mean((found >= 2) & (found <= 3)):.0%} of {len(space)} points between 2 and 3, "
          f"{np.mean(found > 3):.0%} above, {np.mean(found < 1):.0%} below 1")  # fmt: skip
print(
    f"a = 0.8, k = 4: c = 0.05 gives {gain(h100, 0.8, 4, 0.05, 1, 1000):.2f}, c = 0.2 gives {gain(h100, 0.8, 4, 0.2, 1, 1000):.2f}"
)
print(f"a = 0.4, k = 4, c = 0.2 gives {gain(h100, 0.4, 4, 0.2, 1, 1000):.2f}: slower")

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026.
#
# **vLLM** reports `spec_decode_num_drafts`, `spec_decode_num_draft_tokens`, `spec_decode_num_accepted_tokens` and the latter
# per position. Schedulers count draft tokens in the token budget of a step, so drafts compete with chunks of prompts. Engines
# by now can lower k, or end it, by batch size or acceptance; look for the option in yours. Adaptive schemes (Liu et al. 2024,
# SmartSpec) choose k by load and acceptance, as the engine here does.
#
# Before you turn it on: measure TPOT and throughput **at your load**, with your texts and temperatures. Watch acceptance by
# position over time: a drop after a change of model or prompt template is a drafter that has gone stale. Count the
# draft model's memory: its weights and cache take room for requests.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Then build the drafter and the verifier yourself: [lab 08](../../labs/08_speculative_decoding/speculative.ipynb).

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("08_speculative_decoding").draw(seed=1, tag="pays"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Speed-up = E(a, k) / (v(k) + k c). One draft pays if 1 + a > v(1) + c.
# - a: drafter, text, sampling. c: the drafter's passes, with all that it computes, on its machine and at this load. v: model,
#   machine, batch, context. A draft may cost at most c = (E − v(k)) / k.
# - Large batch, short context: compute binds, verification costs, and even a free drafter may lose. Long context: bytes bind
#   again, and it may gain.
# - Adaptive k: the j-th draft is worth its time while a^j is above its price. k falls as the batch fills.
# - Metrics: rows with drafts, draft tokens, accepted, accepted per position. Speed is TPOT, not acceptance.
# - "2 to 3 times" needs a, k, c, batch, context and temperature beside it.
