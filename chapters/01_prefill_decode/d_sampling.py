# %% [markdown] name="title"
# # 01d · Choosing the token: greedy, temperature, top-k, top-p
#
# About 30 minutes. You need `a_phases`. Each pass returns one number per token of the vocabulary, a **logit**: the
# larger, the likelier. The sampler has to choose. The lab is [Metrics and
# sampling](../../labs/01_prefill_decode/metrics_sampling.ipynb), parts 6 to 11.

# %% name="setup"
# Set-up: libraries, the course model, and the logits this notebook looks at.
import inspect
import time

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, SKY, figure, show, tidy
from reference_impl import LLM, Engine, EngineConfig, Parts, SamplingParams, course_model
from reference_impl.assembly.sampler import probabilities, sample
from reference_impl.core import sampler
from reference_impl.core.philox import uniform
from reference_impl.theory.hardware import device
from reference_impl.theory.kv_cache import logits_bytes
from reference_impl.theory.units import format_bytes, format_seconds

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
# The prefix cache is off, so that a prompt asked twice is computed twice; chapter 06 turns it on.
llm = LLM(course_model("target"), dtype="float32", kv_cache_bytes=32 * 2**20, prefix_cache="off")
model = llm.engine.model
on_gpu = model.device.type == "cuda"
vocab = model.config.vocab_size
names = [llm.tokenizer.decode([i]) for i in range(vocab)]


class Tap:
    """A sampler that keeps the logits it is given, then samples as the engine's own does."""

    def __call__(self, logits, requests):
        self.logits = logits.clone()
        return sample(logits, requests)


def logits_after(text):
    tap = Tap()
    engine = Engine(model, EngineConfig(num_blocks=64, prefix_cache="off"), Parts(sampler=tap))
    engine.add(llm.encode(text), SamplingParams(max_tokens=1, temperature=0))
    engine.step()
    return tap.logits[0].float().cpu()  # [vocab]


PROMPT = "def add(a, b):\n    return"
logits = logits_after(PROMPT)
print(f"{PROMPT!r} -> {len(logits):,} logits, from {logits.min():.1f} to {logits.max():.1f}")

# %% [markdown] name="question"
# ## 1. A question with a number
#
# The course model has a vocabulary of 4,096 tokens. It has read `def add(a, b):` and `return`. At temperature 1 you
# keep the smallest set of tokens that holds 90 % of the probability (top-p 0.9).
#
# **How many tokens remain?**

# %% name="predict"
widgets.predict("01d-kept", "How many of 4,096 tokens does top-p 0.9 keep after 'return'?", "tokens")

# %% name="answer"
kept = probabilities(logits[None], [SamplingParams(temperature=1.0, top_p=0.9)])[0] > 0
print("the likeliest of them:", [names[i] for i in logits.argsort(descending=True)[:8].tolist()])
widgets.reveal("01d-kept", int(kept.sum()))

# %% [markdown] name="idea"
# ## 2. The idea
#
# Cut a ribbon of length 1 into pieces, one for each token, each as long as its token's probability. (**Softmax** gives
# the lengths: `exp(logit)` of the token over the sum of `exp(logit)` of all.) Lay the pieces side by side in the order
# of their ids. Now stick a pin into the ribbon at a random place between 0 and 1. The piece you hit is the next token.
# Likely tokens are hit often because their pieces are long. That is all there is to *sampling*.
#
# The parameters change the ribbon before the pin falls.
#
# - **Temperature** divides the logits before the softmax. It stretches the long pieces and shrinks the short ones
#   (below 1), or makes them more alike (above 1). Temperature 0 leaves one piece: *greedy*, no randomness.
# - **Top-k** throws away all but the k longest pieces.
# - **Top-p** sorts the pieces by length and keeps the longest until they make up at least p of the ribbon. The piece
#   that reaches p stays, whole.
# - After each filter, the rest is renormalized to length 1.
#
# Why filter at all? Each unlikely token is hit almost never. But there are thousands, and together their pieces are
# long enough to be hit every few words.

# %% name="idea-figure" jupyter={"source_hidden": true}
shares = np.array([0.08, 0.42, 0.05, 0.25, 0.14, 0.06])  # six tokens, in id order
sharp = shares**2 / np.sum(shares**2)
longest = np.argsort(-shares)
inside = np.zeros(6, bool)
inside[longest[: int(np.searchsorted(np.cumsum(shares[longest]), 0.8)) + 1]] = True
cut = np.where(inside, shares, 0) / shares[inside].sum()
fig = figure(7.6, 2.6)
ax = fig.subplots()
pin = 0.62
for y, (ribbon, label) in enumerate(((shares, "temperature 1"), (sharp, "temperature 0.5"), (cut, "top-p 0.8"))):
    left = 0.0
    for i, share in enumerate(ribbon):
        if share > 0:
            ax.barh(-y, share, left=left, height=0.6, color=(BLUE, ORANGE, GREEN, SKY, GREY, "white")[i],
                    hatch=("", "//", "..", "xx", "", "\\\\")[i], edgecolor=INK, linewidth=0.6)  # fmt: skip
            if share > 0.06:
                ax.text(left + share / 2, -y, f"{i}", ha="center", va="center", fontsize=9, backgroundcolor="white")
        left += share
    ax.text(-0.01, -y, label, ha="right", va="center", fontsize=9)
ax.plot([pin, pin], [-2.5, 0.45], color=INK, linewidth=1.2)
ax.plot(pin, 0.48, marker="v", color=INK)
ax.text(pin + 0.01, 0.5, f"the pin, u = {pin}", fontsize=8, va="center")
ax.set_xlim(-0.2, 1.02)
ax.set_ylim(-2.5, 0.7)
ax.axis("off")
show(
    fig,
    "Three ribbons of length 1, cut into pieces for six tokens in id order: at temperature 1, at temperature 0.5 with "
    "long pieces longer, and after top-p 0.8 with three pieces left and stretched. The pin at u = 0.62 hits token 3 in the "
    "first and third, and token 1 in the second.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# Here it is for one row of logits. Compare it with the list above. Three things go wrong most often:
#
# - **Order.** Temperature first, then top-k, then top-p within what top-k left. In another order, different tokens
#   remain.
# - **The edge.** In top-p, a token is kept while the probability *before* it is below p. So the token that crosses p is
#   kept, and at least one always is.
# - **The draw.** Sum up in the order of the *ids*, not of the sorted list, and take the first token at which the sum
#   exceeds u. Tokens with probability 0 are never taken.


# %% name="scratch"
def to_probs(logits, temperature):  # [vocab] -> [vocab]
    if temperature == 0:  # greedy: no division; the first of equals
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    return ((logits - logits.max()) / temperature).softmax(0)  # largest 0: exp cannot overflow


def keep_k(probs, k):
    if k == 0 or k >= len(probs):
        return probs
    order = probs.argsort(descending=True, stable=True)  # stable: of equals, the lower id
    kept = torch.zeros_like(probs)
    kept[order[:k]] = probs[order[:k]]
    return kept / kept.sum()


# %% [markdown] name="scratch-top-p-text"
# Top-p looks at the sum before each token, and the draw at the sum up to it:


# %% name="scratch-top-p"
def keep_p(probs, p):
    if p == 1:
        return probs  # off: a rounded sum may reach 1 before the last token
    order = probs.argsort(descending=True, stable=True)
    before = probs[order].cumsum(0) - probs[order]  # probability of all longer pieces
    kept = torch.zeros_like(probs)
    stays = order[before < p]
    kept[stays] = probs[stays]
    return kept / kept.sum()


def pick(probs, u):  # inverse transform: where the pin lands
    ends = probs.double().cumsum(0)
    return int(torch.searchsorted(ends, u * ends[-1], right=True))


# %% [markdown] name="scratch-check-text"
# Six settings, each against the engine's sampler:

# %% name="scratch-check"
settings, found = ((0, 0, 1.0), (1.0, 0, 1.0), (0.7, 0, 0.9), (1.3, 40, 1.0), (1.3, 40, 0.8), (1.0, 3, 0.05)), []
for temperature, k, p in settings:
    mine = keep_p(keep_k(to_probs(logits, temperature), k), p)
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p)
    theirs = probabilities(logits[None], [params])[0]
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)
    found.append([temperature, k or "off", p if p < 1 else "off", int((mine > 0).sum()), repr(names[pick(mine, 0.62)])])
widgets.table(found, ["temperature", "top-k", "top-p", "tokens that stay", "u = 0.62 picks"])

# %% [markdown] name="scratch-reading"
# The lab asks for the same on many rows at once, one row per request. There, work along `dim=-1` and put values back
# into place with `scatter`. Note that p = 1 switches top-p off; it is a special case.
#
# The question from the top at other temperatures: the number of tokens that top-p keeps follows the model's confidence.
# Top-k keeps k, confident or not. The picture shows why filters matter most when the distribution is flat.


# %% name="kept"
def kept_row(temperature):
    probs = to_probs(logits, temperature)
    tail = probs.sort(descending=True).values[40:].sum()
    return [temperature, int((keep_p(probs, 0.9) > 0).sum()), f"{tail:.1%}"]


widgets.table(
    [kept_row(temperature) for temperature in (0.5, 1.0, 1.5)],
    ["temperature", "tokens that top-p 0.9 keeps", "probability beyond the 40 likeliest"],
)

# %% name="kept-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.0)
ax = fig.subplots()
said = []
for temperature, colour, mark in ((0.5, BLUE, "o"), (1.0, GREEN, "s"), (1.5, ORANGE, "^")):
    ordered = to_probs(logits, temperature).sort(descending=True).values
    count = int((keep_p(to_probs(logits, temperature), 0.9) > 0).sum())
    ax.loglog(range(1, vocab + 1), ordered.clamp(min=1e-9), color=colour, label=f"temperature {temperature}")
    ax.plot([count], [ordered[count - 1]], mark, color=colour, markersize=8)
    said.append(f"at temperature {temperature} top-p 0.9 ends after {count}")
ax.axvline(40, color=GREY, linestyle=":", label="top-k 40")
ax.set_ylim(1e-6, 1)
tidy(ax, "tokens, the likeliest first", "probability", "after 'return'; the marks: where top-p 0.9 ends")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Probabilities of all tokens in falling order, log-log, at three temperatures, with the place where top-p 0.9 cuts and "
    "a line at 40 for top-k. The higher the temperature, the flatter the curve and the later the cut: "
    + "; ".join(said)
    + ".",
)

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The engine samples all rows of a step together, each with its own parameters. Its draw, and its two filters in one
# sort:

# %% name="engine-source"
print(inspect.getsource(sampler.draw))
print(inspect.getsource(sampler._keep_top))

# %% [markdown] name="engine-philox-text"
# Where does u come from? From a counter, not from a stream of random numbers: a pure function of the request's seed and
# the token's position. So a request generates the same text alone, in a batch, or after it was preempted. (As long as
# the logits are the same: a batch of another size rounds differently, and if the boundary between two tokens is within
# that rounding of u, the choice can change.)

# %% name="engine-philox"
warm = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
alone = llm.generate([PROMPT], warm)[0]
crowd = llm.generate([PROMPT, "import ", "class Stack:", PROMPT], [warm, warm, warm, SamplingParams(max_tokens=9)])[0]
assert alone.token_ids == crowd.token_ids
length = len(llm.encode(PROMPT))
print("u of the first three positions:", uniform([7] * 3, 0, [length, length + 1, length + 2]).round(3))
print(repr(PROMPT + alone.text))

# %% [markdown] name="engine-temperatures-text"
# The effect of temperature on text, with one seed. The course model was trained on Python; it has learned the form
# better than the meaning.

# %% name="engine-temperatures"
for temperature in (0, 0.5, 1.0, 1.6):
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    print(f"{temperature:3}: {llm.generate(['def add(a, b):'], params)[0].text!r}")

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# ### Does it draw what it says?
#
# Ten thousand draws from the real logits, at temperature 1.5 with top-p 0.9, compared with the distribution. If the
# sampler is right, the differences are random: each share should lie within about two standard errors, `sqrt(p (1 − p)
# / n)`, in 95 of 100 cases.
# <!-- source: the normal distribution, 95.4 % of which lie within two standard deviations -->

# %% name="draws"
draws = 10_000
wanted = probabilities(logits[None], [SamplingParams(temperature=1.5, top_p=0.9)])[0]
u = torch.from_numpy(uniform(1, 0, np.arange(draws)))
drawn = torch.cat([sampler.draw(wanted[None].expand(500, -1), part) for part in u.split(500)])
seen = drawn.bincount(minlength=vocab) / draws
error = (wanted * (1 - wanted) / draws).sqrt()
assert seen[wanted == 0].sum() == 0  # what was cut off is never drawn
kept = wanted > 0
print(f"{int(kept.sum())} tokens can be drawn; {float(((seen - wanted).abs() <= 2 * error)[kept].float().mean()):.0%} of the "
      f"shares lie within two standard errors")  # fmt: skip

# %% name="draws-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.0)
ax = fig.subplots()
top = wanted.argsort(descending=True)[:14]
place = np.arange(len(top))
ax.bar(place, wanted[top], color=SKY, label="formula")
ax.errorbar(
    place, seen[top], yerr=2 * error[top], fmt="o", color=INK, markersize=4, capsize=3, label="drawn, with 2 errors"
)
ax.set_xticks(place, [repr(names[i]) for i in top.tolist()], rotation=60, ha="right", fontsize=8)
tidy(ax, ylabel="share")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Shares of the fourteen likeliest tokens after 'return': bars from the formula, points from ten thousand draws "
    "with two standard errors. The points lie on the bars within their errors.",
)

# %% [markdown] name="time-text"
# ### What does it cost?
#
# Sampling is not free. The logits of a step are `requests × vocabulary × 4` bytes in fp32, and each operation
# reads or writes them once or a few times: a temperature reads and writes them, a softmax reads its input two or three
# times (its maximum, its sum, its values) and writes once, a sum reads and writes one number a row. Sorting goes over them many times. First the sampler's share
# of a step in this engine, decoding 16 requests (`watched`, folded, runs them with a stopwatch around the sampler):


# %% name="timed" jupyter={"source_hidden": true}
class Timed:
    """The engine's sampler with a stopwatch."""

    def __init__(self):
        self.seconds = []

    def __call__(self, logits, requests):
        if on_gpu:
            torch.cuda.synchronize()  # the model's own kernels are still running
        started = time.perf_counter()
        result = sample(logits, requests)  # ends by copying the tokens to the host, which waits for a GPU
        self.seconds.append(time.perf_counter() - started)
        return result


def watched(options, outputs):  # (seconds of choosing, seconds of a step), medians over the decode steps
    watch = Timed()
    engine = Engine(model, EngineConfig(num_blocks=512, prefix_cache="off"), Parts(sampler=watch))
    for i in range(rows):
        engine.add(llm.encode(PROMPT), SamplingParams(max_tokens=outputs, seed=i, ignore_eos=True, **options))
    while engine.has_work():
        engine.step()
    steps = [s.finished_at - s.started_at for s in engine.trace.steps()]
    return np.median(watch.seconds[1:]), np.median(steps[1:])


# %% name="time"
settings = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "temperature, top-k": {"temperature": 0.8, "top_k": 40},
    "temperature, top-p": {"temperature": 0.8, "top_p": 0.9},
}
rows = 64 if on_gpu else 16
watched(settings["temperature, top-p"], 3)  # warm up
shares = {name: watched(options, 12) for name, options in settings.items()}
widgets.table(
    [[name, format_seconds(chosen), format_seconds(step), f"{chosen / step:.1%}"]
     for name, (chosen, step) in shares.items()],
    ["setting", "choosing the tokens", "the whole step", "share"],
)  # fmt: skip

# %% name="time-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.1)
ax = fig.subplots()
for y, (chosen, step) in enumerate(shares.values()):
    ax.barh(y, 1e3 * (step - chosen), color=BLUE, label="model, scheduler, the rest" if not y else None)
    ax.barh(y, 1e3 * chosen, left=1e3 * (step - chosen), color=ORANGE, hatch="//", edgecolor="white",
            label="choosing the tokens" if not y else None)  # fmt: skip
ax.set_yticks(range(len(shares)), list(shares))
ax.invert_yaxis()
tidy(ax, f"ms of a decode step of {rows} requests, measured here")
fig.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)
show(
    fig,
    "A decode step as one bar per setting, the sampler's part at its end: "
    + "; ".join(f"{name} {chosen / step:.0%}" for name, (chosen, step) in shares.items())
    + ".",
)

# %% [markdown] name="vocab-text"
# A vocabulary of 4,096 is small. Now the sampler alone, on random logits with the vocabulary sizes of real models,
# against the time of reading the logits once at this machine's copy speed.


# %% name="vocab-choose" jupyter={"source_hidden": true}
def median_seconds(work, *arguments):
    found = []
    for _ in range(4):
        started = time.perf_counter()
        float(work(*arguments).flatten()[0])  # reading one number waits for a GPU
        found.append(time.perf_counter() - started)
    return float(np.median(found[1:]))


def choose(made, options):
    if not options["temperature"]:
        return made.argmax(dim=-1)
    probs = probabilities(made, [SamplingParams(**options)] * len(made))
    return sampler.draw(probs, torch.full((len(made),), 0.5, device=made.device))


# %% name="vocab"
sizes = (4_096, 32_000, 128_256)
made_rows = 64 if on_gpu else 4
generator = torch.Generator().manual_seed(0)
table = {}
for size in sizes:
    made = torch.randn(made_rows, size, generator=generator).to(model.device) * 3
    table[size] = {"one copy": median_seconds(torch.clone, made)}
    table[size] |= {name: median_seconds(choose, made, options) for name, options in settings.items()}
h100 = device("H100")
step_bytes = logits_bytes(128_256, 64)
print(f"on an H100, 64 rows of 128,256 logits are {format_bytes(step_bytes)}: "
      f"{format_seconds(step_bytes / h100.bandwidth)} to read once")  # fmt: skip
widgets.table(
    [[f"{made_rows} x {size:,}", format_bytes(logits_bytes(size, made_rows)), *map(format_seconds, found.values())]
     for size, found in table.items()],
    ["logits", "bytes", *table[sizes[0]]],
)  # fmt: skip

# %% name="vocab-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 3.0)
ax = fig.subplots()
looks = {"temperature, top-p": (ORANGE, "o-"), "temperature, top-k": (GREEN, "s--"), "temperature": (BLUE, "^-"),
         "greedy": (GREY, "v-"), "one copy": (INK, "x:")}  # fmt: skip
for name, (colour, mark) in looks.items():
    ax.plot(sizes, [1e3 * table[size][name] for size in sizes], mark, color=colour, label=name)
ax.set_xscale("log")
ax.set_yscale("log")
ax.minorticks_off()
ax.set_xticks(sizes, [f"{s:,}" for s in sizes])
tidy(ax, f"vocabulary, {made_rows} rows", "ms")
fig.legend(loc="outside upper center", ncols=5, fontsize=8, frameon=False)
show(
    fig,
    "Time of one sampling step over the vocabulary size, log-log, measured here. With the largest vocabulary: "
    + ", ".join(f"{name} {format_seconds(table[sizes[-1]][name])}" for name in looks)
    + ".",
)

# %% [markdown] name="vocab-reading"
# All lines grow with the vocabulary. What differs is how often the logits are read. Greedy reads them once. Temperature
# and softmax need a handful of passes. The filters sort, and sorting is the expensive part, so fast samplers for GPUs
# avoid it. They look for the threshold instead (is the probability above `x` at least p?), in one kernel that bisects
# an interval, or reject tokens that fall outside. That kernel comes in chapter 05.
#
# And it runs in *every* decode step. On a GPU whose step takes a few milliseconds, a sampler that launches many small
# kernels and sorts is visible in TPOT. In TTFT it counts once.

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# The real distribution after `return`. Grey: after temperature. Hatched: what the filters keep, renormalized. Move u
# slowly and see the drawn token change: it goes through the ids in order, not from likely to unlikely. Then try top-k 1
# at any temperature, temperature 0, and temperature 2 with top-p 0.9. How many tokens remain?


# %% name="explore"
def distribution(temperature, top_k, top_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    return probabilities(logits[None], [params])[0].numpy()


widgets.sampling(distribution, names)

# %% [markdown] name="errata-one"
# ## 7. What the cheat sheets get wrong
#
# **"That models generate one token at a time is a misconception, since the prompt is processed in parallel."** (E01.10)
# It is true of generation. The prefill *processes* many tokens and generates one. Count the passes of our engine:


# %% name="errata-one-cell"
def passes(prompt_tokens, outputs, budget):
    engine = Engine(model, EngineConfig(num_blocks=128, max_num_batched_tokens=budget, prefix_cache="off"))
    prompt = (llm.encode(inspect.getsource(Engine)) * 2)[:prompt_tokens]
    engine.add(prompt, SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True))
    given = []
    while engine.has_work():
        given.append(len(engine.step().tokens))
    computed = [sum(row.num_tokens for row in s.rows) for s in engine.trace.steps()]
    return given, computed


for prompt_tokens, outputs, budget in ((300, 8, 2048), (300, 8, 128)):
    given, computed = passes(prompt_tokens, outputs, budget)
    print(f"prompt {prompt_tokens}, {outputs} outputs, at most {budget} tokens a pass: {len(given)} passes")
    print(f"    tokens computed  {computed}\n    tokens generated {given}")
    assert max(given) == 1
    assert sum(given) == outputs
    assert len(given) == outputs + -(-prompt_tokens // budget) - 1

# %% [markdown] name="errata-one-reading"
# N outputs, N passes, and one more for each further chunk of the prompt. The reason is in this notebook: the next pass
# needs the sampled token. The real exceptions *verify* drafts (speculative decoding and multi-token prediction, chapter
# 08), where one pass can confirm several tokens, or are other kinds of models (diffusion). So say: one pass per
# generated token, unless drafts are verified.
#
# ### The same parameters, another order
#
# Not an erratum, but a trap in every comparison of two engines. Top-p before temperature keeps a different set than
# after it:


# %% name="order"
def order_row(temperature):
    probs = to_probs(logits, temperature)
    after, before = keep_p(probs, 0.9) > 0, keep_p(to_probs(logits, 1.0), 0.9) > 0
    both = keep_p(keep_k(probs, 5), 0.9) > 0
    return [temperature, *(int(kept.sum()) for kept in (after, before, both, after & (keep_k(probs, 5) > 0)))]


widgets.table(
    [order_row(temperature) for temperature in (0.5, 1.5)],
    ["temperature", "top-p 0.9 after it", "top-p 0.9 before it", "top-k 5, then top-p", "each on its own, and both"],
)

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Names and defaults change; look them up in the version you run.
#
# **vLLM** (V1 engine) applies penalties and other logits processors, then temperature, then min-p, top-k and top-p. On
# NVIDIA GPUs it can use FlashInfer's kernels, which do not sort. Whether it does so by default has changed between
# versions (`VLLM_USE_FLASHINFER_SAMPLER`: off in 0.18, used where the GPU allows it in 0.22). `seed` per request fixes
# the random numbers; rounding that depends on the batch can still change a token.
#
# **FlashInfer** samples by rejection inside one kernel. Where both filters are on, its functions for logits take
# `filter_apply_order`: `"top_k_first"` or `"joint"`, which is the difference of the last cell.
#
# **SGLang** chooses between FlashInfer and plain PyTorch with `--sampling-backend`.
#
# **Hugging Face transformers** (5.23) `generate` builds a list of logits processors, those for sampling in the order
# temperature, top-k, top-p, min-p. Others can come between them.
#
# **llama.cpp** has a chain that you can reorder with `--samplers`. By default its temperature comes *last*, after
# top-k, top-p, min-p and others. The same parameters in the same request therefore give a different distribution there.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Then write the sampler: [lab 01](../../labs/01_prefill_decode/metrics_sampling.ipynb), parts 6 to 11. At the end the
# engine generates text with it.

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("01_prefill_decode").draw(seed=1, tag="sampling"))

# %% [markdown] name="card"
# ## 10. Card
#
# - softmax(logits / temperature). Subtract the largest logit first. Temperature 0 is a special case: the argmax.
# - Order: temperature, then top-k, then top-p within what top-k left. Renormalize to 1 after each filter.
# - Top-p: a token is kept while the probability before it is below p. The one that crosses p is kept; the first always
#   is.
# - Draw: cumulative sum in the order of ids, first token above u. One u per request and position, from a counter.
# - One pass per generated token, unless drafts are verified. Chunks of a prompt add passes that generate nothing.
# - Cost: every step, rows × vocabulary × 4 bytes per pass over the logits. Sorting is the expensive part.
