# %% [markdown] name="title"
# # 08c · Who drafts: draft models and feature heads
#
# About 35 minutes. You need `a_guesses`; `b_exactness` says why any of these leaves the text's distribution as it is. The
# next notebook has drafts as trees and heads for several tokens.

# %% name="setup"
import inspect
from collections import Counter
from dataclasses import replace

import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, SKY, figure, show, tidy
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.features.speculative.feature_head import FeatureHead
from reference_impl.assembly.draft_folder import load_feature_head
from reference_impl.bench.speculative import workload
from reference_impl.observe.trace import DraftUse
from reference_impl.theory import speculative as theory

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
COMMON = {"dtype": "float32", "kv_cache_bytes": 8 * 2**20, "prefix_cache": "off", "max_model_len": 1024}
GREEDY = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
METHODS = {
    "n-grams": {"speculative": "ngram"},
    "draft model": {"draft_model": course_model("draft")},
    "feature head": {"draft_model": course_model("eagle")},
}
llm = LLM(course_model("target"), **COMMON)
target, draft = llm.engine.model, LLM(course_model("draft"), **COMMON).engine.model
code = llm.encode(workload("code", 1)[0])


def drafting(method, num_drafts=4):
    """The course target with a method's drafts: so many for each decoding request in every step."""
    return LLM(course_model("target"), num_drafts=num_drafts, adaptive_drafts="off", **METHODS[method], **COMMON)


@torch.inference_mode()
def hidden_at_all(model, tokens):
    """[len(tokens), hidden_size], after the last norm; one pass without a cache."""
    c = model.config
    batch = ragged_batch([(tokens, 0)], len(tokens), model.device, c.layer_windows)
    batch = replace(batch, logits_indices=torch.arange(len(tokens), device=model.device))
    return model.hidden_states(batch, None, RecomputeAttention(c.attention_scale, c.attention_softcap))


def next_tokens(model, tokens):
    """After each token the likeliest next one, by a model."""
    return model.logits(hidden_at_all(model, tokens)).argmax(-1)


own_text = [*code, *llm.generate([code], replace(GREEDY, max_tokens=200))[0].outputs[0].token_ids]

# %% [markdown] name="question"
# ## 1. A question with a number
#
# The course has two small models that draft for the target. The **draft model** is a language model of its own: 0.82
# million parameters to the target's 7.35. The **feature head** has about as many, 0.92 million, in one layer; but it is
# fed what the target computed for the text so far. Both draft four tokens a step, greedy, on code.
# <!-- stands: datasets/course_model/README.md -->
#
# The draft model has about a quarter of its drafts kept. **What percentage does the feature head?**

# %% name="predict"
widgets.predict("08c-kept", "What percentage of the feature head's drafts is kept, on code, k = 4?", "%")

# %% name="question-run"
prompts = workload("code", 4)
served, shares = {}, {}
for method in METHODS:
    served[method] = drafting(method)
    served[method].generate(prompts, GREEDY)
    use = DraftUse.of(served[method].engine.trace.steps())
    shares[method] = use.acceptance
    print(f"{method}: {use.num_accepted_tokens} of {use.num_draft_tokens} drafts kept, {use.acceptance:.0%}")
widgets.reveal("08c-kept", 100 * shares["feature head"])

# %% [markdown] name="idea"
# ## 2. The idea
#
# Somebody has to say what comes next, quickly. Two colleagues can stand in for the director of `a_guesses`. One has read
# the same letters, but is younger: a **draft model**, a small language model of the same vocabulary. The other sits in the
# director's office and reads the notes on the desk: a **feature head**, a layer whose input is the target's own
# hidden state. The second needs less schooling, and can work for this director only.
#
# | who drafts | reads | costs a draft | needs |
# |---|---|---|---|
# | n-grams, suffixes | the text | almost nothing | text that repeats |
# | draft model | the text | a small model's step | a model of the same vocabulary, a cache of its own |
# | feature head (EAGLE) | the target's last hidden state, and the token drawn there | one layer | training for this target |
# | early exit (self-speculation) | the target's own first layers | those layers | nothing, or training so that exits are good |
# | heads for later tokens (Medusa, MTP) | the target's last hidden state | a matrix or a layer | training; next notebook |
#
# The engine has all of them, of MTP the sequential kind. This notebook runs the first four, the next one the last.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.6)
ax = fig.subplots()
LANES = (
    ("draft model", 2.0, BLUE, "its own layers"),
    ("feature head", 1.0, GREEN, "one layer"),
    ("early exit", 0.0, ORANGE, "first layers"),
)
for name, y, colour, words in LANES:
    ax.text(0, y, name, va="center", fontsize=9)
    boxes = [("text", 1.6, GREY), (words, 3.2, colour), ("draft", 5.2, SKY)]
    if name == "feature head":
        boxes[0] = ("target's hidden\nstate + token", 1.6, GREY)
    for text, x, shade in boxes:
        ax.text(x, y, text, ha="center", va="center", fontsize=8,
                bbox={"facecolor": shade, "edgecolor": INK, "alpha": 0.35, "boxstyle": "round,pad=0.35"})  # fmt: skip
    for left, right in ((2.25, 2.65), (3.75, 4.85)):
        ax.annotate("", (right, y), (left, y), arrowprops={"arrowstyle": "->", "color": INK})
    if name != "draft model":
        ax.text(4.3, y + 0.22, "the target's lm_head", ha="center", fontsize=7.5)
ax.text(6.0, 1.0, "each draft is\nfed back for\nthe next one", fontsize=8, va="center")
ax.set_xlim(-0.1, 7.1)
ax.set_ylim(-0.6, 2.6)
ax.axis("off")
show(
    fig,
    "Three lanes. Draft model: the text goes through its own layers to a draft. Feature head: the target's hidden state and "
    "the drawn token go through one layer and the target's lm_head. Early exit: the text goes through the target's first "
    "layers and its lm_head. In all three each draft is fed back for the next one.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# With a draft model, drafting is plain decoding of another model, k times; only then the target runs, once.


# %% name="scratch-draft"
def speculate(prompt, num_tokens, k):
    """Greedy. -> (output, of each step how many drafts were kept, passes of each model)."""
    tokens, kept_of, passes = list(prompt), [], Counter()
    while len(tokens) < len(prompt) + num_tokens:
        drafts = []
        for _ in range(k):  # one after another: each draft needs the one before
            drafts.append(int(next_tokens(draft, tokens + drafts)[-1]))
            passes["draft"] += 1
        right = next_tokens(target, tokens + drafts)[len(tokens) - 1 :].tolist()  # all of them at once
        passes["target"] += 1
        kept = 0
        while kept < k and drafts[kept] == right[kept]:
            kept += 1
        tokens += right[: kept + 1]
        kept_of.append(kept)
    return tokens[len(prompt) :][:num_tokens], kept_of, passes


output, kept_of, passes = speculate(code, 24, k=3)
assert output == own_text[len(code) :][:24]
print(f"24 tokens, {dict(passes)} passes; kept of 3 drafts: {kept_of}")

# %% [markdown] name="scratch-feature-text"
# A feature head is one layer. At position p it takes the target's hidden state of p, and the token that was drawn from
# it, p + 1; what comes out stands for the target's hidden state of p + 1, so the target's own lm_head turns it into a draft
# for token p + 2. Three drafts, position by position; run j of the head reads a hidden state and the token to its right:
#
# | position | p | p + 1 | p + 2 | p + 3 | p + 4 |
# |---|---|---|---|---|---|
# | token | in the text | drawn by the target | 1st draft | 2nd draft | 3rd draft |
# | hidden state | the target's | run 1 estimates it | run 2 estimates it | run 3 estimates it | |
# | read by | run 1: state of p, token of p + 1 | run 2: state of p + 1, token of p + 2 | run 3: state of p + 2, token of p + 3 | | |
#
# Only the first run has a hidden state of the target. The two inputs are joined here:

# %% name="scratch-feature-source"
print(inspect.getsource(FeatureHead._join))

# %% [markdown] name="scratch-feature-run-text"
# Over a whole text at once: how often is its draft the target's likeliest token?


# %% name="scratch-feature"
@torch.inference_mode()
def head_drafts(head, tokens):
    """Of each position p the draft for token p + 2, from the target's hidden state of p and token p + 1."""
    features, c = hidden_at_all(target, tokens), head.config
    batch = ragged_batch([(tokens[1:], 0)], len(tokens) - 1, target.device, c.layer_windows)
    batch = replace(batch, logits_indices=torch.arange(len(tokens) - 1, device=target.device))
    attention = RecomputeAttention(c.attention_scale, c.attention_softcap)
    return head.logits(head.hidden_states(batch, features[:-1], None, attention)).argmax(-1)


head = load_feature_head(course_model("eagle"), torch.float32, target.device)
head.follow(target)
said, start = next_tokens(target, own_text), len(code)
for name, drafts in (
    ("feature head", head_drafts(head, own_text)),
    ("draft model", next_tokens(draft, own_text)[1:]),
):
    right = (drafts[start:] == said[1:][start:]).float().mean()
    print(f"{name}: {right:.0%} of first drafts are the target's likeliest token")

# %% [markdown] name="scratch-exit-text"
# **Early exit** needs no second model at all: the target's own first layers, its last norm and its lm_head. Their keys and
# values are the target's, so no second cache is needed. If the hidden states at the exit are kept too (LayerSkip), the
# verifying pass can begin after them; this engine computes them again. The course target has eight layers and was
# not trained to exit. **After six of the eight, how many first drafts are right, in per cent?**

# %% name="scratch-exit-predict"
widgets.predict("08c-exit", "Exit after six of eight layers: how many first drafts are right?", "%")

# %% name="scratch-exit"
layers = target.layers
exits = {}
for m in (2, 4, 6, 7, 8):
    target.layers = layers[:m]
    exits[m] = float((next_tokens(target, own_text)[start:] == said[start:]).float().mean())
target.layers = layers
widgets.reveal("08c-exit", 100 * exits[6])
rows = [[m, f"{m / 8:.3f}", f"{right:.0%}",
         *(f"{theory.speed_up(theory.expected_tokens(right, k), k, m / 8):.2f}" for k in (1, 3))]
        for m, right in exits.items()]  # fmt: skip
widgets.table(rows, ["layers", "cost of a draft c", "right", "speed-up by formula, v = 1: k = 1", "k = 3"])

# %% [markdown] name="scratch-exit-reading"
# (c counts the layers only; each draft needs the lm_head as well. A verifying pass that begins after the exit would take
# less than v = 1.) With v = 1 a single draft pays only where a > c: an exit that costs three quarters of the layers has to
# be right more than three quarters of the time, and the gain stays small. And a model that was trained only at its end has
# early layers whose output its lm_head cannot use yet. Methods that do this in earnest train the exits (LayerSkip, Elhoushi
# et al. 2024), or skip chosen layers (Zhang et al. 2023). In the engine, an exit after six layers, and no cache for it:

# %% name="scratch-exit-engine"
exiting = LLM(
    course_model("target"), speculative="early-exit", exit_layer=6, num_drafts=2, adaptive_drafts="off", **COMMON
)
exiting.generate(prompts, GREEDY)
use = DraftUse.of(exiting.engine.trace.steps())
assert exiting.engine.executor.draft.own_cache is None
print(f"early exit: {use.num_accepted_tokens} of {use.num_draft_tokens} drafts kept, {use.acceptance:.0%}, with k = 2")

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# Count what runs in one decode step with three drafts. **How many forward passes of which model?** The feature head has
# one surprise.


# %% name="engine-count"
def passes_of(method, num_drafts=3):
    """(model, tokens) of each pass of one decode step."""
    one = drafting(method, num_drafts)
    worker, calls = one.engine.executor, []
    for name, runs in (("target", worker.model), (method, worker.draft.model)):

        def counted(batch, *rest, name=name, forward=runs.hidden_states):
            calls.append((name, len(batch.input_ids)))
            return forward(batch, *rest)

        runs.hidden_states = counted
    one.engine.add(code, GREEDY)
    for _ in range(3):
        calls.clear()
        one.engine.step()
    return calls


for method in ("draft model", "feature head"):
    print(f"{method}: " + ", then ".join(f"{name} ({n} token{'s' * (n > 1)})" for name, n in passes_of(method)))

# %% [markdown] name="engine-count-reading"
# The draft model's first pass computes two tokens: if all of the last step's drafts were kept, the final one of them was
# drawn and never computed. If fewer were, one token would do, and the engine computes two all the same: it need not ask.
# The head's first draft takes no pass of its own: it comes out of the pass over the *last* step's tokens, which follows the
# target's and has the hidden states just computed. Either way the drafter also computes every token of the text. That is
# part of c.

# %% [markdown] name="engine-rollback-text"
# ### KV roll-back, and a different number of tokens for each row
#
# The target wrote keys and values for its token *and* all drafts. Those of rejected drafts are wrong. Must they be
# erased? Watch one request: tokens it has, tokens whose keys and values count, slots it holds.

# %% name="engine-rollback"
one = drafting("draft model", 3)
engine, rows = one.engine, []
request = engine.add(code, replace(GREEDY, max_tokens=16))
engine.step()
for _ in range(5):
    before = len(request.tokens)
    engine.step()
    [row] = list(engine.trace.steps())[-1].rows
    written = row.start + row.length
    rows.append([f"{before} to {written - 1}", len(request.tokens) - before, request.num_computed_tokens,
                 written - request.num_computed_tokens, len(request.block_table)])  # fmt: skip
    assert request.num_computed_tokens == len(request.tokens) - 1
widgets.table(rows, ["drafted positions", "tokens given", "computed, counts", "rolled back", "blocks"])

# %% [markdown] name="engine-rollback-reading"
# Nothing is erased: a counter goes back, and the next step writes over the wrong slots. Attention never looks beyond what
# counts. Blocks that were reserved for drafts stay the request's, since it grows into them; none is preempted for a
# draft. The draft model's cache lies in blocks of the *same ids*, so the same block table, the same roll-back and the same
# prefix cache serve both.
#
# Rows of one step advance by different numbers of tokens. Continuous batching allows that anyway; a static batch would
# have to wait for the slowest row. What the draft model's cache costs:

# %% name="engine-memory"
worker = engine.executor
mine, theirs = (cache.data.numel() / cache.data.shape[2] / 16 for cache in (worker.draft.kv_cache, worker.kv_cache))
print(
    f"values per token: {theirs:.0f} in the target's cache, {mine:.0f} in the draft model's: {mine / theirs:.1%} more memory"
)

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# Acceptance by **position** in the drafts, greedy, for each way and two kinds of text. *Do later drafts get kept more
# rarely or more often, given that those before them were?*

# %% name="measure-positions"
rows, by_method = [], {}
for method in METHODS:
    for kind in ("repeats", "code"):
        one = served[method]
        one.engine.trace.events.clear()
        one.generate(workload(kind, 4), GREEDY)
        use = DraftUse.of(one.engine.trace.steps())
        reached = [use.num_drafts, *use.accepted_per_position[:-1]]
        chances = [kept / max(1, n) for kept, n in zip(use.accepted_per_position, reached, strict=True)]
        by_method[method, kind] = chances
        length = 1 + use.num_accepted_tokens / use.num_drafts
        rows.append([method, kind, *(f"{c:.0%}" for c in chances), f"{use.acceptance:.0%}", f"{length:.2f}"])
widgets.table(rows, ["who", "text", "1st", "2nd", "3rd", "4th", "all drafts", "acceptance length"])

# %% name="measure-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.7)
axes = fig.subplots(1, 2, sharey=True)
for ax, kind in zip(axes, ("repeats", "code"), strict=True):
    for (method, marker), colour in zip(
        (("n-grams", "o"), ("draft model", "s"), ("feature head", "^")), (GREY, BLUE, GREEN), strict=True
    ):
        ax.plot(range(1, 5), by_method[method, kind], marker=marker, color=colour, label=method)
    ax.set_ylim(0, 1.02)
    ax.set_xticks(range(1, 5))
    tidy(ax, "draft", "kept, if those before it were", kind)
axes[1].legend(fontsize=8, frameon=False)
words = [
    f"{method} on {kind} {', '.join(f'{c:.0%}' for c in chances)}" for (method, kind), chances in by_method.items()
]
show(
    fig,
    "Acceptance over the position of the draft, given that those before it were kept, for text that repeats and for code: "
    f"{'; '.join(words)}.",
)

# %% [markdown] name="measure-reading"
# Two things pull on the conditional chances. Text is predictable in stretches, and once the first draft was right the step is
# probably inside one: an n-gram's copy gets surer once it is in a repeat. But what is trained loses at the second draft. A
# feature head has the target's hidden state for its first draft only; from there on it reads its own output, an estimate. A
# draft model builds on its own first draft, too. (Later positions rest on few drafts here.) The *unconditional* chances fall
# of course, and so does the share of all drafts with k.
#
# ### Alignment
#
# A drafter is trained to predict the **target**, not the truth. The course's head was first trained on the corpus, then on
# text of the target's own. From its card, how often each draft is the target's likeliest token, if those before it were, on
# the target's greedy text, which repeats itself:
#
# | draft | 1 | 2 | 3 | 4 |
# |---|---|---|---|---|
# | trained on the corpus | 89 % | 92 % | 92 % | 93 % |
# | and then on the target's own text | 91 % | 92 % | 93 % | 93 % |
# <!-- stands: datasets/course_model/README.md -->

# %% [markdown] name="measure-alignment-reading"
# A little more at the first and the third draft, nothing at the others; on text that repeats itself there was little left to
# gain. (In the engine's runs above fewer are kept.) How much alignment gives depends on how far the corpus is from what the target writes;
# a target that was tuned afterwards (for chat, for reasoning) needs a drafter tuned on *its* text. The next notebook
# trains a head in the cell. Drafters can also be trained **online**: a server has the target's hidden states and tokens of
# all its traffic anyway, and a drafter that follows the traffic keeps its acceptance when users change (Liu et al. 2024,
# "Online Speculative Decoding"). What has to be stored, of a sample of the traffic: tokens, hidden states for a feature
# head, and the target's distribution or the best part of it where a draft was wrong. The loss is a distance between the two
# distributions, as in the first training (for the course's head the KL divergence). New weights can be exchanged between any
# two steps, since the text does not depend on them; only the drafter's cache was computed with the old ones. *If acceptance fell from 0.8 to 0.6 after such a change, k = 4, c = 0.05: how much of the
# speed-up is lost?*

# %% name="measure-online-predict"
widgets.predict("08c-online", "Speed-up lost when acceptance falls from 0.8 to 0.6 (k = 4, c = 0.05, v = 1)?", "%")

# %% name="measure-online"
fresh, stale = (theory.speed_up(theory.expected_tokens(a, 4), 4, 0.05) for a in (0.8, 0.6))
print(f"{fresh:.2f}x with the fresh drafter, {stale:.2f}x with the stale one")
print(f"to store: a hidden state of 4,096 numbers in 16 bits takes {4096 * 2 // 1024} KiB a token")
widgets.reveal("08c-online", 100 * (1 - stale / fresh))

# %% [markdown] name="explore"
# ## 6. Explore
#
# The same request, drafted for by the feature head. Drag the steps from the start: *which kind of token ends most steps?*

# %% name="explore-widget"
one = drafting("feature head")
output = one.generate([code], GREEDY)[0].outputs[0].token_ids
steps = list(one.engine.trace.steps())
widgets.token_origins(steps, steps[0].rows[0].request_id, output, lambda token: llm.tokenizer.decode([token]))

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"Several tokens are drafted in parallel and then verified."** (E08.11) An autoregressive draft model drafts one after
# another; what is parallel is the verification. A draft model that was trained for it (PARD) drafts k tokens in one pass.
# <!-- source: An et al. 2025; vLLM's `parallel_drafting` --> The passes of section 4, once more as numbers:

# %% name="errata-passes"
calls = Counter(name for name, _ in passes_of("draft model", 3))
print(dict(calls))
assert calls == {"draft model": 3, "target": 1}

# %% [markdown] name="errata-acceptance"
# **"EAGLE-3's acceptance rate is 70-90 %."** (E08.9) Of what? Share of drafts, acceptance length and chance by position
# are three numbers, and the first depends on k even if nothing else changes. The head on code, with k from 1 to 6:

# %% name="errata-three"
rows = []
for k in (1, 3, 6):
    one = drafting("feature head", k)
    one.generate(workload("code", 4), GREEDY)
    use = DraftUse.of(one.engine.trace.steps())
    first = use.accepted_per_position[0] / use.num_drafts
    rows.append([k, f"{first:.0%}", f"{use.acceptance:.0%}", f"{1 + use.num_accepted_tokens / use.num_drafts:.2f}"])
widgets.table(rows, ["k", "first draft kept", "share of all drafts", "acceptance length"])

# %% [markdown] name="errata-three-reading"
# One drafter, one text: about the same first draft, and a share that falls with k. Published figures have the same freedom.
# Model cards of two EAGLE-3 drafters for gpt-oss-120b state acceptance lengths of 2.8 at K = 7 (nebius) and 2.4 at K = 3
# (SpecDrift), which count the target's own token: without it, 26 % and 47 % of the drafts.
# <!-- tested: tests/claims/test_chapter_08.py::test_e08_09_acceptance_rate_length_and_acceptance_by_position_are_three_numbers -->

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026.
#
# **vLLM**, **SGLang** and **TensorRT-LLM** all serve draft models and EAGLE heads. In this engine the names are
# `speculative="draft"` and `speculative="eagle"` with `draft_model=` a folder; vLLM's configuration takes a method, a model
# and the number of drafts.
#
# **EAGLE** (Li et al. 2024) predicts the next feature of the target, from feature and token. **EAGLE-2** (2024) lets the
# head's own confidence decide which drafts go on, as a tree (next notebook). **EAGLE-3** (2025) drops the loss on
# features, uses low, middle and high layers of the target as input, and trains on the head's own outputs over several
# steps ("training-time test"). The course's head has one input, the last hidden state, and is trained over several steps.
#
# A draft model has to share the vocabulary; with another one drafts go through text, or are restricted to the tokens that
# both have: the text stays right, and fewer are kept. It also has to be served: its weights, its cache, its parallel layout.
# On several GPUs a small draft model runs on all of the target's, or on one while the others wait.

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("08_speculative_decoding").draw(seed=1, tag="drafters"))

# %% [markdown] name="card"
# ## 10. Card
#
# - An autoregressive draft model drafts one token after another: k passes of it, then one of the target over all drafts.
# - One draft pays where 1 + a > v(1) + c; with v = 1 where a > c.
# - A feature head reads the target's hidden state and the token drawn there, and uses the target's embedding and lm_head:
#   one layer, good drafts, one target.
# - Early exit: the target's first layers draft. c is their share of the layers and an lm_head; exits have to be trained.
# - Roll-back is a counter: rejected slots are overwritten, attention does not look beyond what counts. Rows advance by
#   different numbers of tokens.
# - The draft model's cache lies beside the target's, by the same block ids. The drafter also computes every token of the text.
# - A feature head has the target's hidden state for its first draft; after that it reads its own estimate.
# - Train the drafter on the target's own output. Distribution shift lowers acceptance; online training follows it.
# - Quote acceptance length with k, temperature, task and model.
