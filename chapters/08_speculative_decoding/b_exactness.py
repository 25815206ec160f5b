# %% [markdown] name="title"
# # 08b · Why the distribution stays
#
# About 40 minutes. You need `a_guesses`, and from chapter 01 how a token is drawn. Greedy decoding was easy: a draft is
# right or wrong. Here tokens are **drawn**, so no draft is wrong; and yet the text has to be distributed as if there
# had been no drafts.

# %% name="setup"
import inspect
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction as F
from itertools import permutations, product

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, ORANGE, PURPLE, figure, show, tidy
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.features.speculative import rejection
from reference_impl.assembly.sampler import probabilities
from reference_impl.bench.speculative import workload
from reference_impl.observe.trace import DraftUse
from reference_impl.theory import speculative as theory

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
COMMON = {"dtype": "float32", "kv_cache_bytes": 8 * 2**20, "prefix_cache": "off", "max_model_len": 1024}
llm = LLM(course_model("target"), **COMMON)
target, draft = llm.engine.model, LLM(course_model("draft"), **COMMON).engine.model
code = llm.encode(workload("code", 1)[0])


@torch.inference_mode()
def distributions(model, tokens, **sampling):
    """What each position's next token is drawn from, [len(tokens), vocab_size]; one pass without a cache."""
    c = model.config
    batch = ragged_batch([(tokens, 0)], len(tokens), model.device, c.layer_windows)
    batch = replace(batch, logits_indices=torch.arange(len(tokens), device=model.device))
    logits = model(batch, None, RecomputeAttention(c.attention_scale, c.attention_softcap))
    return probabilities(logits.float(), [SamplingParams(**sampling)] * len(tokens))


def drafting(num_drafts=4):
    """An LLM whose course draft model has up to so many drafts for every decoding request."""
    return LLM(
        course_model("target"),
        draft_model=course_model("draft"),
        num_drafts=num_drafts,
        adaptive_drafts="off",
        **COMMON,
    )


# %% [markdown] name="question"
# ## 1. A question with a number
#
# A vocabulary of three tokens, A, B and C. The target has p = (0.5, 0.3, 0.2). Drafts are now drawn as well, from a
# distribution q that is known: that of a small language model, the *draft model* (next notebook), here q = (0.6, 0.1, 0.3). A
# rule that sounds right and stands in many summaries: *draw a token from the target; if it equals the draft, keep the draft; if not,
# resample from the target.*
# <!-- tested: tests/claims/test_chapter_08.py::test_e08_01_only_the_residual_keeps_the_distribution_and_most_of_the_guesses -->
#
# **In how many per cent of all cases does A come out?** The target says half of them.

# %% name="predict"
widgets.predict("08b-biased", "How often does A come out of 'match, else resample'?", "%")

# %% [markdown] name="count"
# ### The answer, by counting
#
# Three independent draws: draft x, the target's sample y, the second sample z. Each case has a
# probability that is a product. Add up what comes out. No randomness, no rounding: fractions.

# %% name="count-cell"
P, Q = [F(5, 10), F(3, 10), F(2, 10)], [F(6, 10), F(1, 10), F(3, 10)]
NAMES = "ABC"
out, kept = [F(0)] * 3, F(0)
for x, y, z in product(range(3), repeat=3):
    chance = Q[x] * P[y] * P[z]
    out[x if x == y else z] += chance
    kept += chance * (x == y)
print("comes out:", {name: float(share) for name, share in zip(NAMES, out, strict=True)}, "kept:", float(kept))
assert sum(out) == 1
assert out != P
widgets.reveal("08b-biased", 100 * float(out[0]))

# %% [markdown] name="count-reading"
# The rule is biased: A is likely for both, so it comes out by agreement *and* again by resampling. And it keeps few
# drafts, the sum of p·q. Who serves with it serves another model than the one that was evaluated.

# %% [markdown] name="idea"
# ## 2. The idea
#
# Lay the two distributions over each other. Where they overlap, a draft may stand: that much of q is also in p. What q has
# too much of must sometimes be rejected. What p has more of was drafted too rarely; that is exactly what has to be drawn
# when a draft was rejected, and **nothing else**.

# %% name="idea-figure" jupyter={"source_hidden": true}
p, q = (np.array([float(v) for v in values]) for values in (P, Q))
fig = figure(7.4, 2.7)
left, right = fig.subplots(1, 2, sharey=True)
at = np.arange(3)
low = np.minimum(p, q)
left.bar(at, low, 0.6, color=GREY, hatch="///", edgecolor="white", label="min(p, q): kept")
left.bar(at, np.maximum(q - p, 0), 0.6, bottom=low, color=ORANGE, label="q has too much: rejected")
right.bar(at, low, 0.6, color=GREY, hatch="///", edgecolor="white", label="min(p, q): kept")
right.bar(at, np.maximum(p - q, 0), 0.6, bottom=low, color=GREEN, label="p has more: drawn instead")
for ax, title in ((left, "what is drafted: q"), (right, "what comes out: p")):
    ax.set_xticks(at, list(NAMES))
    ax.set_ylim(0, 0.95)
    tidy(ax, "", "probability", title)
    ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Left: bars of q for A, B and C; the part that p has too is hatched, the excess of A and C is rejected. Right: the same "
    "hatched parts, and on top, only for B, what is drawn in place of rejected drafts; together they are p.",
)

# %% [markdown] name="idea-rule"
# The orange area and the green area are equally large, since both bars sum to 1. So:
#
# 1. Keep draft x with probability **min(1, p(x)/q(x))**.
# 2. If it is rejected, draw from the **residual**: max(p − q, 0), divided by its sum.
#
# **How often is a draft kept, in per cent, with this p and q?**

# %% name="idea-predict"
widgets.predict("08b-kept", "How often does the right rule keep a draft?", "%")

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# A rule as two functions: with which probability is draft x kept, and what is drawn if not. Four rules, counted out.


# %% name="scratch-rules"
def norm(weights):
    return [w / sum(weights) for w in weights]


def count(keep, instead):
    """(what comes out, share of drafts kept), exactly. keep(x): a probability; instead(x): a distribution."""
    out, kept = [F(0)] * len(P), F(0)
    for x, drafted in enumerate(Q):
        kept += drafted * keep(x)
        out[x] += drafted * keep(x)
        for y, chance in enumerate(instead(x)):
            out[y] += drafted * (1 - keep(x)) * chance
    return out, kept


residual = norm([max(p - q, F(0)) for p, q in zip(P, Q, strict=True)])
RULES = {
    "match, else resample from p": (lambda x: P[x], lambda x: P),
    "match, else that very sample": (lambda x: P[x], lambda x: norm([p if y != x else F(0) for y, p in enumerate(P)])),
    "min(1, p/q), else resample from p": (lambda x: min(F(1), P[x] / Q[x]), lambda x: P),
    "min(1, p/q), else the residual": (lambda x: min(F(1), P[x] / Q[x]), lambda x: residual),
}

# %% name="scratch-count"
rows = []
for name, rule in RULES.items():
    out, kept = count(*rule)
    off = sum(abs(o - p) for o, p in zip(out, P, strict=True)) / 2
    rows.append([name, *(f"{float(share):.3f}" for share in out), f"{float(off):.3f}", f"{float(kept):.0%}"])
widgets.reveal("08b-kept", 100 * float(kept))
assert out == P
widgets.table(rows, ["rule", *NAMES, "off by (total variation)", "kept"])

# %% [markdown] name="scratch-reading"
# The column "off" is the **total variation** between what comes out and p, TV for short: half of Σ |out − p|, the
# probability that would have to move from some tokens to others. Two rules are exact. Accepting on a match is exact if the *same* mismatching sample is given out, but it keeps only
# Σ p·q. The last rule keeps Σ min(p, q), and no exact rule keeps more of one draft: it and a token of p cannot be equal
# more often than that. (Of several drafts in a row an exact rule that judges them together, *block verification*, can keep
# more.) <!-- source: Sun et al., Block Verification Accelerates Speculative Decoding, ICLR 2025 --> Both halves of the last rule are needed: with its first half and a resample from p, the output is further off
# here than the naive rule's.
#
# **The proof**, line by line as in the engine's own file (`reference_impl/features/speculative/rejection.py`):
#
# - y is drafted *and* kept with probability q(y) · min(1, p(y)/q(y)) = min(p(y), q(y)).
# - So a draft is rejected with probability 1 − Σ min(p, q) = Σ max(p − q, 0).
# - That is the divisor of the residual: y comes out in a rejected draft's place with probability max(p(y) − q(y), 0).
# - Together: min(p, q) + max(p − q, 0) = p. ∎
#
# A step has several drafts. Each is judged given the text that was kept before it, so each position is this argument
# again; after the first rejection all is dropped, and after the last draft the bonus is drawn from p itself. Count it
# for **two** tokens, where q and p of the second depend on the first:


# %% name="scratch-two"
def after(first):  # second position: other distributions, by the first token
    turn = first + 1
    return [P[(i + turn) % 3] for i in range(3)], [Q[(i + 2 * turn) % 3] for i in range(3)]


pairs = Counter()
for x1, x2 in product(range(3), repeat=2):  # the drafts
    p2, q2 = after(x1)
    chance, keep1, keep2 = Q[x1] * q2[x2], min(1, P[x1] / Q[x1]), min(1, p2[x2] / q2[x2])
    pairs[x1, x2] += chance * keep1 * keep2
    rest2 = norm([max(a - b, F(0)) for a, b in zip(p2, q2, strict=True)])
    for y2 in range(3):  # the first is kept, the second is not
        pairs[x1, y2] += chance * keep1 * (1 - keep2) * rest2[y2]
    for y1, y2 in product(range(3), repeat=2):  # the first is not kept: the next step draws the second
        pairs[y1, y2] += chance * (1 - keep1) * residual[y1] * after(y1)[0][y2]
assert pairs == {(a, b): P[a] * after(a)[0][b] for a, b in product(range(3), repeat=2)}
print("all nine pairs, exactly:", {NAMES[a] + NAMES[b]: str(chance) for (a, b), chance in sorted(pairs.items())})

# %% [markdown] name="scratch-not-drawn"
# What if the draft was not drawn at all (an n-gram, copied)? Then q is 1 at the draft and 0 elsewhere: keep x with
# probability p(x), else draw from p without x. And **greedy** decoding is the same rule with p = 1 at the argmax: a draft
# is kept if it is the argmax, and otherwise the argmax comes out.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The engine's rule, for all drafts of a step at once, on tensors. `u` holds two uniform numbers for each draft:

# %% name="engine-source"
print(inspect.getsource(rejection.verified))

# %% [markdown] name="engine-grid-text"
# Is it the rule that was counted? Feed it an even grid of uniform numbers, and count what comes out.

# %% name="engine-grid"
n = 300
grid = (torch.arange(n) + 0.5) / n
u = torch.cartesian_prod(grid, grid).T.contiguous()  # [2, n * n]
rows_p, rows_q = (torch.tensor([[float(v) for v in values]]).expand(n * n, 3) for values in (P, Q))
out = torch.zeros(3, dtype=torch.float64)
for x in range(3):
    tokens = rejection.verified(rows_p, rows_q, torch.full((n * n,), x), u)
    out += float(Q[x]) * torch.bincount(tokens, minlength=3) / n**2
print("comes out:", [f"{share:.4f}" for share in out.tolist()])
assert torch.allclose(out, torch.tensor([float(v) for v in P], dtype=torch.float64), atol=1e-3)

# %% [markdown] name="engine-text-run"
# Now whole requests: temperature and top-p are part of p. The draft model's q is filtered the same way, and p decides what may come
# out. (Penalties belong to p, too, and move the draft model's logits by the same counts. Under a grammar the mask of each position
# depends on the drafts before it: so the host sees the drafts first, and a row ends where the grammar forbids one.)
# 400 requests draw three tokens with top-k 3, without a seed of their own, with two drafts a step. Second tokens
# that followed the most frequent first one, against p:

# %% name="engine-requests"
sampling = SamplingParams(max_tokens=3, temperature=0.9, top_k=3, ignore_eos=True)
drawn = drafting(2)
outputs = [tuple(r.outputs[0].token_ids) for r in drawn.generate([code] * 400, sampling)]
[(first, n)] = Counter(o[0] for o in outputs).most_common(1)
second = Counter(o[1] for o in outputs if o[0] == first)
p_second = distributions(target, [*code, first], temperature=0.9, top_k=3)[-1]
rows = [[repr(llm.tokenizer.decode([token])), f"{p_second[token]:.1%}", f"{second[token] / n:.1%}"]
        for token in p_second.topk(3).indices.tolist()]  # fmt: skip
assert all(p_second[token] > 0 for token in second)  # nothing that the filter forbids
use = DraftUse.of(drawn.engine.trace.steps())
print(f"{use.num_accepted_tokens} of {use.num_draft_tokens} drafts kept; {n} requests began alike")
widgets.table(rows, ["second token", "p", "drawn"])

# %% [markdown] name="engine-seed-text"
# ### A seed promises a text
#
# The distribution is kept, but *which* text is drawn depends on how many drafts were kept: rejection uses random numbers
# that plain decoding does not need. A request with a **seed** is promised its text, whatever the schedule. For it the
# engine verifies otherwise: each position has one random number of its own, the target draws with it as ever, and a draft
# is kept **if it is the token drawn**. The draft model draws its draft with the *same* number: distributions that are alike then
# mostly give the same token. That is a *coupling*.

# %% name="engine-seed"
seeded = SamplingParams(max_tokens=40, temperature=0.8, seed=11, ignore_eos=True)
plain = llm.generate([code], seeded)[0].outputs[0].token_ids
texts, lines = [], []
for k in (1, 2, 4):
    one = drafting(k)
    texts.append(one.generate([code], seeded)[0].outputs[0].token_ids)
    use = DraftUse.of(one.engine.trace.steps())
    lines.append([k, "yes" if list(texts[-1]) == list(plain) else "no", len(list(one.engine.trace.steps()))])
assert all(list(text) == list(plain) for text in texts)
widgets.table(lines, ["drafts k", "the text of plain decoding", "steps for 40 tokens"])

# %% [markdown] name="coupling-text"
# What does the promise cost? One number for both draws means that the draft is kept where the two cumulative sums put the
# number into the same token; shared **Gumbel noise** (both take the argmax of log-probability plus the same noise) is
# another coupling. **With p and q from above, rejection keeps 80 % of the drafts. How many does shared Gumbel noise keep?**

# %% name="coupling-predict"
widgets.predict("08b-gumbel", "How many drafts does shared Gumbel noise keep?", "%")


# %% name="coupling"
def by_one_uniform(p, q):
    """Inverse CDF with the same u: how much of [0, 1) both put into the same token."""
    a, b = np.r_[0, np.cumsum(p)], np.r_[0, np.cumsum(q)]
    return sum(max(0, min(a[i + 1], b[i + 1]) - max(a[i], b[i])) for i in range(len(p)))


def by_gumbel(p, q):
    """Both are argmax of log-probability + the same noise: token i wins both with 1 / sum_j max(p_j/p_i, q_j/q_i)."""
    return sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(len(p)))


p, q = (np.array([float(v) for v in values]) for values in (P, Q))
noise = np.random.default_rng(0).gumbel(size=(200_000, 3))
seen = ((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)).mean()
print(f"Gumbel noise: {by_gumbel(p, q):.1%} by formula, {seen:.1%} of 200,000 draws")
orders = [by_one_uniform(p[list(order)], q[list(order)]) for order in permutations(range(3))]
print(f"one uniform: {min(orders):.1%} to {max(orders):.1%}, by the order of the vocabulary")
widgets.reveal("08b-gumbel", 100 * by_gumbel(p, q))

# %% [markdown] name="coupling-reading"
# Rejection keeps as much as any rule can; a coupling by shared numbers, where neither side sees the other's distribution,
# keeps that or less. That is what a text equal for every k may cost.
# Gumbel noise never keeps less than (1 − TV)/(1 + TV), with TV between p and q, in any order of the vocabulary. One uniform
# depends on the order: a small shift near the start moves all later boundaries. This engine draws with one uniform unless it is
# told `sampling_noise="gumbel"`; what each keeps of the course draft model's drafts, `inferlab bench coupling` counts.

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# Acceptance at a position is Σ min(p, q) = 1 − TV(p, q): it can be *computed* from the two models, without drawing
# anything. Four texts of the target's own, 200 tokens each, and both models over them. First by **temperature**: *does a higher one
# raise or lower it? From 0.2 to 1.0, by how many points?*

# %% name="measure-predict"
widgets.predict("08b-temperature", "Acceptance at T = 0.2 minus at T = 1.0, in percentage points?", "points")

# %% name="measure-temperature"
own = SamplingParams(max_tokens=200, temperature=1.0, seed=4, ignore_eos=True)
prompts = [llm.encode(prompt) for prompt in workload("code", 4)]
texts = [[*t, *r.outputs[0].token_ids] for t, r in zip(prompts, llm.generate(prompts, own), strict=True)]


def by_position(temperature):
    """Σ min(p, q) of each output position, [4 texts, 199]."""
    return torch.stack([
        rejection.acceptance(*(distributions(m, t, temperature=temperature) for m in (target, draft)))[-200:-1]
        for t in texts
    ])  # fmt: skip


found = {t: by_position(t) for t in (0.2, 0.6, 1.0, 1.5)}
means = {t: float(values.mean()) for t, values in found.items()}
widgets.reveal("08b-temperature", 100 * (means[0.2] - means[1.0]))
widgets.table([[t, f"{mean:.1%}"] for t, mean in means.items()], ["temperature", "acceptance on text drawn at T = 1"])

# %% [markdown] name="measure-reading"
# What temperature does depends on the pair. Sharper distributions agree where both models have the same favourite, and
# disagree completely where they do not; flat ones overlap in any case. This small draft model often has another favourite. The
# usual sentence, "high temperature lowers acceptance", describes draft models that mostly agree with the target's first choice
# (and drafts that are not drawn: an n-gram is kept with p(x), which temperature flattens).
#
# Now by **position** in the text, and by how certain the target is:

# %% name="measure-figure" jupyter={"source_hidden": true}
kept = found[1.0]
entropy = torch.stack([
    -(lambda d: (d * d.clamp(min=1e-12).log()).sum(-1))(distributions(target, t, temperature=1.0))[-200:-1] for t in texts
])  # fmt: skip
bins = kept.mean(0)[:198].reshape(6, 33).mean(1)
order = entropy.flatten().argsort()
groups = order.reshape(-1)[: 6 * (len(order) // 6)].reshape(6, -1)
by_entropy = [(float(entropy.flatten()[g].mean()), float(kept.flatten()[g].mean())) for g in groups]
fig = figure(7.4, 2.7)
left, right = fig.subplots(1, 2, sharey=True)
left.plot([33 * i + 16 for i in range(6)], bins, "o-", color=BLUE)
right.plot(*zip(*by_entropy, strict=True), "s-", color=PURPLE)
left.set_ylim(0, 1)
tidy(left, "position in the output", "acceptance, mean of a sixth")
tidy(right, "entropy of the target, nats", "")
show(
    fig,
    f"Left: acceptance over the position in the output, in sixths: {', '.join(f'{b:.0%}' for b in bins.tolist())}. Right: "
    f"over the target's entropy, from {by_entropy[0][1]:.0%} where it is certain to {by_entropy[-1][1]:.0%} where it is not.",
)

# %% name="measure-numbers"
print(f"by position, in sixths: {', '.join(f'{b:.0%}' for b in bins.tolist())}")
print(f"by entropy, from certain to uncertain: {', '.join(f'{a:.0%}' for _, a in by_entropy)}")

# %% [markdown] name="measure-position-reading"
# Along the text it goes up and down, without a trend that would carry on; with the target's uncertainty it changes a lot.
# So what decides is *what* is written: predictable text is drafted well by any drafter.

# %% [markdown] name="explore"
# ## 6. Explore
#
# One draft, three uniform numbers. Move the step from 0 to 3, then the numbers. *Find u1 and u2 such that C is drafted and
# rejected; what can come out then, whatever u3 is?*

# %% name="explore-widget"
widgets.accept_reject(p, q, list(NAMES), step=0, u=(0.3, 0.5, 0.4))

# %% [markdown] name="explore-real-text"
# The same over a real position: the course models after the prompt, the seven likeliest tokens and all others together.

# %% name="explore-real"
real_p, real_q = (distributions(m, [*code, first], temperature=1.0)[-1].double() for m in (target, draft))
top = (real_p + real_q).topk(7).indices
short = [torch.cat([d[top], (d.sum() - d[top].sum())[None]]).numpy() for d in (real_p, real_q)]
labels = [repr(llm.tokenizer.decode([token]))[1:-1] for token in top.tolist()] + ["others"]
widgets.accept_reject(*(d / d.sum() for d in short), labels, step=2)

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"Accept if the target's sample equals the draft, else resample from the target."** (E08.1) Counted in section 1: A
# comes out in 60.5 % of the cases. The residual is what makes it exact.
#
# **"The residual is max(0, p − q) / (1 − sum_acc)."** (E08.2) The divisor is that of the position where the rejection
# happened, not a running sum of acceptances. A running sum over two positions that each keep 80 % would exceed 1:

# %% name="errata-divisor"
rng = np.random.default_rng(0)
for some_p, some_q in rng.dirichlet(np.ones(6), (1000, 2)):
    assert math.isclose(np.maximum(some_p - some_q, 0).sum(), 1 - np.minimum(some_p, some_q).sum())
print(f"1,000 random pairs: sum max(p - q, 0) = 1 - sum min(p, q). Here: {1 - theory.acceptance(p, q):.2f}")
print(f"one minus a running sum over two positions: {1 - 2 * theory.acceptance(p, q):.2f}, which is no probability")

# %% [markdown] name="errata-drift"
# **"In long outputs the draft drifts away from the target."** (E08.4) After every round both models continue from the
# *same* kept text; an error lives for k tokens at most. The left picture above, over 200 tokens, has no downward trend
# (beyond the contexts of its training a draft model may get worse). What threatens acceptance is unpredictable text, another
# domain than the draft model was trained for, and one that handles long contexts worse than the target does. Summaries of long documents quote them, so there even copying works.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026.
#
# **vLLM**'s rejection sampler has the three kinds of tokens of this chapter under the names *accepted*, *recovered* (the
# residual) and *bonus*. Greedy requests are compared with the argmax. Engines often let a draft model propose its
# likeliest token, which counts as q = 1: it is kept with p(x). Some keep a draft only if it equals the target's own sample
# ("match, else that very sample" in section 3: exact; it keeps as many if the draft model proposes its likeliest token, and
# fewer if it draws), and all offer relaxed rules: more drafts kept, another distribution. Read which rule is
# on before you call a speed-up lossless.
#
# "Exact" is a statement about distributions. Texts may still differ from run to run where a step of other shape rounds
# otherwise; chapter 03 has seen that for batches. This engine has `batch_invariant=True` against it.
#
# The rule is from Leviathan et al. (2023, "Fast Inference from Transformers via Speculative Decoding") and, at the same
# time, Chen et al. (2023, "Accelerating Large Language Model Decoding with Speculative Sampling"). Gumbel couplings of two
# distributions: Daliri et al. (2024).

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("08_speculative_decoding").draw(seed=1, tag="exact"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Keep draft x with min(1, p(x)/q(x)); otherwise draw from max(p − q, 0) over its sum. Comes out: min(p, q) +
#   max(p − q, 0) = p.
# - Kept: Σ min(p, q) = 1 − TV(p, q), where TV is half of Σ |p − q|. No exact rule keeps more of a single draft. "Match, else resample from p" is biased; "match, else that
#   sample" is exact and keeps Σ p·q.
# - Temperature and filters belong to p (and to q, so that drafts are good). Greedy: keep the argmax.
# - A draft that was not drawn has q = 1: kept with p(x), else p without x.
# - A seeded text is kept by coupling: the position's own random number for both; a draft is kept if it is the token
#   drawn. The same text for every k, and as many drafts kept as by rejection or fewer.
# - An error lives for at most k tokens: no drift. Acceptance follows predictability, domain and sampling,
#   and falls in contexts longer than the drafter was trained for.
