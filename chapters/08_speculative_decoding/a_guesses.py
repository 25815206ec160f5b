# %% [markdown] name="title"
# # 08a · A step has room: the idea of speculative decoding
#
# About 35 minutes. You need chapters 01 (prefill and decode) and 02 (the KV cache). The next notebook, `b_exactness`, is
# about the rule that keeps the distribution; here all text is greedy. The lab to all five notebooks is [Draft and
# verify](../../labs/08_speculative_decoding/speculative.ipynb).

# %% name="setup"
import inspect
import statistics
from dataclasses import replace

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, ORANGE, RED, figure, show, tidy
from chapters.widgets.speculation import Measured
from reference_impl import LLM, Engine, EngineConfig, Parts, SamplingParams, course_model
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.features.speculative.ngram import NgramProposer
from reference_impl.features.speculative.suffix import SuffixProposer
from reference_impl.bench.speculative import workload
from reference_impl.observe.trace import DraftUse
from reference_impl.theory import speculative as theory
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.units import format_seconds

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
llm = LLM(course_model("target"), dtype="float32", kv_cache_bytes=8 * 2**20, prefix_cache="off")
model = llm.engine.model
repeats, code = (llm.encode(workload(kind, 1)[0]) for kind in ("repeats", "code"))
GREEDY = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)


def new_engine(num_drafts=0, proposer=None, **more):
    """An engine; with a proposer, every decoding request has up to num_drafts drafts in every step."""
    config = EngineConfig(num_blocks=256, prefix_cache="off", num_drafts=num_drafts, adaptive_drafts="off", **more)
    return Engine(model, config, Parts(host_proposer=proposer if num_drafts else None))


def serve(engine, prompts, sampling=GREEDY):
    requests = [engine.add(prompt, sampling, f"r{i}") for i, prompt in enumerate(prompts)]
    while engine.has_work():
        engine.step()
    return [request.output_tokens for request in requests]


def decoding(engine):
    """The steps in which all requests decode."""
    return [step for step in engine.trace.steps() if all(row.num_tokens == 1 for row in step.rows)]


@torch.inference_mode()
def logits_at_all(tokens):  # [len(tokens), vocab_size], without a cache
    c = model.config
    batch = ragged_batch([(tokens, 0)], len(tokens), model.device, c.layer_windows)
    batch = replace(batch, logits_indices=torch.arange(len(tokens), device=model.device))
    return model(batch, None, RecomputeAttention(c.attention_scale, c.attention_softcap))


h100 = Deployment(shape_of("llama-3-8b"), device("H100"), mfu=0.5, mbu=0.8)

# %% [markdown] name="question"
# ## 1. A question with a number
#
# A prompt holds four versions of a function, and the model goes on: a part of what it writes stands in the prompt
# already, and it repeats itself. It writes 64 tokens, greedy. Decoding takes 64 steps, the first of which computes the
# prompt.
#
# Now each step gets up to four *draft tokens*, drafts for short: what may come next, copied from earlier in the text. **How many steps does the
# same text take?**

# %% name="predict"
widgets.predict("08a-steps", "How many steps for 64 tokens, with up to four draft tokens a step?", "steps")

# %% [markdown] name="idea"
# ## 2. The idea
#
# A clerk dictates a letter over the telephone, one word per call, because each word has to be approved by a director
# who takes a minute to open the file. The clerk begins to say: "I guess the next words are *yours sincerely, the
# management*: which of them are right?" The director opens the file once and reads along. All words up to the first
# wrong one are approved, and in its place the director says the right one. One call, several words, and the letter is
# the director's.
#
# - **Opening the file** is reading the weights from memory. A decode step reads all of them for one token per request.
# - **Reading along** is cheap: the same weights serve several positions, as they do in prefill. The drafts are known,
#   so all positions are computed at once.
# - **The text does not change.** Whoever drafts, and however badly, the target says what is right.
#
# So speculative decoding does not make a step faster. It gives more tokens per step, as long as the step has room. In
# prefill there is nothing to gain: its tokens are known, and already share one read of the weights.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.9)
ax = fig.subplots()
ks = range(0, 17)
for batch, colour, style in ((1, BLUE, "-"), (32, GREEN, "--"), (128, ORANGE, "-."), (512, RED, ":")):
    ax.plot(ks, [theory.verify_cost(h100, batch, 500, k) for k in ks], style, color=colour, label=f"batch {batch}")
ax.set_ylim(0, 8)
tidy(ax, "drafts k for each request (context 500)", "v(k): time of a step")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Time of a step of an 8B model on one H100 by formula, context 500, over the number of drafts, in units of a step "
    "without. At batch 1 it is flat, at 32 up to five drafts, at 128 up to one; at 512 it rises from the first draft on.",
)

# %% [markdown] name="idea-reading"
# The figure is the whole chapter in one curve: $v(k)$, the time of a step with $k$ drafts for each request in units of a
# step without. Where it is flat, drafts are almost free. It is a property of model, machine, batch and context, and it
# is *not* 1 by nature.

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# Two pieces: a *drafter*, which proposes tokens, and the loop that checks. The cheapest draft is a copy: look for the last
# tokens earlier in the text, and propose what followed them then. That is **prompt lookup**.


# %% name="scratch-guess"
def propose(tokens, k, length=2):
    """What followed the last `length` tokens when they occurred before, at most k tokens."""
    pattern = tokens[-length:]
    for start in range(len(tokens) - length - 1, -1, -1):  # the latest occurrence first
        if tokens[start : start + length] == pattern:
            return tokens[start + length : start + length + k]
    return []


print(propose([5, 6, 7, 8, 9, 5, 6], k=3), propose([1, 2, 3, 4], k=3))

# %% [markdown] name="scratch-loop-text"
# Now the check. One pass over text *and* drafts gives logits at every position. The logits at the text's last token
# judge the first draft; those at a draft judge the next one. (`logits_at_all` is one pass of the course model,
# without a cache: the whole text is computed in every step.)


# %% name="scratch-loop"
def speculate(prompt, num_tokens, k):
    """Greedy, with drafts. -> (output, of each step (drafts, kept))."""
    tokens, steps = list(prompt), []
    while len(tokens) < len(prompt) + num_tokens:
        drafts = propose(tokens, min(k, len(prompt) + num_tokens - len(tokens) - 1)) if k else []
        right = logits_at_all(tokens + drafts)[len(tokens) - 1 :].argmax(-1).tolist()
        kept = 0
        while kept < len(drafts) and drafts[kept] == right[kept]:
            kept += 1
        tokens += right[: kept + 1]  # the drafts that were right, and one token of the target's own
        steps.append((len(drafts), kept))
    return tokens[len(prompt) :], steps


plain, _ = speculate(repeats, 64, k=0)
found, rounds = speculate(repeats, 64, k=4)
assert found == plain
print(f"{len(plain)} tokens in {len(rounds)} steps, the same text; (drafts, kept): {rounds[:12]} ...")
widgets.reveal("08a-steps", len(rounds))

# %% [markdown] name="scratch-reading"
# Each step gives the kept drafts **and one more**: the target's own token in place of the first wrong draft, or after
# the last if all were right (the *bonus* token). There is no step that gives nothing, and none that has to be repeated:
# with no draft, or a wrong one, it is an ordinary decode step.

# %% [markdown] name="worked-text"
# ### A worked round
#
# A step has five drafts. The target agrees with the first three and disagrees with the fourth. **How many tokens does
# the step give?**

# %% name="worked-predict"
widgets.predict("08a-round", "Five drafts, the first three right, the fourth wrong: how many tokens?", "tokens")

# %% name="worked"
text = code[:40]
truth = speculate(text, 8, k=0)[0]
drafts = [*truth[:3], (truth[3] + 1) % 4000, truth[4]]  # the fourth is wrong, the fifth what would follow the right one
right = logits_at_all(text + drafts)[len(text) - 1 :].argmax(-1).tolist()
kept = next(i for i, (d, r) in enumerate(zip(drafts, right, strict=False)) if d != r)
step_gives = right[: kept + 1]
print(f"{len(drafts)} drafts, {kept} kept, {len(step_gives)} tokens given: {step_gives}; plain decoding: {truth[:4]}")
assert step_gives == truth[:4]
widgets.reveal("08a-round", len(step_gives))

# %% [markdown] name="worked-reading"
# The fifth draft is dropped although it is what plain decoding will write: the logits that could judge it were computed
# after a wrong fourth token. What the cache holds of the last two drafts is dropped as well; `c_drafters` shows that
# roll-back.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# `speculative="ngram"` is this, with an index in place of the search, patterns of four tokens down to two, a KV cache,
# and many requests in a step. The part that drafts:

# %% name="engine-source"
print(inspect.getsource(NgramProposer.propose))

# %% name="engine-run"
engine = new_engine(4, NgramProposer())
[output] = serve(engine, [repeats])
assert output == serve(new_engine(), [repeats])[0]  # the text of plain decoding
steps = list(engine.trace.steps())
print(f"{len(output)} tokens in {len(steps)} steps, {sum(row.num_drafts for s in steps for row in s.rows)} drafts")

# %% [markdown] name="engine-trace-text"
# The trace says of each step how many drafts a row had and how many tokens it gave:

# %% name="engine-trace"
rows = []
for step in steps[1:9]:
    [row], [new] = step.rows, step.num_new_tokens
    computed = "1" + (f" + {row.num_drafts}" if row.num_drafts else "")
    rows.append([step.step_id, computed, new - 1, new, repr(llm.tokenizer.decode(output[:new]))])
    output = output[new:]
widgets.table(rows, ["step", "tokens computed", "drafts kept", "tokens given", "text"])

# %% [markdown] name="engine-origins-text"
# And the stream, each token marked by where it came from. A thin bar stands between two steps:

# %% name="engine-origins"
engine = new_engine(4, NgramProposer())
[output] = serve(engine, [repeats])
widgets.token_origins(engine.trace.steps(), "r0", output, lambda token: llm.tokenizer.decode([token]))

# %% [markdown] name="engine-suffix-text"
# ### Longer memory: a suffix automaton
#
# A pattern of two tokens is found often and is right rarely; a long one the other way round. `speculative="suffix"`
# finds the *longest* end of the text that occurred before, in constant time per token, and drafts no further than the
# match is long. It can also search what **other requests** have written: agents and rollouts of one prompt repeat each
# other. A second request asks what a first one asked:

# %% name="engine-suffix"
rows = []
for shared in (0, 4096):
    proposer = SuffixProposer(max_shared=shared)
    counts = []
    for _ in range(2):  # one after the other, the same request
        engine = new_engine(4, proposer)
        [again] = serve(engine, [code])
        counts.append(len(decoding(engine)))
    rows.append(["other requests' outputs, too" if shared else "its own text only", *counts])
assert rows[1][2] < rows[0][2]
widgets.table(rows, ["searched", "decode steps of the first", "of the second"])

# %% [markdown] name="engine-suffix-reading"
# A draft from another request changes no text. It may change *time*: whoever can measure it may learn that somebody
# else got this answer. So the shared memory is off unless you turn it on, as with prefix caches across tenants.

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# If each draft is kept with probability $a$, given that those before it were, a step gives on average
#
# $$E = 1 + a + a^2 + \dots + a^k = \frac{1 - a^{k+1}}{1 - a}$$
#
# tokens. Three numbers are called acceptance, and they differ: $a$ itself, the share of drafts that are kept (less:
# what follows a wrong draft is dropped), and the **acceptance length** $E$. *With $a = 0.8$ and $k = 5$: what is $E$?*

# %% name="measure-predict"
widgets.predict("08a-tokens", "Expected tokens of a step with a = 0.8 and k = 5?", "tokens")

# %% name="measure-formula"
rows = []
for a in (0.5, 0.7, 0.8, 0.9):
    rows.append([a, *(f"{theory.expected_tokens(a, k):.2f}" for k in (1, 2, 5)), f"{theory.kept_share(a, 5):.0%}"])
widgets.reveal("08a-tokens", theory.expected_tokens(0.8, 5))
widgets.table(rows, ["a", "E, k = 1", "E, k = 2", "E, k = 5", "drafts kept, k = 5"])

# %% [markdown] name="measure-engine-text"
# The engine counts; `DraftUse` is read from the trace. Its numbers by position show that one $a$ is a simplification.


# %% name="measure-engine"
def acceptance(engine):
    """(chance of each position, given those before it; share of drafts kept; tokens of a row with drafts)."""
    use = DraftUse.of(engine.trace.steps())
    reached = [use.num_drafts, *use.accepted_per_position[:-1]]
    chances = [kept / n for kept, n in zip(use.accepted_per_position, reached, strict=True) if n]
    return chances, use.acceptance, 1 + use.num_accepted_tokens / use.num_drafts


rows = []
for kind in ("repeats", "code"):
    engine = new_engine(4, NgramProposer())
    serve(engine, [llm.encode(prompt) for prompt in workload(kind, 4)])
    chances, share, length = acceptance(engine)
    rows.append([kind, *(f"{chance:.0%}" for chance in chances), f"{share:.0%}", f"{length:.2f}"])
widgets.table(rows, ["text", *(f"draft {i}" for i in range(1, 5)), "all drafts", "tokens of a row with drafts"])

# %% [markdown] name="measure-engine-reading"
# Once those before it were right, the last draft is kept more often here than the first: the copy is then in the middle
# of something that repeats. Where nothing was found there was no draft, and nothing more to compute.

# %% [markdown] name="measure-v-text"
# ### What a step with drafts takes on this machine
#
# A proposer that always proposes the last token again is nearly always wrong, so a step's time is that of verifying and
# nothing else. **How many times as long does a step of 16 requests take with four drafts each, on your machine?** (By
# the figure above, an H100 with an 8B takes no longer.)

# %% name="measure-v-predict"
widgets.predict("08a-verify", "v(4) at batch 16 on this machine?", "times")


# %% name="measure-v"
class Wrong:  # a proposer
    def propose(self, request, k):
        return [request.tokens[-1]] * k


def step_seconds(batch, k, num_tokens=12):
    """The median over decoding steps in which every request has k drafts."""
    engine = new_engine(k, Wrong())
    limits = replace(GREEDY, max_tokens=num_tokens)
    serve(engine, [code[:8] + repeats[i : i + 56] for i in range(batch)], limits)
    full = [step for step in decoding(engine) if all(row.num_drafts == k for row in step.rows)]
    return statistics.median(step.finished_at - step.started_at for step in full)


BATCHES, NUM_DRAFTS = (1, 4, 16), (0, 1, 2, 4)
took = {(batch, k): step_seconds(batch, k) for batch in BATCHES for k in NUM_DRAFTS}
v_here = {key: seconds / took[key[0], 0] for key, seconds in took.items()}
widgets.reveal("08a-verify", v_here[16, 4])
rows = [[b, format_seconds(took[b, 0]), *(f"{v_here[b, k]:.2f}" for k in NUM_DRAFTS[1:])] for b in BATCHES]
widgets.table(rows, ["batch", "step without drafts", "v(1)", "v(2)", "v(4)"])

# %% [markdown] name="measure-v-reading"
# These are times, and yours will differ; where other programs run, a number may even be below the one to its left. On an
# idle CPU $v$ rises soon: a matrix product of several rows has more arithmetic than one of a single row, and a CPU has
# little arithmetic to spare. A GPU has room for hundreds of tokens.
#
# So does it pay here? Take a step without drafts as the unit of time. A round makes $k$ drafts, each of which takes $c$,
# and verifies them in $v(k)$; it gives $E$ tokens, and plain decoding gives one token a unit. So the speed-up is
# $E / (v(k) + k c)$. A lookup's $c$ is almost 0.

# %% name="measure-both"
rows, points = [], []
for batch in (1, 4):
    for kind in ("repeats", "code"):
        prompts, engines = (
            [llm.encode(p) for p in workload(kind, batch)],
            {0: new_engine(), 4: new_engine(4, NgramProposer())},
        )
        for engine in engines.values():
            serve(engine, prompts)
        seconds = {k: sum(step.finished_at - step.started_at for step in decoding(e)) for k, e in engines.items()}
        counts = {k: len(decoding(e)) for k, e in engines.items()}
        measured = seconds[0] / seconds[4]
        points.append(Measured(f"n-grams, {kind}", batch, 4, measured))
        rows.append([kind, batch, counts[0], counts[4], f"{counts[0] / counts[4]:.2f}", f"{measured:.2f}"])
widgets.table(rows, ["text", "batch", "steps, plain", "steps, k = 4", "fewer steps", "times as fast, model time"])

# %% [markdown] name="measure-both-reading"
# Where the last column is below the one before it, the time fell by less than the number of steps: a step with drafts
# takes longer, which is $v$, and on a CPU that is what to expect. With several requests in a batch the step count also
# follows the *slowest* of them.

# %% [markdown] name="explore"
# ## 6. Explore
#
# The formula over acceptance, drafts, their cost and the batch. `v(k)` is a choice: the paper's 1, an H100 by formula, or
# the one you have just measured; with that one, the points are this machine's runs from above. *With k = 4 and drafts
# that cost nothing, between which two batches does an acceptance of 0.6 stop paying on the H100, with the short context?
# Why is there no such batch with the long one?* Grey: batches whose caches do not fit beside the weights; the formula goes on through them.


# %% name="explore-widget"
def measured_v(batch, k):
    """The nearest batch that was measured, and a straight line between and beyond its numbers of drafts."""
    near = min(BATCHES, key=lambda b: abs(np.log2(b / batch)))
    slope = (v_here[near, 4] - v_here[near, 2]) / 2
    return float(np.interp(k, NUM_DRAFTS, [v_here[near, n] for n in NUM_DRAFTS]) + max(0, k - 4) * slope)


print(f"8B on one H100, 90 % of the memory in use: room for {h100.cache_tokens():,} tokens of cache beside the weights")
widgets.speculation(points, {"this machine, course model": measured_v}, acceptance=0.6, draft_cost=0.0)

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"Verifying K tokens costs about the same as one."** (E08.10) For a dense model, as long as batch · (k + 1) stays below
# the ridge. The ridge is a number of FLOP per byte; with weights of 16 bits and a short context it is also a number of
# tokens, since each token takes 2 FLOP per weight, and each weight is read in 2 bytes:

# %% name="errata-ridge"
chip = device("H100")
for mfu, mbu in ((1.0, 1.0), (h100.mfu, h100.mbu)):
    ridge = mfu * chip.peak() / (mbu * chip.bandwidth)
    print(f"H100 with {mfu:.0%} of the peak and {mbu:.0%} of the bandwidth: {ridge:.0f} tokens")

# %% [markdown] name="errata-experts-text"
# A **mixture of experts** reads other experts for other tokens. DeepSeek-V3 has 256 experts in each of 58 layers, 8 for a
# token. How many bytes does a step of six tokens per request read, compared with one?

# %% name="errata-experts-predict"
widgets.predict("08a-experts", "Bytes of verifying 6 tokens instead of 1 at batch 1, DeepSeek-V3?", "times")

# %% name="errata-experts"
expert = 58 * 3 * 7168 * 2048  # parameters of one expert, over all layers
shared = 37e9 - 8 * expert  # of the 37e9 that one token uses, those that every token uses
rows = []
for batch in (1, 2, 4, 8, 64, 256):
    six, one = (theory.mixture_read(shared, expert, 256, 8, batch * n) for n in (6, 1))
    touched = theory.experts_touched(256, 8, batch * 6)
    rows.append([batch, f"{touched:.0f}", f"{six / one:.2f}", f"{shared / one:.0%}"])
widgets.reveal("08a-experts", float(rows[0][2]))
heads = ["batch", "experts touched in a layer, of 256", "bytes of 6 tokens over 1", "of a step without drafts, shared"]
widgets.table(rows, heads)

# %% [markdown] name="errata-experts-reading"
# Worst in a batch of a few, where a dense model has room (alone, nearly half of the bytes are those that every token
# uses, and they do not grow; in a batch of a few their share is smaller); nothing at a large batch, whose step reads all
# experts anyway. (With independent routing. Neighbouring tokens share experts more than that, so the real factor is smaller.)
#
# **"K accepted drafts give K tokens; after a rejection comes a fallback step."** (E08.3) A step gives one more than it
# keeps, so K + 1 at best and 1 at worst. The worked round above is the proof, and the engine's own counters:

# %% name="errata-counters"
engine = new_engine(4, NgramProposer())
[output] = serve(engine, [repeats])
use = DraftUse.of(engine.trace.steps())
print(f"{len(output)} tokens = {len(list(engine.trace.steps()))} steps + {use.num_accepted_tokens} drafts kept")
assert len(output) == len(list(engine.trace.steps())) + use.num_accepted_tokens
gave = [
    new
    for step in engine.trace.steps()
    for row, new in zip(step.rows, step.num_new_tokens, strict=True)
    if row.num_drafts
]
print(f"rows with drafts gave between {min(gave)} and {max(gave)} tokens")
assert 1 <= min(gave) <= max(gave) <= 4 + 1

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Names of options change; look them up in the version you run.
#
# **vLLM** has prompt lookup as the method `ngram` of its speculative configuration, with the number of drafts and the
# lengths of the pattern, and a method named `suffix` (suffix trees over prompt and earlier outputs). **SGLang** and
# **TensorRT-LLM** have n-gram drafting as well. **transformers** has it as an option of `generate`.
#
# Where it is used first: code editors that rewrite a file with a small change, retrieval answers that quote their
# sources, agents that repeat tool results, and rollouts of reinforcement learning, of which many share most of their
# text. It needs no second model, no memory of the GPU and no training, and where it finds nothing the model computes
# nothing more.
#
# The idea is from Stern et al. (2018, blockwise parallel decoding); Leviathan et al. and Chen et al. (2023) made it exact
# for sampling, which is the next notebook. Prompt lookup is from Saxena (2023), the suffix automaton from Hu et al. (2024,
# SAM Decoding) and, as suffix trees over many requests, Oliaro et al. (2024, SuffixDecoding).

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("08_speculative_decoding").draw(seed=1, tag="room"))

# %% [markdown] name="card"
# ## 10. Card
#
# - A decode step reads all weights for one token per request. Draft tokens let the same read serve more positions: more tokens
#   per step, not a faster step. Prefill has nothing to gain: its tokens are known.
# - A step gives the drafts before the first wrong one, and one more: the target's token in its place, or the bonus after
#   the last. Between 1 and k + 1. The logits at the token *before* a draft judge it.
# - E = (1 − a^(k+1)) / (1 − a). Speed-up = E / (v(k) + k c). v(k) is measured or computed, not assumed.
# - v(k) ≈ 1 for a dense model as long as batch · (k + 1) stays below the ridge in tokens: 295 on an H100 in 16 bits at a
#   short context, 185 with the shares of peak and bandwidth assumed here. On this CPU, with a model this small, it rises
#   at once. A mixture of experts reads more experts, worst in small batches.
#   <!-- printed: errata-ridge -->
# - Acceptance a, share of drafts kept, and acceptance length are three numbers. State k with each.
# - Prompt lookup: copy what followed the last tokens. Free, and right where text repeats. The longest match is the best
#   draft; other requests' outputs can be searched, too.
