# %% [markdown] name="title"
# # 08d · Heads for later tokens, and trees of their drafts
#
# About 40 minutes. You need `c_drafters`. First, drafts come from heads that do not wait for each other, so that there are
# several for each place. A chain takes one of each, and is dropped from its first wrong one on; so then several
# continuations, a tree of them, are verified at once. That is sections 1 to 6. Section 7 has three topics of its own, each
# under a heading: lookahead, typical acceptance, and multi-token prediction. Before it is a good place to stop, and to come
# back to.

# %% name="setup"
import inspect
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from urllib import request as stdlib_text

import numpy as np
import torch
import torch.nn.functional as functional

from chapters import widgets
from chapters.widgets.draft_tree import Tree
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, SKY, figure, show
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.features.speculative.tree import Tree as EngineTree
from reference_impl.bench.speculative import workload
from reference_impl.observe.trace import DraftUse
from reference_impl.theory import speculative as theory

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
torch.manual_seed(8)
COMMON = {"dtype": "float32", "kv_cache_bytes": 8 * 2**20, "prefix_cache": "off", "max_model_len": 1024}
GREEDY = SamplingParams(max_tokens=88, temperature=0, ignore_eos=True)
llm = LLM(course_model("target"), **COMMON)
target = llm.engine.model
c = target.config
VERBS, NOUNS = ("read", "find", "count", "merge", "is", "to"), ("lines", "table", "header", "path", "words", "node")


def one_pass(tokens, attention=None, positions=None):
    """Hidden states of all tokens after the last norm, [len(tokens), hidden_size]; one pass without a cache."""
    batch = ragged_batch([(tokens, 0)], len(tokens), target.device, c.layer_windows)
    batch = replace(batch, logits_indices=torch.arange(len(tokens), device=target.device))
    if positions is not None:
        batch = replace(batch, positions=positions)
    attention = attention or RecomputeAttention(c.attention_scale, c.attention_softcap)
    with torch.inference_mode():
        return target.hidden_states(batch, None, attention)


def spelled(token):
    return llm.tokenizer.decode([token])


# What the target writes after 36 beginnings of functions; the last six are kept apart for measuring.
heads_of_functions = [
    llm.encode(f'def {verb}_{noun}(path, limit=None):\n    """') for verb, noun in product(VERBS, NOUNS)
]
own = [
    [*p, *r.outputs[0].token_ids]
    for p, r in zip(heads_of_functions, llm.generate(heads_of_functions, GREEDY), strict=True)
]
held_out, own = own[-6:], own[:-6]
corpus = llm.encode(inspect.getsource(stdlib_text))
corpus = [corpus[i : i + 100] for i in range(0, 30 * 100, 100)]

# %% [markdown] name="question"
# ## 1. A question with a number
#
# Two small matrices on the target's last hidden state, in front of the lm_head, are trained to predict the token after next,
# and the one after that: two drafts in one go, no second model. We train them below, in seconds. **The first of them: how often is its best draft
# right on text of the target's own that it has not seen?**

# %% name="predict"
widgets.predict("08d-head", "How often is a quickly trained head right about the token after next?", "%")

# %% [markdown] name="heads-text"
# A **Medusa head** (Cai et al. 2024) is a small block beside the lm_head: h + silu(W h), and then an output matrix of its own,
# begun as a copy of lm_head. Ours share the target's lm_head, so that a head is one small matrix.
# Head 1 predicts token p + 2 from the hidden state of p, head 2 token p + 3, and neither has the other's draft as input, nor
# the token that is drawn at p + 1. Training data: hidden states of the frozen target over a text, and the text's later
# tokens.


# %% name="heads-train"
def pairs(texts, ahead):  # (hidden state of p, token p + 1 + ahead), over all texts
    return [
        torch.cat(parts)
        for parts in zip(
            *((one_pass(text)[: -1 - ahead], torch.tensor(text[1 + ahead :])) for text in texts), strict=True
        )
    ]


def train(texts, ahead, steps=60):
    hidden, wanted = pairs(texts, ahead)
    weight = torch.zeros(c.hidden_size, c.hidden_size, requires_grad=True)  # W
    optimizer = torch.optim.Adam([weight], lr=3e-3)
    for _ in range(steps):
        at = torch.randint(len(hidden), (192,))
        h = hidden[at].clone()
        loss = functional.cross_entropy((h + functional.silu(h @ weight)) @ target.embedding.T.clone(), wanted[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weight.detach()


def head_logits(weight, hidden):
    return target.logits(hidden + functional.silu(hidden @ weight))


# %% name="heads-run"
def right(weight, texts, ahead, width=1):
    """How often the wanted token is among the head's best `width`."""
    hidden, wanted = pairs(texts, ahead)
    return float((head_logits(weight, hidden).topk(width).indices == wanted[:, None]).any(1).float().mean())


untrained = torch.zeros(c.hidden_size, c.hidden_size)
on_corpus, head1, head2 = train(corpus, 1), train(own, 1), train(own, 2)
rows = [["head 1, untrained", f"{right(untrained, held_out, 1):.0%}"],
        ["head 1, trained on code that the target has not written", f"{right(on_corpus, held_out, 1):.0%}"],
        ["head 1, trained on the target's own text", f"{right(head1, held_out, 1):.0%}"],
        ["head 2, trained on the target's own text", f"{right(head2, held_out, 2):.0%}"]]  # fmt: skip
widgets.reveal("08d-head", 100 * right(head1, held_out, 1))
widgets.table(rows, ["drafter", "right on held-out text of the target's own"])

# %% [markdown] name="heads-reading"
# That is **alignment**: the same head, the same number of steps, and the target's own text teaches it more about the target
# than other text does. Head 2 has a harder task: two tokens that it does not see stand between.
#
# How much of that is repetition? The target writes similar things after similar beginnings. So ask how many of the held-out
# texts' n-grams stand in the training text; and how often a mere table is right, which has of every three tokens of the
# training text what came most often two places further on.


# %% name="heads-repeats"
def grams(texts, n):
    return [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]


for n in (8, 16):
    known = set(grams(own, n))
    print(
        f"{np.mean([gram in known for gram in grams(held_out, n)]):.0%} of the held-out {n}-grams stand in the training text"
    )
after_three = defaultdict(Counter)
for *three, _, later in grams(own, 5):
    after_three[tuple(three)][later] += 1
hits = [after_three[gram[:3]].most_common(1)[0][0] == gram[4] for gram in grams(held_out, 5) if gram[:3] in after_three]
print(f"the table is right about the token after next in {sum(hits) / len(grams(held_out, 5)):.0%}")

# %% [markdown] name="heads-repeats-reading"
# A good part of it is: the table, which knows nothing of hidden states, is not far below head 1. The comparison of the two
# training texts says that a drafter has to know what its target writes, not by how much a head would gain on text that is
# new.

# %% [markdown] name="idea"
# ## 2. The idea
#
# You ask the way and are told: "left, then straight on, then right". If *left* was wrong, the rest is worth nothing. Better
# to ask for two first turns, and what follows each: a **tree**. The heads of section 1 give what it needs, a list of drafts
# for each place. Many drafts of a tree are wrong by construction, since only one branch can be right. But a step has room.
#
# A tree needs two changes to the pass that verifies. Each draft may attend to the text and to **its own path**, not to
# other branches: a mask. And its position is its *depth*, not its place in the row: two alternatives for the next token
# have the same position.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.3)
ax = fig.subplots()
for y, links, title in (
    (1.2, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)], "a chain of six"),
    (0, [], "a tree of six"),
):
    ax.text(-0.2, y, title, fontsize=9, va="center", ha="right")
    for a, b in links:
        ax.plot([a + 0.12, b - 0.12], [y, y], color=INK)
        ax.plot(b, y, "o", color=SKY, markersize=11, markeredgecolor=INK)
    ax.plot(0, y, "s", color=GREY, markersize=11, markeredgecolor=INK)
NODES = {1: (1, 0.4), 2: (1, -0.4), 3: (2, 0.6), 4: (2, 0.2), 5: (2, -0.4), 6: (3, 0.6)}
PARENT = {1: (0, 0), 2: (0, 0), 3: NODES[1], 4: NODES[1], 5: NODES[2], 6: NODES[3]}
for node, (x, y) in NODES.items():
    ax.plot([PARENT[node][0] + 0.12, x - 0.12], [PARENT[node][1], y], color=INK)
    ax.plot(x, y, "o", color=GREEN, markersize=11, markeredgecolor=INK)
ax.set_xlim(-2.2, 6.6)
ax.set_ylim(-0.8, 1.7)
ax.axis("off")
show(
    fig,
    "Above a chain of six drafts after the text. Below a tree of six: two alternatives for the first token, two and one "
    "for the second after them, one for the third after the best.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# Attention with any mask, in place of the engine's. It is the reference formula of chapter 05 with one line more.


# %% name="scratch-attention"
class TreeAttention:
    """One row; mask [tokens, tokens]: which keys each query sees."""

    def __init__(self, mask):
        self.mask = mask

    def plan(self, batch):
        pass

    def forward(self, q, k, v, layer, kv_cache, batch):  # [tokens, heads, head_dim], [tokens, kv_heads, head_dim]
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.attention_scale
        scores = scores.masked_fill(~self.mask, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def tree_logits(text, tree_tokens, tree):
    """Logits at the text's last token and at each draft of the tree, [1 + drafts, vocab_size]; one pass."""
    n, g = len(text), len(tree_tokens)
    mask = torch.ones(n + g, n + g, dtype=torch.bool).tril()
    mask[n:, n:] = torch.from_numpy(tree.mask)  # a draft sees its path, and no other branch
    positions = torch.cat([torch.arange(n), torch.tensor(tree.depths) + n - 1])  # depth, not place
    return target.logits(one_pass([*text, *tree_tokens], TreeAttention(mask), positions)[n - 1 :])


# %% [markdown] name="scratch-tree-text"
# The tree: the target's own next token is known when the heads are computed, so head 1 has the first level, head 2 the
# second. Three alternatives on the first level, two after each.


# %% name="scratch-tree"
def grow(text, widths=(3, 2)):
    """Drafts after text: head 1's best, and after each head 2's best, from the hidden state of the last token but one."""
    hidden = one_pass(text)[-2][None]
    levels = [
        head_logits(w, hidden)[0].softmax(-1).topk(width) for w, width in zip((head1, head2), widths, strict=True)
    ]
    tokens, parents, chances = [], [], []
    for chance, token in zip(*(x.tolist() for x in levels[0]), strict=True):
        tokens.append(token), parents.append(-1), chances.append(chance)
    for first in range(widths[0]):
        for chance, token in zip(*(x.tolist() for x in levels[1]), strict=True):
            tokens.append(token), parents.append(first), chances.append(chances[first] * chance)
    return tokens, Tree(tuple(map(spelled, tokens)), tuple(parents), tuple(chances))


text = held_out[0][:40]
tokens, tree = grow(text)
logits = tree_logits(text, tokens, tree)
for node in range(len(tokens)):  # each draft has the logits it would have had in a chain of its own
    path = [tokens[i] for i in tree.path(node)]
    assert torch.allclose(logits[1 + node], target.logits(one_pass([*text, *path])[-1:])[0], atol=1e-3)
print(f"{len(tokens)} drafts in one pass, each with the logits of its own path")

# %% [markdown] name="scratch-verify-text"
# Verifying (greedy) is a walk: from the text's end to the child that is the target's likeliest token, as long as there is
# one.


# %% name="scratch-verify"
def walk(logits, tokens, tree):
    """The path that is kept, and the target's own token after it."""
    at, kept = -1, []
    while True:
        likeliest = int(logits[1 + at].argmax())
        below = [i for i, parent in enumerate(tree.parents) if parent == at and tokens[i] == likeliest]
        if not below:
            return kept, likeliest
        at = below[0]
        kept.append(at)


# %% [markdown] name="scratch-decode-text"
# Around it the loop: grow a tree, verify it, keep the path and the target's token. A chain of two drafts against a tree:


# %% name="scratch-decode"
def decode(text, num_tokens, widths):
    out, steps = list(text), 0
    while len(out) < len(text) + num_tokens:
        tokens, tree = grow(out, widths)
        kept, own_token = walk(tree_logits(out, tokens, tree), tokens, tree)
        out += [*(tokens[i] for i in kept), own_token]
        steps += 1
    return out[len(text) :][:num_tokens], steps


plain = held_out[0][40:64]
for widths in ((1, 1), (3, 2)):
    found, steps = decode(text, 24, widths)
    assert found == plain
    num_drafts = widths[0] + widths[0] * widths[1]
    print(f"widths {widths}: {num_drafts} drafts a step, {steps} steps for 24 tokens")

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The verification that this chapter's engine runs have used so far is a tree with one branch: the mask is the causal one,
# the position the place. So the tree pass above, given the engine's drafts as a chain, has to keep what the engine keeps.

# %% name="engine-chain"
chained = LLM(course_model("target"), speculative="ngram", num_drafts=4, adaptive_drafts="off", **COMMON)
repeating = llm.encode(workload("repeats", 1)[0])
request = chained.engine.add(repeating, replace(GREEDY, max_tokens=40))
compared = 0
while chained.engine.has_work():
    before = list(request.tokens)
    chained.engine.step()
    [row] = list(chained.engine.trace.steps())[-1].rows
    if row.drafts:
        chain = Tree(tuple(map(spelled, row.drafts)), tuple(range(-1, row.num_drafts - 1)), (1.0,) * row.num_drafts)
        kept, own_token = walk(tree_logits(before, row.drafts, chain), list(row.drafts), chain)
        assert request.tokens[len(before) :] == [*(row.drafts[i] for i in kept), own_token]
        compared += 1
print(f"{compared} steps with drafts: the walk keeps what the engine kept")

# %% [markdown] name="engine-cache-text"
# With a cache a tree costs more care than a chain. A draft's keys and values are written at a slot of its own, several for
# one position. Of the kept path they have to end up in the positions' own slots: moved after the step, or computed again.
# And an attention kernel has to take a mask, or be called twice, over the text without a mask and over the tree with one,
# and the two results merged as in chapter 05. The engine moves them, and its kernel takes a mask: a bit for each ancestor
# of a draft. Of the tree in section 2, read from the right: the bit of the text's last token, then those of drafts 0 to 5
# ("after -1": directly after the text).

# %% name="engine-mask"
six = EngineTree.of(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))  # as paths: which child, and which of its
mine = Tree(tuple("012345"), six.parents, (1.0,) * 6).mask
for node, bits in enumerate(six.sees(1)[1:].tolist()):
    print(f"draft {node}, after {six.parents[node]}: {bits:07b}")
    assert [bool(bits >> 1 + other & 1) for other in range(6)] == mine[node].tolist()

# %% [markdown] name="engine-tree-text"
# Now the feature head of `c_drafters` makes a tree of four drafts, with two after each, in place of a chain; and one that is
# grown anew in each step, `"dynamic"` (section 5 says how).
# (In float64: a step of thirteen tokens adds in another order than a step of one, and rounding in float32 could decide between
# two tokens that are nearly equally likely. Then the texts would differ without a fault.)

# %% name="engine-tree"
shapes = {"chain of two": {"num_drafts": 2, "adaptive_drafts": "off"}, "tree of 4 and 2": {"draft_tree": (4, 2)},
          "grown in each step": {"draft_tree": "dynamic"}}  # fmt: skip
texts, steps, exact = [], {}, COMMON | {"dtype": "float64"}
for name, options in {"plain": {}, **shapes}.items():
    drafter = {"draft_model": course_model("eagle")} if options else {}
    llm = LLM(course_model("target"), **drafter, **options, **exact)
    request = llm.engine.add(repeating, replace(GREEDY, max_tokens=60))
    while llm.engine.has_work():
        llm.engine.step()
    texts.append(request.output_tokens)
    steps[name] = len(llm.engine.trace.steps())
assert all(text == texts[0] for text in texts)
widgets.table([[name, number] for name, number in steps.items()], ["drafts", "steps for the same 60 tokens"])

# %% [markdown] name="engine-tree-reading"
# Twelve drafts a step in both trees, and the text is the same. Whether fewer steps are worth it depends on v(12).

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# What does width buy? How often the right token is among a head's best 1, 2, 4 and 8, on held-out text:

# %% name="measure-width"
table = {
    name: [right(w, held_out, ahead, width) for width in (1, 2, 4, 8)]
    for name, w, ahead in (("head 1", head1, 1), ("head 2", head2, 2))
}
widgets.table(
    [[name, *(f"{x:.0%}" for x in found)] for name, found in table.items()],
    ["right among the best", "1", "2", "4", "8"],
)

# %% [markdown] name="measure-shapes-text"
# A tree's expected tokens: 1, plus the chance that its first level has the right token, plus that the second has, too. (Taken
# as independent here.) The cost is v(number of drafts). **Which shape has the best speed-up if each draft costs 1 % of a step
# to verify: 1 by 1, 2 by 1, 4 by 2, 8 by 4 or 8 by 8? Predict its number of drafts.**

# %% name="measure-shapes-predict"
widgets.predict("08d-shape", "Number of drafts of the best of the five shapes at 1 % a draft?", "drafts")

# %% name="measure-shapes"
at = {1: 0, 2: 1, 4: 2, 8: 3}
rows, best = [], (0.0, 0)
for first, second in ((1, 1), (2, 1), (4, 2), (8, 4), (8, 8)):
    num_drafts = first + first * second
    a1, a2 = table["head 1"][at[first]], table["head 2"][at[second]]
    expected = theory.expected_tokens_by_position([a1, a2])
    gains = [theory.speed_up(expected, num_drafts, 0, 1 + cost * num_drafts) for cost in (0.0, 0.01, 0.05)]
    best = max(best, (gains[1], num_drafts))
    rows.append([f"{first} by {second}", num_drafts, f"{expected:.2f}", *(f"{gain:.2f}" for gain in gains)])
widgets.reveal("08d-shape", best[1])
widgets.table(rows, ["shape", "drafts", "tokens a step", "v = 1", "1 % a draft", "5 % a draft"])

# %% [markdown] name="measure-shapes-reading"
# Width pays slowly: doubling that of a level doubles its drafts and all below them, and what is kept grows far less. So trees are for small batches, where
# a step has room. EAGLE-2 makes the tree deep where the head is sure and wide where it is not: it expands the drafts with the
# largest product of chances along their path, and verifies the best of all, so the shape differs at every step. In the
# engine that is `draft_tree="dynamic"`, the last row of the table in section 4.

# %% [markdown] name="explore"
# ## 6. Explore
#
# The tree that was verified above, at the same place, with the path that the target kept. *Choose a draft on the second
# level: which row of the mask is its, and why is the draft beside it masked?*

# %% name="explore-widget"
text = held_out[0][:44]
tokens, tree = grow(text)
kept, _ = walk(tree_logits(text, tokens, tree), tokens, tree)
widgets.draft_tree(replace(tree, kept=tuple(kept)))

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# Three sentences, and a topic with each. They need nothing from each other.
#
# ### Lookahead: drafts without any drafter
#
# **"Lookahead decoding is n-gram prediction."** (E08.5) Two methods are mixed up. Prompt lookup copies from the text; it
# drafts nothing where nothing repeats. Lookahead makes its n-grams with the model, by **Jacobi iteration**: fill a window
# with any tokens, compute all of it at once, and take the model's likeliest tokens as the next window. The first wrong token
# becomes right in every pass, so after n passes at least n tokens are what plain decoding writes; sometimes several become
# right at once. A window of eight is begun with nonsense, and passes are made until one changes nothing, which shows that
# all eight are right. **How many passes is that, with this last one?**

# %% name="errata-jacobi-predict"
widgets.predict("08d-jacobi", "Passes over a window of eight, up to and with the first that changes nothing?", "passes")

# %% name="errata-jacobi"
text = held_out[1][:60]
window, passes, found = [text[-1]] * 8, 0, []
while True:
    new = target.logits(one_pass([*text, *window])[len(text) - 1 : -1]).argmax(-1).tolist()
    passes += 1
    agreed = next((i for i, (a, b) in enumerate(zip(new, held_out[1][60:], strict=False)) if a != b), 8)
    found.append(agreed)
    if new == window:
        break
    window = new
assert window == held_out[1][60:68]
print(f"right from the start after each pass: {found}")
widgets.reveal("08d-jacobi", passes)

# %% [markdown] name="errata-jacobi-reading"
# Here every pass made one more token right, which is the pace of plain decoding. **Lookahead decoding** (Fu et al. 2024) keeps what passes by: it runs such a window at every
# step, collects the n-grams that appear along the iterations in a pool, and in the same pass verifies those that begin with
# the text's last token. It costs arithmetic (window and candidates in each step), no second model and no training. Window and
# candidates are one tree after the last token, so the engine verifies them as it does any other: `speculative="lookahead"`.
#
# Lookup and lookahead on one text, which begins with nothing to copy. Of lookahead, the n-grams that stood in the pool and
# of which the next step kept a part:

# %% name="errata-lookahead"
beginning, written = llm.encode('def find_words(path, limit=None):\n    """'), []
for method, drafts in (("ngram", {"num_drafts": 4}), ("lookahead", {})):
    one, useful = LLM(course_model("target"), speculative=method, adaptive_drafts="off", **drafts, **exact), []
    request = one.engine.add(beginning, replace(GREEDY, max_tokens=48))
    while one.engine.has_work():
        before = list(request.tokens)
        source = one.engine.executor.drafting.source  # of the drafts
        pool = source.lookahead.pool.flatten(0, 1).tolist() if method == "lookahead" else []
        one.engine.step()
        kept = request.tokens[len(before) : -1]  # without the target's own token
        useful += [gram for gram in pool if kept and gram[0] == before[-1] and gram[1:][: len(kept)] == kept]
    written.append(request.output_tokens)
    use = DraftUse.of(one.engine.trace.steps())
    print(
        f"{method}: {len(one.engine.trace.steps())} steps, {use.num_draft_tokens} drafts, {use.num_accepted_tokens} kept"
    )
assert written[0] == written[1]
print("from the pool:", [llm.tokenizer.decode(gram) for gram in useful])

# %% [markdown] name="errata-lookahead-reading"
# Lookup's drafts are few, since it needs a repetition. Lookahead has up to twelve in every step from the second on, most of
# them wrong: whether that pays is v(12) again.

# %% [markdown] name="errata-typical-text"
# ### Typical acceptance
#
# **"Medusa, EAGLE and lookahead preserve the distribution."** (E08.6) The *rule of acceptance* does, or does not. Medusa's
# default for sampling is **typical acceptance**: keep draft x if p(x) > min(ε, δ · exp(−H(p))). It asks whether x is plausible, not
# whether it comes as often as p has it. What comes out, at positions of the course target, if head 1 draws the drafts:

# %% name="errata-typical"
hidden, wanted = pairs(held_out, 1)
p = torch.cat([target.logits(one_pass(t))[1:-1].softmax(-1) for t in held_out]).double()
q = head_logits(head1, hidden).softmax(-1).double()
entropy = -(p * p.clamp(min=1e-12).log()).sum(-1, keepdim=True)
plausible = p > torch.minimum(torch.tensor(0.09), 0.3 * (-entropy).exp())
typical = torch.where(plausible, q, 0)
typical = typical + (1 - typical.sum(-1, keepdim=True)) * p  # else the target's own token
rest = (p - q).clamp(min=0)
exact = torch.minimum(p, q) + rest  # rejection: the residual times its own probability
for name, out, kept in (("typical", typical, torch.where(plausible, q, 0)), ("rejection", exact, torch.minimum(p, q))):
    off = (out - p).abs().sum(-1) / 2
    print(f"{name}: keeps {kept.sum(-1).mean():.0%} of the drafts; total variation from p: {off.mean():.3f} on average")
assert torch.allclose(exact, p)
assert ((typical - p).abs().sum(-1) / 2).mean() > 0.01

# %% [markdown] name="errata-typical-reading"
# The engine has it as the one option that is lossy, `acceptance="typical"`, and its trace counts such rows.
#
# So label every method: exact (greedy match, rejection, coupling) or approximate (typical acceptance, thresholds, top-n
# match). An approximate one may be a good trade; it is another model, and has to be evaluated as one.
#
# ### Multi-token prediction
#
# **"Multi-token prediction predicts directly, not autoregressively."** (E08.7) Two designs have the name. *Parallel heads*
# (Gloeckle et al. 2024; Medusa) have the same state as input, and not each other's drafts. *Sequential modules* (DeepSeek-V3)
# take the module before and the token in between, so they keep the chain.
#
# A drafter that gives k drafts in *one* pass (parallel heads; diffusion models that fill a block) costs c once, not k
# times. With equal acceptance, that moves the best k:

# %% name="errata-block"
rows = []
for a in (0.6, 0.8, 0.9):
    chain = [theory.speed_up(theory.expected_tokens(a, k), k, 0.1) for k in range(1, 17)]
    block = [theory.speed_up(theory.expected_tokens(a, k), 1, 0.1) for k in range(1, 17)]
    rows.append(
        [
            a,
            f"{max(chain):.2f} at k = {1 + int(np.argmax(chain))}",
            f"{block[3]:.2f}",
            f"{block[7]:.2f}",
            f"{block[15]:.2f}",
        ]
    )
widgets.table(rows, ["acceptance", "k passes, best", "one pass, k = 4", "k = 8", "k = 16"])

# %% [markdown] name="errata-block-reading"
# (c = 0.1, v = 1.) The catch is the acceptance: drafts made without each other fit together worse. What parallel heads
# cannot express:

# %% name="errata-mtp"
first = np.array([0.5, 0.5])  # New, Los
second = np.array([[1.0, 0.0], [0.0, 1.0]])  # York, Angeles after them
joint, parallel = first[:, None] * second, np.outer(first, first @ second)
print("the text:       New York 50 %, Los Angeles 50 %")
print(
    f"parallel heads: New York {parallel[0, 0]:.0%}, New Angeles {parallel[0, 1]:.0%}, Los York {parallel[1, 0]:.0%}, ..."
)
print(f"pairs that can be kept: {np.minimum(joint, parallel).sum():.0%}; of a module that sees the first token: 100%")

# %% name="errata-mtp-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.4)
axes = fig.subplots(1, 2)
for ax, sequential, title in ((axes[0], False, "parallel heads"), (axes[1], True, "sequential modules")):
    ax.text(
        0,
        1,
        "hidden state\nof p",
        ha="center",
        va="center",
        fontsize=8,
        bbox={"facecolor": GREY, "alpha": 0.4, "boxstyle": "round"},
    )
    for i, y in enumerate((2, 1, 0)):
        ax.text(1.5, y, ("lm_head", "head 1" if not sequential else "module 1", "head 2" if not sequential else "module 2")[i],
                ha="center", va="center", fontsize=8, bbox={"facecolor": (SKY, GREEN, ORANGE)[i], "alpha": 0.4, "boxstyle": "round"})  # fmt: skip
        ax.text(2.75, y, f"token p + {i + 1}", va="center", fontsize=8)
        if not sequential or i < 2:
            ax.annotate("", (1.1, y), (0.45, 1), arrowprops={"arrowstyle": "->", "color": INK})
        ax.annotate("", (2.7, y), (1.95, y), arrowprops={"arrowstyle": "->", "color": INK})
        if sequential and i < 2:
            ax.annotate(
                "", (1.75, y - 0.72), (3.0, y - 0.2), arrowprops={"arrowstyle": "->", "color": BLUE, "linestyle": "--"}
            )
            if i == 1:
                ax.annotate("", (1.35, 0.25), (1.35, 0.75), arrowprops={"arrowstyle": "->", "color": BLUE})
    ax.set_xlim(-0.6, 3.9)
    ax.set_ylim(-0.5, 2.7)
    ax.set_title(title, fontsize=10, loc="left")
    ax.axis("off")
show(
    fig,
    "Left: from one hidden state the lm_head and two heads predict the next three tokens, independently. Right: each module takes "
    "what the module before made and the token in between, along dashed arrows, so the chain stays causal.",
)

# %% [markdown] name="errata-mtp-reading"
# DeepSeek-V3 was released with one such module: 11.5 billion parameters of its own, counted as 14 billion with its copies of
# embedding and head. Used as a drafter, it is built like the feature head of `c_drafters`, with one norm more, and like
# that one can be run again on its own output for more drafts: in this engine `speculative="mtp"`. The course model was not
# trained with one; `course_model("mtp")` was trained after it, from the feature head's weights. Both kinds, as the course has
# them, on the same prompts:
# <!-- source: DeepSeek-V3 technical report and model card, 2024-12 -->

# %% name="errata-mtp-engine"
rows = []
for name, kind in (("medusa", "parallel heads"), ("mtp", "a sequential module, run again and again")):
    one = LLM(course_model("target"), draft_model=course_model(name), num_drafts=4, adaptive_drafts="off", **COMMON)
    one.generate(workload("code", 4), replace(GREEDY, max_tokens=48))
    use = DraftUse.of(one.engine.trace.steps())
    reached = [use.num_drafts, *use.accepted_per_position[:-1]]
    chances = [f"{kept / max(1, n):.0%}" for kept, n in zip(use.accepted_per_position, reached, strict=True)]
    rows.append([name, kind, *chances, f"{1 + use.num_accepted_tokens / use.num_drafts:.2f}"])
widgets.table(rows, ["drafter", "kind", "1st", "2nd", "3rd", "4th", "acceptance length"])

# %% [markdown] name="errata-mtp-engine-reading"
# (Chances given that the drafts before were kept.) The heads' first draft is worse already: they do not have the token that
# was drawn at p + 1, and they are small, one matrix each.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026.
#
# **SGLang** verifies trees of EAGLE drafts (number of steps, width and total are options); **TensorRT-LLM** has
# EAGLE, with trees as an option, and MTP modules; **vLLM** verifies chains by default, with draft models, EAGLE, Medusa heads,
# MTP modules and n-grams. A tree that pays at batch 1 is a loss in a full batch, which is why engines that serve many
# requests keep to chains, or to few drafts.
#
# Papers: Medusa (Cai et al. 2024), Lookahead (Fu et al. 2024), SpecInfer (Miao et al. 2024, trees and their mask), EAGLE-2
# (Li et al. 2024), multi-token prediction (Gloeckle et al. 2024; DeepSeek-AI 2024). Exact sampling from a tree is rejection
# along it. The children of a node are drawn from q without replacement and tried in that order: the first against p and q; if
# it is rejected, p becomes the residual, q loses the child that was tried, and the next one is tried against these. If none
# is kept, the token is drawn from what is left of p. (Rule and proof: `reference_impl/features/speculative/candidates.py`.
# Children that are simply the likeliest ones have q = 1 each, and are kept with their share of what is left of p.) SpecTr
# (Sun et al. 2023) asks which rule keeps the most of several independent draws, a problem of optimal transport.

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("08_speculative_decoding").draw(seed=1, tag="trees"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Tree: alternatives are verified in one pass. Mask: the text and the draft's own path. Position: depth. Kept: the path
#   of the target's own tokens. The kept path's keys and values have to move to their positions' slots.
# - Doubling the width of a level doubles its drafts and all below them, and what is kept grows far less: for small batches.
# - Medusa: heads on the last hidden state, all at once. MTP: parallel heads, or sequential modules that keep the chain.
# - Lookahead: Jacobi window, pool of n-grams, verification, in one pass. Prompt lookup: a copy. Not the same.
# - k drafts in one pass cost c once; what they lose is that none depends on another.
# - Exact is the rule of acceptance, not the drafter. Typical acceptance is approximate.
# - Train drafters on the target's own text.
