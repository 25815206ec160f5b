# %% [markdown] name="title"
# # 06 · Prefix caching and radix trees
#
# About 45 minutes. Parts whose heading says *(more)* are optional, about 60 minutes together; nothing later needs them.
# You need chapter 02 (the KV cache); chapter 04 (blocks and block tables) helps. The lab is [Build a prefix
# index](../../labs/06_prefix_caching/prefix_index.ipynb).

# %% name="setup"
import copy
import hashlib
import inspect
import json
import os
import random
import subprocess
import sys
from collections import OrderedDict, deque
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile

import numpy as np
import torch
from IPython.display import display

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, figure, show, tidy
from chapters.widgets.radix_tree import snapshot
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.assembly.parts import Parts
from reference_impl.interfaces import Request
from reference_impl.kernels import reference
from reference_impl.core.block_pool import BlockPool
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.core.kv_manager import KVManager, cache_key
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.prefix.radix_index import RadixIndex
from reference_impl.simulation import Result, simulate_replicas
from reference_impl.theory import latency, model_shapes, prefix_cache
from reference_impl.theory.deployment import WORKED, Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.units import format_bytes, format_seconds
from reference_impl.observe.trace import RequestArrived
from reference_impl.simulation.workloads import workload

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
folder = course_model("target")
llm = LLM(folder, dtype="float32", kv_cache_bytes=8 * 2**20)
model = llm.engine.model
shape = model_shapes.from_config(json.loads((folder / "config.json").read_text()), "course model")
on_gpu = model.device.type == "cuda"
text = llm.encode(inspect.getsource(Engine)) * 4
rng = random.Random(6)


def new_engine(kind, num_blocks=256, **more):
    return Engine(model, EngineConfig(num_blocks=num_blocks, prefix_cache=kind, **more))


def serve(engine, prompt, max_tokens=1, **more):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    request = engine.add(prompt, sampling, **more)
    while engine.has_work():
        engine.step()
    return request


def random_tokens(n):
    return [rng.randrange(10, 4000) for _ in range(n)]


def num_computed(trace):
    """Tokens that all steps of a trace computed."""
    return sum(row.num_tokens for step in trace.steps() for row in step.rows)


# %% [markdown] name="question"
# ## 1. A question with a number
#
# A chat has eight turns. Each turn sends everything again: a system prompt of 100 tokens, all messages (20 tokens each)
# and answers (40 tokens each) so far, and the new message. Together that makes 2,640 prompt tokens. The engine has
# enough memory to keep the keys and values of finished requests. It keeps them in *blocks* of 16 tokens, and reuses a
# block as a whole or not at all.
# <!-- printed: chat -->
#
# **What percentage of the 2,640 prompt tokens does it not have to compute?**
# <!-- printed: chat -->

# %% name="predict"
widgets.predict("06-chat", "What percentage of a chat's prompt tokens is in the cache already?", "%")

# %% [markdown] name="idea"
# ## 2. The idea
#
# Picture a forest after heavy snow. The first hiker from the hut to the lake breaks the trail step by step. The second
# one, on the way to the ridge, has the same first half: this hiker follows the trail to the fork, and breaks new snow
# from there. All who start at the hut share the first stretch, however many there are.
#
# - **Only from the start.** A trail helps only if you follow it from the hut. Two hikers may cross the same clearing;
#   if they reached it by different ways, they do not share a trail. Keys and values are like that: after the first
#   layer they depend on *all* tokens before them, not only on their own token. So only a **prefix** can be shared.
# - **Marked posts.** Every few steps there is a post with a number. The number is computed from the number on the
#   previous post and the stretch between them. So one look at a post tells whether the *whole* way to it is yours. That
#   is a **chain of hashes**. Or you keep a map of all forks, and follow your way on it: a **radix tree**.
# - **Snow falls.** Memory is limited, and trails that were not used for long disappear, from their far ends. A gap in
#   the middle would cut off everything beyond it. And trails in use are not snowed in.

# %% name="idea-figure" jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

STRETCHES = (
    (0, 0, ("You are", "a helpful", "assistant"), BLUE, ""),
    (3, 0, ("Example 1", "Example 2"), SKY, ""),
    (5, 0, ("Sort this",), ORANGE, "//"),
    (5, 1, ("Sum these", "numbers"), ORANGE, "//"),
    (3, 2, ("Hello!", "Hi, how …", "Tell me …"), GREEN, ".."),
)
lengths = [sum(len(STRETCHES[i][2]) for i in way) for way in ((0, 1, 2), (0, 1, 3), (0, 4))]
fig = figure(7.6, 2.4)
ax = fig.subplots()
for x, y, words, colour, hatch in STRETCHES:
    for i, word in enumerate(words):
        ax.add_patch(Rectangle((x + i + 0.03, -y), 0.94, 0.55, facecolor=colour, hatch=hatch, edgecolor="white"))
        ax.text(x + i + 0.5, -y + 0.275, word, ha="center", va="center", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85})  # fmt: skip
for x, top, bottom in ((5, 0.27, -0.73), (3, 0.27, -1.73)):
    ax.plot([x, x, x + 0.03], [top, bottom, bottom], color=INK, linewidth=1.2)
different = sum(len(words) for _, _, words, _, _ in STRETCHES)
ax.text(0, -1.6, f"three requests of {', '.join(map(str, lengths))} blocks:\n"
        f"{sum(lengths)} together, {different} of them different", fontsize=9)  # fmt: skip
ax.set_xlim(-0.1, 7.1)
ax.set_ylim(-2.1, 0.75)
ax.axis("off")
show(
    fig,
    "A tree of blocks that grows to the right. All three requests begin with the same three blocks of a system prompt. "
    "Two of them go on with the same two examples and then part; the third is a chat that leaves after the system prompt.",
)

# %% [markdown] name="chat-text"
# ### The answer, measured
#
# The engine has all of this built in, and the trace of a run says what was found: each admission records it. Section 4
# shows how it works; here is the chat of the question, turn by turn. The *hit ratio* is found tokens over prompt tokens.
# A request that is preempted (sent back to wait, because memory ran out) is admitted again and may find its own blocks,
# so only its first admission counts.


# %% name="hits"
def hits(trace):
    """(tokens found, prompt tokens) over all requests of a trace; the difference was computed."""
    first = {}
    for step in trace.steps():
        for request_id, found in step.admitted:
            first.setdefault(request_id, found)
    return sum(first.values()), sum(e.num_prompt_tokens for e in trace.events if isinstance(e, RequestArrived))


def chat(engine, turns=8, system=100, message=20, answer=40):
    history = text[:system]
    for turn in range(turns):
        history = history + text[500 + turn * message : 500 + (turn + 1) * message]
        history = history + serve(engine, history, max_tokens=answer).output_tokens


# %% name="chat"
engine = new_engine("radix")
chat(engine)
found, prompted = hits(engine.trace)
print(f"{found} of {prompted} prompt tokens found: hit ratio {found / prompted:.1%}, {found} tokens of prefill saved")
requests_hit = sum(n > 0 for step in engine.trace.steps() for _, n in step.admitted)
print(f"{requests_hit} of 8 requests found something; that ratio says nothing about how much")
assert prompted == prefix_cache.conversation_tokens(100, 20, 40, 8)
floor = prefix_cache.conversation_floor(100, 20, 40, 8)
print(f"cut at every token, {floor} would have to be computed: {1 - floor / prompted:.1%}")
assert 0 <= prompted - floor - found < 16 * 8
widgets.reveal("06-chat", 100 * found / prompted)

# %% [markdown] name="chat-answer-reading"
# No user wrote anything twice, and yet most of what was sent was found: each turn repeats the whole history, answers
# included. The gap to the ideal is less than one block per turn.

# %% [markdown] name="position-text"
# Does the same token really have different keys and values after another prefix? Take two prefixes of equal length,
# append the same 16 tokens, and compare what the course model caches for those 16, layer by layer.


# %% name="position"
def cached_after(tokens, last=16):
    """Keys and values of the last tokens of a prompt, [layers, 2, last, kv_heads, head_dim], from the engine's cache."""
    engine = new_engine("off", num_blocks=8)
    engine.add(tokens, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), request_id="r")
    engine.step()  # one of two outputs is computed, so the request still holds its blocks
    slots = reference.context_slots(torch.tensor(engine.requests["r"].block_table), len(tokens), 16)
    return engine.kv_cache.data.flatten(2, 3)[:, :, slots[-last:]].clone()


same = text[200:216]
one, other = cached_after(text[:32] + same), cached_after(text[64:96] + same)
gaps = (one - other).abs().amax(dim=(1, 2, 3, 4))
for layer, gap in enumerate(gaps):
    print(f"layer {layer}: largest difference {gap:.3g}")
assert gaps[0] < 1e-4 < gaps[1:].min()

# %% [markdown] name="position-reading"
# In layer 0 a key depends only on its token and position. From layer 1 on it includes what attention has mixed in from
# the whole text before it. So a cached block is valid only after exactly the same tokens.

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# There are two ways to find a prefix again. Neither touches a tensor: an index only records **which block holds which
# tokens**.
#
# The **hash chain** has one entry per full block. Its key is a hash of the parent's hash and of the block's tokens. The
# table is flat; the chain makes it a tree.

# %% name="scratch-chain"
BLOCK = 4


def link(parent, tokens, extra=""):  # extra: anything else the keys and values depend on
    return hashlib.sha256(parent + repr((tuple(tokens), extra)).encode()).digest()


def match_chain(table, tokens, extra=""):
    blocks, parent = [], b""
    for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = link(parent, tokens[i : i + BLOCK], extra)
        if parent not in table:
            break
        blocks.append(table[parent])
    return blocks


def insert_chain(table, tokens, blocks, extra=""):
    parent = b""
    for i, block in enumerate(blocks):
        parent = link(parent, tokens[i * BLOCK : (i + 1) * BLOCK], extra)
        table.setdefault(parent, block)


# %% [markdown] name="scratch-chain-run-text"
# Two texts whose first block is the same and whose second is not, and then two questions: what is found of a prompt that
# shares the first block, and of one that has a known block behind another beginning?

# %% name="scratch-chain-run"
table = {}
insert_chain(table, [1, 2, 3, 4, 5, 6, 7, 8], blocks=[10, 11])
insert_chain(table, [1, 2, 3, 4, 5, 6, 9, 9], blocks=[10, 12])
print("entries:", len(table))
print("same first block:         ", match_chain(table, [1, 2, 3, 4, 5, 6, 0, 0]))
print("same tokens, other prefix:", match_chain(table, [0, 0, 0, 0, 5, 6, 7, 8]))

# %% [markdown] name="scratch-tree-text"
# The **radix tree** has one node per stretch without a fork. A node holds a segment of tokens and the *slots*
# (positions in the cache) of their keys and values. When a new text diverges in the middle of a segment, the node is
# **split** there. A split computes and copies nothing; the tree only records the fork.


# %% name="scratch-tree"
def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))  # noqa: B905


def insert_tree(children, tokens, slots):  # children: {first token: [segment, slots, children]}
    if not tokens:
        return
    if tokens[0] not in children:
        children[tokens[0]] = [tokens, slots, {}]
        return
    node = children[tokens[0]]
    n = common(node[0], tokens)
    if n < len(node[0]):  # the text diverges, or ends, inside the segment: split
        below = [node[0][n:], node[1][n:], node[2]]
        node[:] = [node[0][:n], node[1][:n], {below[0][0]: below}]
    insert_tree(node[2], tokens[n:], slots[n:])


# %% [markdown] name="scratch-tree-match-text"
# A match follows the segments as far as they agree, and collects their slots. It stops inside a segment where the text
# leaves it.


# %% name="scratch-tree-match"
def match_tree(children, tokens):
    if not tokens or tokens[0] not in children:
        return []
    segment, slots, below = children[tokens[0]]
    n = common(segment, tokens)
    return slots[:n] + (match_tree(below, tokens[n:]) if n == len(segment) else [])


def show_tree(children, indent=0):
    for segment, _, below in children.values():
        print(" " * indent + "-".join(map(str, segment)))
        show_tree(below, indent + 4)


root = {}
for start, tokens in ((0, [1, 2, 3, 4, 5, 6, 7, 8]), (20, [1, 2, 3, 4, 5, 6, 9, 9])):
    insert_tree(root, tokens, list(range(start, start + len(tokens))))
    print(f"after {tokens}:")
    show_tree(root, 2)
found = match_tree(root, [1, 2, 3, 4, 5, 6, 9, 0])
print("1 2 3 4 5 6 9 0: the tree finds the slots", found)
print("the chain, over the same two texts, finds", len(match_chain(table, [1, 2, 3, 4, 5, 6, 9, 0])) * BLOCK, "tokens")

# %% [markdown] name="scratch-reading"
# The tree finds seven tokens, in slots of two different requests: six of the first, one of the second. The chain finds
# four, because it has only whole blocks. The tree here is cut at any token (a *page size* of 1); the engine's tree is
# cut at whole blocks, like its chain. Then both find the same.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# Request `a` has a prompt of 40 tokens. It runs, and while it decodes, `b` arrives. The first 32 tokens of both are the
# same: two full blocks of 16. Watch the *block tables* (a request's block table lists the numbers of its blocks, in
# order), and how many *references* each of the first six blocks has, that is, how many holders.

# %% name="share-start"
engine = new_engine("radix", num_blocks=12)
shared, own_a, own_b = text[:32], text[100:108], text[300:308]
six = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
life = []


def look(what):
    tables = {r.id: list(r.block_table) for r in engine.requests.values()}
    refs = {b: engine.block_pool.ref_count(b) for b in range(6)}
    life.append((what, tables, refs))
    print(f"{what}: tables {tables}, references {list(refs.values())}")


# %% [markdown] name="share-run-text"
# Four looks: when `a` has read its prompt, when `b` has read its own, when `a` is finished, and when `b` is.

# %% name="share"
engine.add(shared + own_a, six, request_id="a")
engine.step()
look("a has read its prompt")
engine.add(shared + own_b, six, request_id="b")
engine.step()
look("b has read 8 of 40 tokens")
while "a" in engine.requests:
    engine.step()
look("a is finished")
while engine.has_work():
    engine.step()
look("b is finished")
admitted = [pair for step in engine.trace.steps() for pair in step.admitted]
print("admitted, with tokens found:", admitted)
assert admitted == [("a", 0), ("b", 32)]
assert life[1][1]["a"][:2] == life[1][1]["b"][:2]
assert not any(step.transfers.copies for step in engine.trace.steps())
print(f"free blocks: {engine.block_pool.num_free} of 12; that can be had: {engine.kv.num_available}")

# %% name="share-figure" jupyter={"source_hidden": true}
_, tables, refs = life[1]
fig = figure(7.4, 2.6)
ax = fig.subplots()
for (name, table), y, colour, style in zip(tables.items(), (1.6, -1.6), (BLUE, ORANGE), ("-", "--"), strict=True):
    ax.text(-0.2, y + 0.25, f"block table of {name}", ha="right", va="center", fontsize=9)
    for i, block in enumerate(table):
        ax.add_patch(Rectangle((i * 0.9, y), 0.85, 0.5, facecolor="white", edgecolor=colour, linestyle=style))
        ax.text(i * 0.9 + 0.42, y + 0.25, str(block), ha="center", va="center", fontsize=9)
        end, start = (0.5, y) if y > 0 else (-0.35, y + 0.5)
        ax.annotate("", xy=(block * 1.2 + 0.55, end), xytext=(i * 0.9 + 0.42, start),
                    arrowprops={"arrowstyle": "->", "color": colour, "linestyle": style})  # fmt: skip
for block in range(6):
    users = sum(block in table for table in tables.values())
    looks = {2: {"facecolor": SKY, "hatch": "//"}, 1: {"facecolor": SKY}, 0: {"facecolor": "white"}}[users]
    ax.add_patch(Rectangle((block * 1.2, 0), 1.1, 0.5, edgecolor=INK, **looks))
    ax.text(block * 1.2 + 0.55, 0.25, f"block {block}", ha="center", va="center", fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8})  # fmt: skip
    label = f"{refs[block]} reference{'s' * (refs[block] != 1)}"
    ax.text(block * 1.2 + 0.55, -0.18, label, ha="center", va="center", fontsize=8)
ax.text(-0.2, 0.25, "memory", ha="right", va="center", fontsize=9)
ax.set_xlim(-2.2, 7.3)
ax.set_ylim(-1.7, 2.2)
ax.axis("off")
show(
    fig,
    "A block table above and one below a row of six physical blocks. The first two entries of both point to the same two "
    "blocks, which have three references each: two requests and the index. Each request has a third block of its own.",
)

# %% [markdown] name="share-reading"
# - Two tables, **one physical copy** of blocks 0 and 1. `b` computed 8 tokens instead of 40.
# - Here a block has one reference for each request that holds it, and one from the index as soon as it is full and
#   computed. The third blocks hold 8 prompt tokens and a few output tokens, are not full, and are not indexed.
# - When `a` ends, nothing is erased: its references are dropped, those of the index remain. A block that only the index
#   references counts as available, and the next request can still hit it. A half-filled block is freed at once.
# - Nothing was copied. `b` writes after the shared blocks, into a block of its own (more in section 7).
#
# Three rules, in the engine's own code:

# %% name="engine-source"
print(inspect.getsource(KVManager._match))
print(inspect.getsource(KVManager.commit))
print(inspect.getsource(HashIndex.digests))

# %% [markdown] name="last-token-text"
# The first: even a fully cached prompt computes its last token, because its logits are needed. The second: if two
# requests computed the same block, one of the two copies is kept, and the other is freed at once. The third is the
# chain of section 3. A prompt of 48 tokens, three full blocks, is served twice. How many cached tokens are found the
# second time? Guess, then run the cell.

# %% name="last-token"
for n in (47, 48, 49):
    fresh = new_engine("hash", num_blocks=16)
    serve(fresh, text[:n])
    found = serve(fresh, text[:n]).num_cached_tokens
    print(f"the same {n} tokens again: {found} found, {n - found} computed")
    assert found == prefix_cache.cached_tokens(n, n, 16)

# %% [markdown] name="identical-text"
# With whole blocks, "at least the last token" can mean a whole block.
#
# Nothing has to be declared. System prompts, few-shot examples, a long document with many questions, the history of a
# chat: any repeated prefix is found. Six prompts of that kind, served one after the other by three engines. The outputs
# have to be equal up to rounding: after a hit fewer tokens go through a step together, which can change last bits, and
# flip a near tie. In 32 bits, with these prompts, none flips.

# %% name="identical"
SYSTEM = "# You complete Python code. Answer with code only, no prose.\n"
SHOTS = "def double(x):\n    return 2 * x\n\ndef square(x):\n    return x * x\n\n"
FILE = inspect.getsource(BlockPool)[:700]
asked = [SYSTEM + SHOTS + "def cube(x):\n", SYSTEM + SHOTS + "def half(x):\n", SYSTEM + FILE + "\n# Q: what is freed?\n",
         SYSTEM + FILE + "\n# Q: who counts?\n", SYSTEM + "import os\n", SYSTEM + SHOTS + "def cube(x):\n"]  # fmt: skip
outputs, computed, rows = {}, {}, []
for kind in ("off", "hash", "radix"):
    engine = new_engine(kind)
    served = [serve(engine, llm.encode(prompt), max_tokens=8) for prompt in asked]
    outputs[kind] = [r.output_tokens for r in served]
    computed[kind] = num_computed(engine.trace)
    rows.append([kind, computed[kind], *(r.num_cached_tokens for r in served)])
assert outputs["off"] == outputs["hash"] == outputs["radix"]
assert computed["hash"] == computed["radix"] < computed["off"]
print("the same outputs in all three; tokens computed in all, and found by each request:")
widgets.table(rows, ["prefix_cache", "computed", *(f"request {i}" for i in range(1, 7))])

# %% [markdown] name="collision-text"
# ### How sure is a match? *(more)*
#
# The two indexes of the engine differ in one respect that no picture shows. `RadixIndex` compares *tokens*: a match is a
# match. `HashIndex` compares *digests* and never sees the tokens again. Two prefixes with the same digest are one prefix
# to it, and the second prompt gets the keys and values of the first. The engine does not notice.
#
# The engine's digest is SHA-256, with 256 bits. To see a collision, cut it to 16 bits, and look for another block of 16
# tokens with the digest of a known one. That takes 65,536 tries on average.
# <!-- tested: tests/claims/test_ch06_prefix.py::test_a_hash_of_64_bits_suffices_against_chance_and_not_against_search -->


# %% name="collision-index"
class ShortDigests(HashIndex):  # wrong on purpose: two bytes of each digest
    def digests(self, tokens, key):
        return (digest[:2] for digest in super().digests(tokens, key))


index, known, tries, drawn = ShortDigests(16), text[:16], 0, random.Random(1)
index.insert(known, b"", [0])
other = []
while not index.match(other, b""):
    other, tries = [drawn.randrange(10, 4000) for _ in range(16)], tries + 1
print(f"after {tries:,} tries, these 16 tokens have the digest of the known ones:", other[:4], "...")

# %% [markdown] name="collision-run-text"
# Now the engine serves the known block and ten more tokens, and then the *other* block and the same ten tokens.

# %% name="collision"
rows, ends = [], {}
for kind, index in (
    ("no cache", None),
    ("radix", RadixIndex(16)),
    ("hash", HashIndex(16)),
    ("16 bits", ShortDigests(16)),
):
    parts = Parts(prefix_index=index)
    engine = Engine(model, EngineConfig(num_blocks=32, prefix_cache="off" if index is None else "auto"), parts)
    first, second = (serve(engine, prompt + text[40:50], max_tokens=8) for prompt in (known, other))
    ends[kind] = [llm.tokenizer.decode(request.output_tokens) for request in (first, second)]
    rows.append([kind, second.num_cached_tokens, *map(repr, ends[kind])])
assert ends["radix"] == ends["hash"] == ends["no cache"]
assert rows[-1][1] == 16, "the other prompt found a block that it does not share"
widgets.table(rows, ["index", "found by the second", "answer to the first", "answer to the second"])

# %% [markdown] name="birthday-text"
# With 16 bits the second prompt finds a block that is not its own, and is answered as if it had been the first: another
# customer's text, in the worst case. How many bits are enough? Two numbers, for different dangers:
#
# - **By chance.** Each lookup of a block that is not there hits a wrong one with probability (blocks in the index) /
#   2^bits.
# - **By intent.** Somebody who knows the hash function searches at home. Among `n` blocks there are about `n²/2` pairs,
#   so a collision is likely from about 2^(bits/2) on: the *birthday bound*.

# %% name="birthday"
held = Deployment(model_shapes.model("llama-3-70b"), device("H100"), num_devices=4).cache_tokens() // 16
lookups = 10_000 * 365 * 86_400  # 10,000 blocks per second that are not there, for a year
rows = []
for bits in (16, 32, 64, 128, 256):
    even = prefix_cache.items_for_even_odds(bits)
    wrong = prefix_cache.wrong_hits(lookups, held, bits)
    rows.append([bits, f"{wrong:.2g}", f"{even:.2g}", f"{even / 1e9:.2g}"])
print(f"an index of {held:,} blocks (a 70B model on four H100), and a year at 10,000 lookups per second")
heads = [
    "bits",
    "wrong hits in the year",
    "blocks with a collision at even odds",
    "seconds to try them, 10⁹ per second",
]
widgets.table(rows, heads)

# %% [markdown] name="birthday-reading"
# By chance 64 bits suffice for one server, and 128 for all of them. By intent, 64 bits are a matter of seconds, and 128
# bits hold only if there is no shortcut: a hash that was built for speed has been designed against chance, not against
# somebody who studies it. A *cryptographic* hash is designed against that, and is worth something as long as nobody has
# found a shortcut in spite of trying: MD5 and SHA-1 were designed so, have known shortcuts, and are no longer to be used.
#
# vLLM has been through this. It used Python's built-in `hash`, which has 64 bits and is salted for strings and bytes only. Tuples
# of token ids have the same hash in every process:

# %% name="builtin-hash"
code = "print(hash((7, (1, 2, 3))), hash('salted'))"
for seed in ("1", "2"):
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
    )
    print(f"process {seed}: tuple of integers, string:", ran.stdout.strip())

# %% [markdown] name="builtin-hash-reading"
# As of November 2026: from Python 3.12 on `hash(None)`, with which vLLM's chain began, is a constant too, so anybody
# could have computed collisions for anybody's server (CVE-2025-25183, January 2025; first mended by a random beginning).
# SHA-256 has been an option since 0.8.3 and the default since 0.10.2 (`prefix_caching_hash_algo`). `xxhash`, 128 bits
# and not cryptographic, can be chosen for speed; its documentation warns of leaks between tenants. The price of SHA-256
# is small: vLLM's documentation says 100 to 200 ns per token, a few milliseconds for a prompt of 50,000 tokens, which
# take seconds to compute.

# %% [markdown] name="windows-text"
# ### Layers with a window *(more)*
#
# Some models (Mistral, Gemma, gpt-oss) have layers in which a token sees only the last tokens, its *window*. Such a layer
# never reads older keys and values again, so the engine frees their blocks while the request runs. Here is the course
# model with a window of 32 tokens in its first four layers. (Its weights were not trained for that. The blocks do not
# care.) The layers with a window have a block table of their own.

# %% name="windows"
windowed = copy.copy(model)
windowed.config = replace(model.config, layer_windows=(32,) * 4 + (None,) * 4)
engine = Engine(windowed, EngineConfig(num_blocks=64))  # prefix_cache="auto"
request = engine.add(text[:112], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), request_id="r")
for _ in range(3):
    engine.step()
for window, table in zip(engine.kv.windows, request.block_tables, strict=True):
    print("window of 32:" if window else "all tokens:  ", table)
print("its prefix index:", engine.kv.index)
try:
    Engine(windowed, EngineConfig(num_blocks=64, prefix_cache="hash"))
except ValueError as error:
    print("with prefix_cache='hash':", error)

# %% [markdown] name="windows-reading"
# -1 is a place without a block: given up. A later prompt with the same first 64 tokens needs, in every layer, what its
# own first tokens see. The layers that see everything still have it. The layers with a window have lost the last 32
# tokens of that prefix, and one layer that misses is enough. So in this engine prefix caching is off for such models,
# and asking for it is an error.
#
# It need not be. vLLM's hybrid KV cache manager (2025) does not forget a freed block until its memory is reused, and has
# a rule for each kind of layer: where everything is seen, *all* blocks of the prefix must be cached; where there is a
# window, only those that hold the last `window − 1` tokens of it. The prefix that counts is the longest that satisfies
# both.


# %% name="windows-rule"
def usable(full, windowed, window, block_size):
    """Longest prefix in tokens; full, windowed: which blocks, by index in the text, are still cached in each group."""
    blocks = 0
    while blocks in full:
        blocks += 1
    while blocks:  # from right to left: the layers with a window decide how much of it counts
        first = max(0, blocks * block_size - window + 1) // block_size
        if set(range(first, blocks)) <= windowed:
            return blocks * block_size
        blocks -= 1
    return 0


for what, windowed_blocks in (("only the end of the earlier text", {5, 6}), ("freed, and not yet reused", set(range(7))),
                              ("block 3 reused", {0, 1, 2, 4, 5, 6}), ("blocks 3 and 6 reused", {0, 1, 2, 4, 5})):  # fmt: skip
    found = [usable(set(range(n // 16)), windowed_blocks, 32, 16) for n in (64, 96, 112)]
    print(f"{what}: of prompts that share 64, 96 and 112 tokens, usable {found}")
assert usable(set(range(7)), {5, 6}, 32, 16) == 112
assert usable(set(range(4)), {5, 6}, 32, 16) == 0

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# ### The effect on the time to first token
#
# The chat of section 2 saved most of its prefill. What is that worth in seconds?
#
# One prompt length, and more and more of it cached. The line is the number of remaining operations, computed by
# `reference_impl.theory`, scaled to the time of the first point. The points are measured.

# %% name="ttft"
n = 2032 if on_gpu else 1024  # full blocks; the course model has 2,048 positions
engine = new_engine("radix", num_blocks=1024)
shares = [*(16 * round(part * n / 16) for part in (0, 0.25, 0.5, 0.75, 0.875)), n - 64, n - 16]
measured, base = [], random_tokens(n)
serve(engine, random_tokens(64))  # warm-up
serve(engine, base)
for cached in shares:
    times = []
    for _ in range(2):
        request = serve(engine, base[:cached] + random_tokens(n - cached))
        assert request.num_cached_tokens == prefix_cache.cached_tokens(cached, n, 16) == cached
        times.append(engine.trace.metrics(request.id).ttft)
    measured.append(min(times))
flops = [latency.engine_pass_flops(shape, n - cached, cached) for cached in shares]
rows = [
    [cached, format_seconds(seconds), f"{flops[0] / left:.1f}x", f"{measured[0] / seconds:.1f}x"]
    for cached, seconds, left in zip(shares, measured, flops, strict=True)
]
widgets.table(rows, [f"of {n:,} cached", "TTFT on this machine", "fewer operations", "faster"])

# %% name="ttft-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 3.0)
ax = fig.subplots()
ax.plot(
    shares,
    1e3 * measured[0] * np.array(flops) / flops[0],
    color=BLUE,
    label="operations left, scaled to the first point",
)
ax.plot(shares, 1e3 * np.array(measured), "o", color=ORANGE, label="measured on this machine")
ax.set_ylim(bottom=0)
tidy(ax, f"tokens of {n:,} found in the cache", "time to first token, ms")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Time to first token over the number of cached tokens: measured "
    f"{', '.join(f'{1e3 * seconds:,.0f}' for seconds in measured)} ms, and by the operations that are left "
    f"{', '.join(f'{1e3 * measured[0] * left / flops[0]:,.0f}' for left in flops)} ms.",
)

# %% [markdown] name="ttft-reading"
# On a machine that does nothing else the time falls with the operations, until few are left: compare the last rows of
# the table. A pass over 16 tokens still runs every layer: it reads all weights, launches every operation, and runs
# through Python. That cost does not shrink with the prompt. (Where other programs run, a point may even lie above one
# to its left; the operations do not vary.) The decode steps of such a request gain nothing: with the same context,
# tokens come as fast as before.
#
# ### A long system prompt on a real machine
#
# A formula for a larger model: Llama-3-8B in bf16 on one H100 SXM, 100 user tokens after the system prompt, no queue.
# (Its successor 3.1 has the same shape and a context of 128k tokens; 3 itself stops at 8k.) The time is that of the
# operations at 50 % of the dense peak, or of reading weights and cache, whichever is longer (of the input
# embedding one row per token). So in this formula a hit cannot be faster than reading all weights once.

# %% name="system-prompt"
llama, h100 = model_shapes.model("llama-3-8b"), device("H100")
floor_ms = 1e3 * prefix_cache.prefill_seconds(llama, 2, 1, h100)
rows = []
for system in (500, 2000, 8000, 32_000):
    miss, hit = (prefix_cache.prefill_seconds(llama, system + 100, c, h100, mfu=0.5)
                 for c in (0, prefix_cache.cached_tokens(system, system + 100)))  # fmt: skip
    rows.append(
        [system, f"{1e3 * miss:,.1f} ms", f"{1e3 * hit:.1f} ms", f"{miss / hit:.1f}x", f"{1e3 * (miss - hit):,.1f} ms"]
    )
print(f"reading the weights takes {floor_ms:.1f} ms")
blocks = prefix_cache.cached_tokens(2000, 2100) // 16
print(
    f"50 requests over the same 2,000 tokens: {blocks} blocks for them together, {50 * blocks:,} if each kept its own"
)
widgets.table(rows, ["system prompt, tokens", "computed", "cached", "ratio", "saved"])

# %% name="system-prompt-figure" jupyter={"source_hidden": true}
lengths = 16 * np.unique(np.logspace(0.8, 3.7, 60).astype(int))
fig = figure(7.2, 3.0)
ax = fig.subplots()
miss = 1e3 * prefix_cache.prefill_seconds(llama, lengths + 100, 0, h100, mfu=0.5)
hit = 1e3 * prefix_cache.prefill_seconds(
    llama, lengths + 100, prefix_cache.cached_tokens(lengths, lengths + 100), h100, mfu=0.5
)
ax.loglog(lengths, miss, color=ORANGE, label="system prompt computed")
ax.loglog(lengths, hit, color=BLUE, linestyle="--", label="system prompt cached")
ax.axhline(floor_ms, color=GREY, linewidth=1, label="reading the weights")
ax.fill_between(lengths, hit, miss, color=GREEN, alpha=0.15, label="saved")
tidy(ax, "tokens of the system prompt", "prefill, ms (formula)")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Prefill time of Llama-3-8B on an H100 over the length of the system prompt, both axes logarithmic. Computed, it grows "
    "with the length. Cached, it stays near the time of reading the weights and rises only for very long system prompts.",
)

# %% [markdown] name="system-prompt-reading"
# That is why prefix caching gains so much for chat services: the instructions are long and the same for all users, and
# the user's part is short. The cached curve eventually rises, because the 100 new tokens attend to the whole system
# prompt.
#
# It saves memory as well: the shared blocks are stored **once**. The line above the table counts the blocks of 50 such
# requests.
#
# ### Many short requests *(more)*
#
# Three templates of 160 tokens with examples, 24 short questions. The same requests, one after the other, or all at
# once on a cold engine.


# %% name="many-short-run"
templates = [random_tokens(160) for _ in range(3)]
questions = [templates[i % 3] + random_tokens(8) for i in range(24)]


def many(kind, together, warm=False):
    engine = new_engine(kind, num_blocks=1024)
    for template in templates if warm else ():
        serve(engine, [*template, 9])
    before = num_computed(engine.trace)
    for prompt in questions:
        engine.add(prompt, SamplingParams(max_tokens=1, temperature=0))
        while not together and engine.has_work():
            engine.step()
    while engine.has_work():
        engine.step()
    return num_computed(engine.trace) - before


# %% [markdown] name="many-short-compare"
# Four ways to send them. Which of the last two computes less, and by how much?

# %% name="many-short"
counts = {
    "no prefix cache": many("off", together=True),
    "one after the other": many("radix", together=False),
    "all at once, cold": many("radix", together=True),
    "all at once, templates warmed up": many("radix", together=True, warm=True),
}
assert counts["no prefix cache"] == 24 * 168
assert counts["one after the other"] == 3 * 160 + 24 * 8
assert counts["all at once, templates warmed up"] == 24 * 8
widgets.table(list(counts.items()), ["24 requests", "tokens computed"])

# %% [markdown] name="many-short-reading"
# With `N` requests of `q` own tokens over a prefix of `P` (full blocks), an index turns `N·(P + q)` computed tokens
# into `P + N·q`. But in this engine a block can be found only after it has been computed. Requests that are admitted
# together, before the first of them has finished its prefix, all compute it: here as many as fit into the first step of
# at most 2,048 tokens. One warm-up request per template, or a scheduler that holds the others back, avoids that. (vLLM
# V1 enters a block when it is *allocated* to a step that will fill it, so a second request of the same step finds it
# already: in each layer, keys and values are written before attention reads them. SGLang sorts requests last that would
# share their prefix with another waiting one.)
#
# ### Which request is next? *(more)*
#
# The order of the queue decides what is found, too. 24 requests over four templates wait, the templates by turns, and
# among them is one request that shares nothing with any other. One runs at a time, and the cache has room for less than
# three prompts. In order of arrival, each template is evicted before it is needed again.
#
# SGLang's policy `lpm` (*longest prefix match*) sorts the waiting requests before each step: first the one whose prompt
# finds most in the cache. In this engine a policy ranks a request once, when it arrives (chapter 03). This rank changes
# with the cache, so it takes a scheduler of its own, six lines long.

# %% name="predict-lpm"
widgets.predict("06-lpm", "In order of arrival almost nothing is found. What percentage, longest match first?", "%")


# %% name="longest-match"
class LongestMatchFirst(Scheduler):
    def schedule(self, now):
        for request in list(self.waiting):
            match = self.kv.index.match_length(request.tokens, cache_key(request))
            _, arrived = self.ranks[request.id]
            self.waiting.remove(request.id)
            self.ranks[request.id] = (-match, arrived)
            self.waiting.push(request, self.ranks[request.id])
        return super().schedule(now)


four = [random_tokens(160) for _ in range(4)]
queue = [four[i % 4] + random_tokens(24) for i in range(24)]
queue.insert(5, random_tokens(184))  # the request that shares nothing is the sixth
print(f"{len(queue)} requests wait, {sum(map(len, queue)):,} prompt tokens; each different text once: "
      f"{4 * 160 + 24 * 24 + 184:,}")  # fmt: skip

# %% name="longest-match-run"
rows, ratios_of = [], {}
for num_blocks in (24, 64):
    for order, kind in (("order of arrival", Scheduler), ("longest match first", LongestMatchFirst)):
        kv = KVManager(BlockPool(num_blocks), 16, RadixIndex(16))
        parts = Parts(kv_manager=kv, scheduler=kind(kv, max_num_seqs=1, max_num_batched_tokens=2048))
        engine = Engine(model, EngineConfig(num_blocks=num_blocks), parts)
        for i, prompt in enumerate(queue):
            engine.add(prompt, SamplingParams(max_tokens=1, temperature=0), request_id=f"{i}")
        while engine.has_work():
            engine.step()
        found, prompted = hits(engine.trace)
        served = [request_id for step in engine.trace.steps() for request_id, _ in step.admitted]
        ratios_of[num_blocks, order] = found / prompted
        rows.append([num_blocks, order, f"{found / prompted:.1%}", num_computed(engine.trace), served.index("5") + 1])
assert num_computed(engine.trace) == 4 * 160 + 24 * 24 + 184, "every text once: no order computes less"
display(widgets.table(rows, ["blocks", "order", "found", "tokens computed", "the odd one is served as number"]))
widgets.reveal("06-lpm", 100 * ratios_of[24, "longest match first"])

# %% [markdown] name="longest-match-reading"
# With a small cache the order is everything: longest match first computes every different token once, and no order can
# compute less. (The paper proves it in general: for a batch that is known in advance, and a cache at least as large as
# the longest request, going through the tree of the requests depth first is optimal, and longest match first does that.)
# With a cache for all four templates there is nothing to gain.
#
# The price is in the last column. The request that shares nothing came sixth and is served last. If requests that match
# keep coming, it waits for as long as they do. The match must also be looked up for every waiting request before every
# step.

# %% [markdown] name="longest-match-sglang"
# As of November 2026: in SGLang the order of arrival (`fcfs`) is the default and `--schedule-policy` chooses `lpm`. Above
# 128 waiting requests `lpm` falls back to the order of arrival, because of the cost of the lookups. It has no aging:
# operators report (issue 31954, July 2026) that with a hit ratio of about 96 % the few requests that miss waited 20 to 60
# seconds.

# %% [markdown] name="replica-text"
# ### The hit ratio depends on the workload and on memory
#
# No model is needed to count hits. `Replica` is the engine's own manager with its pool and index, given one request at
# a time. Four workloads, each with caches of growing size.


# %% name="replica-class"
class Replica:
    """A prefix cache without a model: admit, mark as computed, free."""

    def __init__(self, num_blocks, index=HashIndex):
        self.index = index(16)
        self.kv = KVManager(BlockPool(num_blocks), 16, index=self.index)
        self.found = self.prompted = 0

    def serve(self, prompt, answer):
        request = Request("r", list(prompt), len(prompt), SamplingParams(), seed=0, arrival=0.0)
        assert self.kv.admit(request, len(prompt), len(prompt)), "the pool is too small for this prompt"
        self.found += request.num_cached_tokens
        self.prompted += len(prompt)
        request.num_computed_tokens = len(prompt)
        request.tokens += answer
        assert self.kv.reserve(request, len(answer))
        request.num_computed_tokens += len(answer) - 1  # the last sampled token is never fed back
        self.kv.free(request)
        return request.num_cached_tokens


# %% [markdown] name="replica-work-text"
# Three kinds of work: documents that never repeat, one system prompt with short questions, and sessions, whose turns send
# their history again.


# %% name="replica-work"
def documents(requests=60):
    return [(i, random_tokens(1050), random_tokens(100)) for i in range(requests)]


def support(requests=60):  # one fixed system prompt, short questions
    system = random_tokens(1000)
    return [(i, system + random_tokens(100), random_tokens(100)) for i in range(requests)]


def sessions(users, turns, system, message, answer):  # turns of all users in random order
    first = random_tokens(system)
    history = {user: list(first) for user in range(users)}
    order = [user for user in range(users) for _ in range(turns)]
    rng.shuffle(order)
    work = []
    for user in order:
        history[user] = history[user] + random_tokens(message)
        reply = random_tokens(answer)
        work.append((user, history[user], reply))
        history[user] = history[user] + reply
    return work


# %% name="replica"
works = {
    "a new document each time": documents(),
    "one system prompt of 1,000, short questions": support(),
    "chats: 10 users, 8 turns": sessions(10, 8, 400, 60, 120),
    "agents: 4, 20 steps each": sessions(4, 20, 1000, 120, 40),
}
capacities = [320, 512, 768, 1024, 1536, 2048]  # blocks of 16 tokens
curves, rows = {}, []
for name, work in works.items():
    curves[name] = []
    for capacity in capacities:
        replica = Replica(capacity)
        for _, prompt, answer in work:
            replica.serve(prompt, answer)
        curves[name].append(replica.found / replica.prompted)
    rows.append([name, len(work), *(f"{ratio:.1%}" for ratio in curves[name])])
widgets.table(rows, ["hit ratio", "requests", *(f"{capacity:,} blocks" for capacity in capacities)])

# %% name="replica-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 3.1)
ax = fig.subplots()
looks = ((GREY, ":", "x"), (ORANGE, "--", "s"), (BLUE, "-", "o"), (GREEN, "-.", "^"))
for (name, curve), (colour, style, marker) in zip(curves.items(), looks, strict=True):
    ax.plot(np.array(capacities) * 16, 100 * np.array(curve), color=colour, linestyle=style, marker=marker, label=name)
ax.set_ylim(-3, 103)
tidy(ax, "size of the cache, tokens", "prompt tokens found, %")
ax.legend(fontsize=8, frameon=False, loc="center right")
show(
    fig,
    "Hit ratio of four kinds of work over the size of the cache. New documents never hit. A fixed system prompt hits "
    "equally at every size. Chats and agents hit less than it in a small cache and more in a large one.",
)

# %% [markdown] name="replica-reading"
# A fixed system prompt needs little memory to be found by every request. With many requests its ratio approaches
# `system / (system + question)`, the system prompt counted in whole blocks. Chats and agents hit more than that when
# the cache is large enough to keep each session until its next turn, and less when it is not. No workload always has
# the highest ratio: **measure found tokens over prompt tokens**, and state the cache size with it.
#
# ### Where the prefix is: routing *(more)*
#
# With several engines (*replicas*), each has its own index. A request hits only if it is sent to a replica that has its
# prefix cached. The same chats over one to eight replicas, with four routing policies. The router asks each real index
# how far it would match, without counting that as a use. The fourth policy also follows the longest match, unless that
# replica has computed 600 tokens more than the least busy one.


# %% name="routing-run"
def route(work, replicas, how):
    fleet = [Replica(1024, RadixIndex) for _ in range(replicas)]
    load = [0] * replicas  # tokens computed so far
    for i, (user, prompt, answer) in enumerate(work):
        match = [replica.index.match_length(prompt, b"") for replica in fleet]
        least = min(range(replicas), key=load.__getitem__)
        if how == "round robin":
            chosen = i % replicas
        elif how == "by session":
            chosen = user % replicas
        else:
            chosen = max(range(replicas), key=lambda r: (match[r], -load[r]))
            if how == "longest match, load in view" and load[chosen] > load[least] + 600:
                chosen = least
        load[chosen] += len(prompt) - fleet[chosen].serve(prompt, answer) + len(answer)
    return sum(r.found for r in fleet) / sum(r.prompted for r in fleet), max(load) / (sum(load) / replicas)


# %% name="routing"
WAYS = ("round robin", "by session", "longest match", "longest match, load in view")
FLEETS = (1, 2, 4, 8)
traffic = sessions(16, 6, 400, 60, 120)
routed = {how: [route(traffic, replicas, how) for replicas in FLEETS] for how in WAYS}
assert routed["round robin"][2][0] < routed["by session"][2][0]
of_four = {how: results[FLEETS.index(4)] for how, results in routed.items()}
rows = [[how, f"{ratio:.1%}", f"{skew:.2f}x"] for how, (ratio, skew) in of_four.items()]
widgets.table(rows, ["4 replicas", "found", "busiest / mean load"])

# %% name="routing-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.0)
left, right = fig.subplots(1, 2)
for (how, results), (colour, style, marker) in zip(
    routed.items(), ((GREY, ":", "x"), (BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, "-.", "^")), strict=True
):
    for ax, which in ((left, 0), (right, 1)):
        ax.plot(FLEETS, [(100, 1)[which] * result[which] for result in results], color=colour, linestyle=style,
                marker=marker, label=how)  # fmt: skip
for ax in (left, right):
    ax.set_xscale("log", base=2)
    ax.set_xticks(FLEETS, FLEETS)
left.set_ylim(0, 100)
tidy(left, "replicas of 1,024 blocks", "prompt tokens found, %")
tidy(right, "replicas of 1,024 blocks", "load: busiest / mean")
right.legend(fontsize=8, frameon=False)
show(
    fig,
    "Two plots over the number of replicas, for four ways of routing. Left, tokens found: round robin falls with every "
    "replica, the other three much less. Right, load: with the longest match alone the busiest replica has all of it.",
)

# %% [markdown] name="routing-reading"
# With round robin every replica has to compute every session. A session that stays on its replica finds its history. A
# router that follows the longest match alone can do harm: every chat begins with the same system prompt, so all new
# sessions go to the first replica that has it. So routers weigh match against load. (Here one request runs at a time,
# and load is the number of tokens computed. The exercise below has queues; a gateway that speaks HTTP comes with
# chapter 15.)
#
# ### Your turn: a router *(more)*
#
# Four replicas with real scheduling: each is the engine's scheduler, its blocks and its prefix cache, on an H100 whose
# step times come from a formula. The load is `agents` (`datasets/traces`): runs of agents that send everything again
# with every call, behind one of 30 system prompts, 16 calls per second in bursts. With round robin, each replica has to
# compute every run.
# <!-- stands: datasets/traces/agents.yaml -->
#
# **Write `my_router`.** It is called once, with the number of replicas, and returns `choose`, which is called for each
# request in the order of arrival and returns a replica, 0 to 3. A gateway knows only what it has sent where. So keep
# your state in variables of `my_router`. Of a request you see
#
# - `request.pages`: a hash for each 64 tokens of the prompt. They are chained: the same page means the same text *up to
#   there*;
# - `request.session`, the run it belongs to, `request.tenant`, the kind of agent;
# - `request.num_prompt_tokens`, and `request.arrival` in seconds.
#
# The check asks for two things at once: more tokens found, **and** a shorter p99 of the time to first token. Start with
# one replica per session, and see which of the two you get. The trap: a long agent run, or a system prompt that all
# runs share, overloads one replica.


# %% name="router-exercise"
def my_router(replicas):
    # The state of your router goes here, for example: sent = [0] * replicas
    def choose(request):
        return None  # yours: 0 to replicas - 1

    return choose


# %% name="router-served"
def served_by(router, replicas=4, rate=16, requests=500):
    """(share of the prompt tokens found, p99 TTFT in seconds, busiest replica over the mean)."""
    h100_8b = Deployment(llama, h100, mfu=0.5, mbu=0.8)
    calls = workload("agents", seed=1, rate=rate, num_requests=requests)
    results = simulate_replicas(calls, replicas, h100_8b, router=router)
    together, busy = Result.fold(results), [r.busy_seconds for r in results]
    return together.hit_rate, float(np.percentile(together.ttft, 99)), max(busy) / np.mean(busy)


def say(name, numbers):
    print(f"{name}: {numbers[0]:.1%} found, p99 TTFT {numbers[1]:.2f} s, busiest {numbers[2]:.2f}x the mean")


# %% name="router-check"
in_turn = served_by("round_robin")
say("round robin", in_turn)
if my_router(4)(next(workload("agents", seed=1, num_requests=1))) is None:
    print("my_router chooses nobody: not written yet")
else:
    mine = served_by(my_router)
    say("yours", mine)
    if mine[0] < in_turn[0] + 0.2:
        print("not yet: little more is found. Does a run stay where its last call went?")
    elif mine[1] >= in_turn[1]:
        print("not yet: much is found, and the slowest wait longer than in turn. Look at the load of each replica, too")
    else:
        say("the course's router", served_by("prefix"))
        print("that is it. The course's router is reference_impl/simulation/routers.py")

# %% [markdown] name="router-reading"
# A higher hit ratio is not always a lower latency. A router that sends each session to one replica finds most of what
# can be found, and yet its slowest requests can wait longer than with round robin: by chance one replica gets more of
# the long runs, and requests queue behind them. Following the longest match does better, and taking load into account
# better still. A router only knows what it has sent. Replicas evict, and a gateway that needs certainty has to be told
# (chapter 15).
#
# ### SGLang's router *(more)*
#
# Its policy `cache_aware` weighs the two in another way: it switches between them. It keeps a tree of what it sent to each
# replica. While the fleet is balanced, a request goes where the longest part of its prompt is, if that is more than 30 %
# of it, and otherwise to the replica with the smallest tree. When the busiest replica has 64 requests more than the idlest
# *and* one and a half times as many, the request goes to the idlest, whatever it matches.
# <!-- source: documentation of sglang-router, defaults of cache_aware, November 2026 -->
#
# The folded cell has it as a router for the simulation (open it when you have written yours). One difference: a gateway
# counts the requests that run now. The routers of this simulation do not hear of ends, so it counts those sent in the
# last ten seconds.


# %% name="cache-aware-router" jupyter={"source_hidden": true}
def cache_aware(replicas, threshold=0.3, more=64, times=1.5, seconds=10.0):
    sent = [set() for _ in range(replicas)]  # pages
    recent = [deque() for _ in range(replicas)]  # arrivals

    def choose(request):
        for arrivals in recent:
            while arrivals and arrivals[0] < request.arrival - seconds:
                arrivals.popleft()
        load, pages = list(map(len, recent)), request.pages
        match = [sum(1 for _ in takewhile(tree.__contains__, pages)) for tree in sent]
        best = max(range(replicas), key=match.__getitem__)
        if max(load) - min(load) > more and max(load) > times * min(load):
            chosen = load.index(min(load))
        elif match[best] > threshold * len(pages):
            chosen = best
        else:
            chosen = min(range(replicas), key=lambda replica: len(sent[replica]))
        sent[chosen].update(pages)
        recent[chosen].append(request.arrival)
        return chosen

    return choose


# %% name="cache-aware"
routers = {"the course's": "prefix", "cache_aware, 64 requests more": cache_aware,
           "cache_aware, 4 requests more": lambda replicas: cache_aware(replicas, more=4)}  # fmt: skip
results = {"round robin": in_turn, **{name: served_by(router) for name, router in routers.items()}}
rows = [[name, f"{found:.1%}", f"{p99:.2f} s", f"{skew:.2f}x"] for name, (found, p99, skew) in results.items()]
assert results["cache_aware, 64 requests more"][0] > results["round robin"][0] + 0.2
widgets.table(rows, ["router", "found", "p99 TTFT", "busiest / mean"])

# %% [markdown] name="cache-aware-reading"
# A low threshold balances better and finds less, and on this trace its slowest requests wait longer for it. Which
# threshold is right depends on the load. `cache_aware` counts requests; the course's router counts their tokens, and
# passes a replica over *before* it is far ahead. At this rate the two are close: the p99 of 500 requests is decided by
# the five slowest. Try another rate, or another seed, in `served_by`.
#
# ### Two problems, worked
#
# Llama-3-70B in BF16, cache too, on four H100 with 80 GB, tensor parallel over all four: the machine of the worked
# problems of all chapters.

# %% name="worked"
node = replace(WORKED, mfu=0.5)
print(f"room for {node.cache_tokens():,} tokens; a prompt of 1,000 tokens: {1e3 * node.prefill_seconds(1000):.0f} ms")
print(f"the weights alone are {format_bytes(node.weights / 4)} on each GPU")

# %% [markdown] name="worked-system-prompt"
# **1. A long system prompt.** All prompts begin with the same 4,000 tokens and end with 200 of their own. Half of the peak
# arithmetic is reached. (a) How long does a prefill take, without and with a hit? (b) How many requests per second could
# the machine prefill if it did nothing else? (c) How much of the cache do 80 running requests take, and how much would
# they without sharing?
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_06_a_long_system_prompt -->
#
# <details><summary>Answer</summary>
#
# (a) 341 ms and 18.6 ms, 18.3 times less, although 21 times fewer tokens are computed. The 200 tokens attend to the 4,000,
# and their all-reduces have a latency. The floor is near: reading the weights takes 10.4 ms.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_06_a_long_system_prompt -->
#
# (b) 2.9 and 54 per second. That is the real gain. A miss occupies the machine for a third of a second, in which no token
# is decoded, or in which decoding steps carry its chunks.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_06_a_long_system_prompt -->
#
# (c) Without sharing 80 · 4,200 = 336,000 tokens, 75 % of the room; with it 4,000 + 80 · 200 = 20,000, 4 %. The hit saves
# time once, the sharing saves memory all the time.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_06_a_long_system_prompt -->
#
# </details>

# %% [markdown] name="worked-sessions"
# **2. Sessions between two turns.** Chats have a history of 6,000 tokens on average, four turns begin per second, and a
# user's next turn comes 60 s after the answer on average. 30 requests run at any time. No two chats share anything. (a) How
# many tokens of idle history would have to be kept for every turn to find its own? (b) Roughly what share of the turns finds
# it, if users' pauses are exponential? (c) What would an 8-bit cache change?
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_06_sessions_between_two_turns -->
#
# <details><summary>Answer</summary>
#
# (a) Little's law: four per second times 60 s are 240 idle sessions, 1,440,000 tokens. The room beside the running
# requests is 448,280 − 30 · 6,000 = 268,280 tokens: 44 sessions.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_06_sessions_between_two_turns -->
#
# (b) About 19 %, the share of the idle sessions that fits. With exponential pauses no idle session is more likely to come
# back next than another, so no order of eviction does better or worse than keeping any 44 of them. (Sessions are taken
# as whole. An index of blocks cuts paths from their ends, and finds the front parts.)
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_06_sessions_between_two_turns -->
#
# (c) Twice as many tokens fit, and those of the running requests are halved, too: 716,560 tokens for idle sessions, 50 % of
# them. That more than doubles the share. Everything would be found at a quarter of the rate or below, 0.75 turns per second
# with the 16-bit cache; or with a tier below the GPU's memory (chapter 14).
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_06_sessions_between_two_turns -->
#
# </details>

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# Two engines serve the same five requests, one with a radix tree and one with a hash chain, with 18 blocks of **four**
# tokens. A snapshot is taken after each step. Move the step with the slider or the arrow keys, and choose what the
# blocks show. Find:
#
# - the step in which a node is split, without changing any block number;
# - a block with two holders;
# - the same text twice, because the second one comes from another tenant (key 2): a customer with a separate *salt*,
#   see section 7;
# - which block is evicted next when memory is short: always the end of a path that no request holds. The cell prints
#   which blocks were evicted.
#
# Half-filled blocks are not indexed, so they are not drawn. And when a branch is evicted, the two remaining nodes of a
# fork stay separate: they are not merged.

# %% name="explore"
pair = {kind: new_engine(kind, num_blocks=18, block_size=4) for kind in ("radix", "hash")}
READ = "def read(path):\n    with open(path) as file:\n        return "
shots = []
for name, prompts, salt in (
    ("read the file", [READ + "file.read()"], None),
    ("two at once", [READ + "json.load(file)", READ + "file.read().split()"], None),
    ("another tenant", [READ + "file.read()"], "tenant 2"),
    (
        "memory is short",
        ["class Node:\n    def __init__(self, key, value):\n        self.key = key\n        self.value"],
        None,
    ),
):
    for engine in pair.values():
        for prompt in prompts:
            engine.add(
                llm.encode(prompt), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), cache_salt=salt
            )
    while any(engine.has_work() for engine in pair.values()):
        for engine in pair.values():
            engine.step()
        shots.append(snapshot(name, pair["radix"].kv, pair["hash"].kv, llm.tokenizer.decode))
print("evicted at last:", [block for step in pair["radix"].trace.steps() for block in step.transfers.evicted])
widgets.radix_tree(shots, step=7)

# %% [markdown] name="hygiene-text"
# ### Write prompts that hit
#
# The index compares tokens, not meaning. Here are 20 requests with the same instructions and facts, written in five ways.


# %% name="hygiene-ways"
RULES = "# You review Python code. Be brief. Name the line. Do not repeat the code. Say what breaks, and how to repair it.\n"
FACTS = {"repository": "inferlab", "branch": "main", "style": "plain", "python": "3.11"}


def clock(i):
    return f"# It is {9 + i // 4:02d}:{(17 * i) % 60:02d} o'clock.\n"


def shuffled(i):
    return json.dumps(dict(random.Random(i).sample(list(FACTS.items()), 4)))


def sorted_facts(i):
    return json.dumps(FACTS, sort_keys=True)


WRITTEN = {
    "the time first": lambda i: clock(i) + RULES + sorted_facts(i) + "\n",
    "a blank more or less before the rules": lambda i: " " * (i % 3) + RULES + sorted_facts(i) + "\n" + clock(i),
    "facts in any order, then the rules": lambda i: shuffled(i) + "\n" + RULES + clock(i),
    "rules, facts in any order": lambda i: RULES + shuffled(i) + "\n" + clock(i),
    "rules, sorted facts, the time last": lambda i: RULES + sorted_facts(i) + "\n" + clock(i),
}

# %% name="hygiene"
ratios = {}
for how, write in WRITTEN.items():
    replica = Replica(512)
    for i in range(20):
        replica.serve(llm.encode(write(i) + f"def f{i}(x):\n    return x + {i}\n"), [1, 2])
    ratios[how] = replica.found / replica.prompted
assert max(ratios, key=ratios.get) == "rules, sorted facts, the time last"
widgets.table([[how, f"{ratio:.1%}"] for how, ratio in ratios.items()], ["written", "prompt tokens found"])

# %% [markdown] name="hygiene-reading"
# Stable parts first, volatile parts last, one template for all, and nothing in it that varies needlessly: no time, no
# random id, no unordered set, no stray blank. A change loses everything after it. (Three ways to begin are three
# prefixes, each found again once it has been computed: that is why the blank costs less than the time.)

# %% [markdown] name="errata-hash"
# ## 7. What the cheat sheets get wrong
#
# **"Hash the prompt's KV cache to find it again."** (E06.1) To hash keys and values you would have to compute them,
# which is what you want to avoid. The hash is of **token ids**, chained with the hash of all blocks before, and with
# anything else the values depend on. Keys and values are what is *found*.

# %% name="errata-hash-cell"
index, block = HashIndex(16), text[200:216]
index.insert(text[:16] + block, b"", [3, 4])
print("a new prompt, before any of it is computed:", index.match(text[:16] + block + text[500:540], b""))
print("the same 16 tokens behind other ones:      ", index.match(text[64:80] + block, b""))
assert index.match(text[:16] + block, b"") == [3, 4]
assert index.match(text[64:80] + block, b"") == []

# %% [markdown] name="errata-flag"
# **"It needs a flag." "It needs nothing."** (E06.2) Two sheets, two versions of vLLM. In V0 it had to be switched on;
# in the V1 engine (default since 2025) it is on, and `enable_prefix_caching=False` switches it off. State the version.
# This engine's option is `prefix_cache`. With either setting the outputs are the same, and only the work differs. (Up
# to rounding: a prompt that is computed in different chunks may be rounded differently, which can flip a near tie,
# especially in 16 bits.)

# %% name="errata-flag-cell"
print("default:", EngineConfig().prefix_cache)
print(
    "tokens computed in section 4:", computed, "- same outputs:", outputs["off"] == outputs["hash"] == outputs["radix"]
)

# %% [markdown] name="errata-partial"
# **"The last block that matches only in part is recomputed, or copied on write."** (E06.3, E04.2) It depends on the
# structure, so name its granularity. An index of whole blocks finds whole blocks; the rest is computed into a new
# block. A tree cut at every token finds every shared token. On the same prompts they differ by less than a block each.
# And neither copies anything: a request that hits a full block writes *after* it. *Copy-on-write* (a block that others
# read too is copied before it is written) is for requests that are **forked inside a block**: several samples of one
# prompt (`n > 1`), or beams.

# %% name="errata-partial-cell"
rows = []
for own in (0, 5, 10, 15, 20):
    by_block, by_token = HashIndex(16), RadixIndex(1)
    by_block.insert(text[:96], b"", range(6))
    by_token.insert(text[:96], b"", range(96))
    prompt = text[: 60 + own] + [5, 6, 7] * 8
    rows.append((60 + own, 16 * len(by_block.match(prompt, b"")), len(by_token.match(prompt, b""))))
    assert 0 <= rows[-1][2] - rows[-1][1] < 16
    print(f"{rows[-1][0]} tokens in common: {rows[-1][1]} found by block, {rows[-1][2]} by token")
engine = new_engine("hash")
for _ in range(4):
    serve(engine, text[:40] + random_tokens(9))
samples = new_engine("hash")
samples.add(text[:40], SamplingParams(max_tokens=3, n=4, seed=1, ignore_eos=True))
while samples.has_work():
    samples.step()
copies = [sum(len(step.transfers.copies) for step in e.trace.steps()) for e in (engine, samples)]
print(f"blocks copied: {copies[0]} by four requests with a common prefix, {copies[1]} by four samples of one prompt")
assert copies[0] == 0 < copies[1]

# %% [markdown] name="errata-partial-reading"
# A prompt of 40 tokens ends inside its third block. Each of the four samples continues writing there: three make a
# copy, and the last one keeps the original.
#
# **"A fixed system prompt guarantees a hit on every request after the first."** (E06.4) Section 5 has the conditions:
# the same replica (or a prefix-aware router), not evicted since, the same tokens to the last blank, and, in an engine that
# indexes blocks when they are computed, *after* the first one is computed, not during. The same adapter and salt are also required (below). The cold bursts and the
# routing again:

# %% name="errata-guarantee-cell"
print(f"24 requests over 3 templates, at once and cold: {counts['all at once, cold']} tokens computed, "
      f"warmed up {counts['all at once, templates warmed up']}")  # fmt: skip
fixed = support(40)
for replicas in (1, 4, 8):
    print(
        f"one system prompt, round robin over {replicas} replicas: {route(fixed, replicas, 'round robin')[0]:.1%} found"
    )
rare, found, prompted = Replica(320), 0, 0
for i, (_, prompt, answer) in enumerate(fixed):
    if i % 8 == 0:
        found, prompted = found + rare.serve(prompt, answer), prompted + len(prompt)
    else:  # in between, other requests fill the cache
        rare.serve(random_tokens(1050), answer)
print(f"asked rarely, among other work, in a cache of 320 blocks: {found / prompted:.1%} found")

# %% [markdown] name="errata-evict"
# **"LRU with pinning."** (E06.5) Evicting the least recently used and pinning what must stay is not wrong, but pins do
# not protect a system prompt. Two rules do: a block that a request holds is never evicted, and eviction goes **leaf
# first**. A block is used whenever anything after it is used, so a shared root is at least as recent as its most recent
# leaf. What goes wrong without the second rule? Below is an LRU that stamps each block as it walks along the path. The
# front of a path is stamped first, so it is the oldest.


# %% name="errata-evict-lru"
class BlockLRU(HashIndex):  # wrong on purpose: the least recently used block first, leaf or not
    def __init__(self, block_size):
        super().__init__(block_size)
        self.table = OrderedDict()  # digest -> (block, parent's digest)

    def match(self, tokens, key):
        found = []
        for digest in takewhile(self.table.__contains__, self.digests(tokens, key)):
            self.table.move_to_end(digest)
            found.append(self.table[digest][0])
        return found

    def insert(self, tokens, key, blocks):
        digests = list(self.digests(tokens, key))
        for digest, parent, block in zip(digests, [None, *digests], blocks, strict=False):
            self.table.setdefault(digest, (block, parent))
            self.table.move_to_end(digest)
        return [self.table[digest][0] for digest in digests]

    def evict(self, num_blocks, evictable):
        going = [d for d, (block, _) in self.table.items() if evictable(block)][:num_blocks]
        return [self.table.pop(digest)[0] for digest in going]


# %% name="errata-evict-stranded" jupyter={"source_hidden": true}
def stranded(index):
    """Share of a BlockLRU's blocks that can no longer be reached from the root."""
    reached = set()
    for digest, (_, parent) in index.table.items():
        path = [digest]
        while parent is not None and parent in index.table:
            path.append(parent)
            parent = index.table[parent][1]
        if parent is None:
            reached.update(path)
    return 1 - len(reached) / len(index.table)


# %% [markdown] name="errata-evict-run"
# The chats of section 5 over this index and over both of the engine's. A folded function counts what is *stranded*: still
# cached, and behind a gap.

# %% name="errata-evict-cell"
evictions, worst = {}, []
chats = works["chats: 10 users, 8 turns"]
for name, kind in (("leaf first", HashIndex), ("leaf first, radix", RadixIndex), ("block by block", BlockLRU)):
    evictions[name] = []
    for capacity in capacities[:4]:
        replica, shares_behind = Replica(capacity, kind), []
        for _, prompt, answer in chats:
            replica.serve(prompt, answer)
            if kind is BlockLRU:
                shares_behind.append(stranded(replica.index))
        evictions[name].append(replica.found / replica.prompted)
        worst += [max(shares_behind)] if shares_behind else []
assert evictions["leaf first"] == evictions["leaf first, radix"]
assert evictions["leaf first"][1] > evictions["block by block"][1]
rows = [[f"{name}: found", *(f"{ratio:.1%}" for ratio in found)] for name, found in evictions.items()]
rows.append(["block by block: stranded, at most", *(f"{share:.0%}" for share in worst)])
widgets.table(rows, ["eviction", *(f"{capacity:,} blocks" for capacity in capacities[:4])])

# %% [markdown] name="errata-evict-reading"
# Both leaf-first indexes find the same. Stamped block by block, the cache loses a whole session because of one missing
# block, and part of its memory holds unreachable blocks. It finds a few percent less of these chats. If everything fits
# in the cache there is no difference: policies matter when memory is short.
#
# Pins and other orders (priorities, times to live, least *frequently* used) are additions for special workloads.

# %% [markdown] name="errata-adapter"
# **"Whether the prefix cache is separate for each adapter depends on the implementation."** (E06.6) It is not a choice
# but a matter of correctness. An *adapter* (LoRA) adds a low-rank matrix to some weights of a model; here, to one
# layer's projections. Which layers' cached keys and values does it change?


# %% name="errata-adapter-cell"
heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, model.config.head_dim
QUERIES, KEYS_VALUES = slice(0, heads * dim), slice(heads * dim, (heads + 2 * kv_heads) * dim)


@contextmanager
def adapter(layer, outputs):
    """A LoRA of rank 4 on some outputs of one layer's q, k, v projection."""
    generator = torch.Generator().manual_seed(layer)
    down = torch.randn(model.config.hidden_size, 4, generator=generator) / 16
    up = torch.zeros(4, (heads + 2 * kv_heads) * dim)
    up[:, outputs] = torch.randn(4, up[:, outputs].shape[1], generator=generator)
    down, up = down.to(model.device), up.to(model.device)
    hook = model.layers[layer].qkv.register_forward_hook(lambda module, x, y: y + x[0] @ down @ up)
    try:
        yield
    finally:
        hook.remove()


plain, last_layer = cached_after(text[:48], last=48), shape.layers - 1
for what, layer, outputs_of in (("K and V of layer 2", 2, KEYS_VALUES), ("Q of layer 2", 2, QUERIES),
                                (f"Q of layer {last_layer}, the last", last_layer, QUERIES)):  # fmt: skip
    with adapter(layer, outputs_of):
        changed = (cached_after(text[:48], last=48) - plain).abs().amax(dim=(1, 2, 3, 4)) > 1e-4
    print(f"adapter on {what:20s} changes the cache of layers {changed.nonzero().flatten().tolist() or 'none'}")

# %% [markdown] name="errata-adapter-text"
# An adapter on queries only still changes the keys and values of every layer *above* it. Sharing is correct only where
# you can prove that no cached value depends on the adapter (the last line; or tokens before the invocation of an
# *activated* LoRA, whose keys and values are the base model's). So the adapter has to be part of the key. Without it,
# and with it:

# %% name="errata-adapter-run"
prompt = text[:64]


def served_by_adapter(engine, name=None):
    """What the first token is drawn from, and how many of the prompt's tokens were found."""
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=shape.vocab_size)
    with adapter(2, KEYS_VALUES):
        request = engine.add(prompt, sampling)
        request.adapter = name  # None: the same key as the base model's
        while engine.has_work():
            engine.step()
    ranked = dict(request.logprobs[0].top)
    return torch.tensor([ranked[token] for token in sorted(ranked)]), request.num_cached_tokens


alone, _ = served_by_adapter(new_engine("off", num_blocks=32))
rows = []
for name in (None, "poet"):
    engine = new_engine("hash", num_blocks=32)
    serve(engine, prompt, max_tokens=12)  # the base model, first
    logprobs, found = served_by_adapter(engine, name)
    off = (logprobs - alone).abs().max().item()
    rows.append(["yes" if name else "no", found, f"{off:.4f}"])
    assert (off < 1e-3) == (name is not None)
widgets.table(rows, ["adapter in the key", "tokens found", "log-probabilities off by up to"])

# %% [markdown] name="keys-text"
# The same holds for **images**: images of one size are the same row of placeholder tokens, so a hash of the image has
# to be in the key, or two images share one cache. (It is needed from the image's first block on; here all blocks have
# it.) And for **tenants**: a hit is faster than a miss, so a shared cache lets one customer find out whether another
# one sent the same prompt. A *salt* per tenant, a string in the key, keeps them apart, at the price of hits across
# tenants.

# %% name="keys"
picture = [1, 2, 3, 4] + [999] * 8  # a question, then eight placeholders
table = {}
insert_chain(table, picture, [0, 1, 2])
print("another picture, tokens only:      ", match_chain(table, picture))
table = {}
insert_chain(table, picture, [0, 1, 2], extra="picture 7f3a")
print("another picture, its hash in it:   ", match_chain(table, picture, extra="picture c051"))
engine = new_engine("hash", num_blocks=32)
for salt in ("tenant 1", "tenant 1", "tenant 2"):
    print(f"{salt}: found {serve(engine, prompt, cache_salt=salt).num_cached_tokens} of {len(prompt)}")

# %% [markdown] name="production"
# ## 8. In production
#
# As of 2026-11. Names and defaults change; look them up in the version you run.
#
# **vLLM** keeps a table from block hashes to blocks (16 tokens by default on GPUs): the hash of the parent, the block's
# tokens, and extras (adapter, hashes of images, salt). The hash is SHA-256 by default. Only full blocks are cached. References count requests only: a
# block with none is among the free blocks, and can be found until it is reused. A finished request's blocks are freed
# in reverse order, so that the end of a path is reused before its start. On by default in V1.
#
# **SGLang** has the radix tree (RadixAttention), cut at tokens or, with a larger page size, at pages. It evicts leaves that
# no running request holds; `lru` is the default, and others (such as `lfu`) can be chosen. Its scheduler can serve
# waiting requests with the longest match first (`--schedule-policy lpm`), and its router weighs matches against load
# (`cache_aware`); section 5 runs both.
#
# **TensorRT-LLM** reuses blocks by default (`enable_block_reuse`), 32 tokens each by default. It can also reuse a block
# that matches only in part, and then may **copy** it (`enable_partial_reuse`, `copy_on_partial_reuse`). So the sentence
# of E06.3 is right for TensorRT-LLM and wrong for the two above. Priorities can be assigned to ranges of tokens.
#
# **Providers** sell the same thing as *prompt caching*. OpenAI's is automatic for prompts from 1,024 tokens on, found
# in steps of 128, and routes by a hash of the start and an optional `prompt_cache_key`; the price of a read, and
# whether a write costs more than plain input, depend on the model. Anthropic's has to be requested, with one
# `cache_control` for the request or up to four marks inside it: a write costs 1.25 times an input token (2 times for a
# lifetime of an hour instead of five minutes), a read 0.1 times. Google's Gemini has both kinds, and bills stored
# tokens by the hour for the explicit one.
#
# **What to watch.** vLLM counts queried and found tokens (`vllm:prefix_cache_queries`, `vllm:prefix_cache_hits`).
# Providers return the number with each response: `cached_tokens` at OpenAI, `cache_read_input_tokens` at Anthropic.
#
# For the user it is a price list. The figure shows a chat (system prompt of 2,000 tokens, messages of 100, answers of
# 300) under three price lists, in units of one input token: each turn reads the prompt of the turn before, and writes
# the rest.

# %% name="prices"
turns = np.arange(1, 13)
PRICES = {"no caching": (1.0, 1.0), "write 1.25, read 0.1 (5 minutes)": (1.25, 0.1), "write 2, read 0.1 (1 hour)": (2.0, 0.1),
          "write 1, read 0.5 (automatic)": (1.0, 0.5)}  # fmt: skip
prompts = 2000 + 100 * turns + 300 * (turns - 1)
read = np.concatenate([[0], prompts[:-1]])  # what the turn before has written: its whole prompt
bills, rows = {}, []
for name, (write_factor, read_factor) in PRICES.items():
    bills[name] = np.cumsum(prefix_cache.input_price(0, prompts - read, read, write_factor, read_factor))
    paid_back = prefix_cache.reads_to_break_even(write_factor, read_factor) if write_factor > 1 else 0
    rows.append([name, f"{bills[name][-1]:,.0f}", f"{paid_back:.2f}" if paid_back else "-"])
widgets.table(rows, ["price list", "12 turns, in input tokens", "reads that pay for the dearer write"])

# %% name="prices-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 3.0)
ax = fig.subplots()
for (name, bill), (colour, style) in zip(
    bills.items(), ((GREY, "-"), (BLUE, "--"), (PURPLE, "-."), (ORANGE, ":")), strict=True
):
    ax.plot(turns, bill, color=colour, linestyle=style, marker=".", label=name)
tidy(ax, "turns of the chat", "paid, in input tokens")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Cumulative price of the prompts of a chat over its turns. Without caching it grows quadratically. With cached reads at "
    "a tenth it ends at a fraction, although a write costs more; a single turn is dearer where a write costs more.",
)

# %% [markdown] name="prices-reading"
# Prices are for input tokens only, with every read before expiry. Where a write costs 1.25, the first read pays for it;
# where it costs 2, the second does. If the user pauses longer than the cache's lifetime, the next turn pays for the
# whole write again: that turn costs more than without caching. The provider saves prefill, and spends memory on the
# cache; part of the saving is passed on as a discount. And the discount makes customers write prompts that hit.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Then build both indexes yourself: [lab 06](../../labs/06_prefix_caching/prefix_index.ipynb). First the structures:

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("06_prefix_caching").draw(seed=1, tag="structure"))

# %% [markdown] name="quiz-gain-text"
# And the gain:

# %% name="quiz-gain"
widgets.quiz(load_quiz("06_prefix_caching").draw(seed=1, tag="gain"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Only a **prefix** is shared: the same tokens from the start, the same adapter, images and salt. Keys and values
#   depend on everything before them.
# - Hash of a block = hash(hash of the block before, its tokens, extras). Tokens are hashed; keys and values are found.
# - Hash chain: flat table, whole blocks. Radix tree: nodes with segments, split at forks, by block or by token.
# - A tree compares tokens. A chain trusts its digest: wrong hits ≈ lookups · blocks / 2^bits by chance, and a search
#   finds a collision after about 2^(bits/2) tries. So a cryptographic hash where tenants share a cache.
# - A layer with a window needs only the blocks of its last window; an engine that frees the others must keep track, or
#   leave the cache off.
# - Found = `floor(min(shared, prompt − 1) / B) · B`: the last token is always computed. Full blocks are shared, writes
#   go after them, nothing is copied. Copy-on-write is for forks inside a block (`n > 1`, beams).
# - References here: one per request, one from the index. With only the index's left, a block is cached and evictable.
#   Evict **leaf first**, least recently used; never a block that a request holds.
# - A hit saves prefill (TTFT, FLOP), and memory among the requests that share. It does not change a request's decode
#   steps, and even prefill does not fall below one read of the weights.
# - Hit ratio = found tokens / prompt tokens. It depends on workload, memory, arrival, routing and template. Turns of a
#   chat hit because each repeats its history.
# - Stable first, volatile last; one template; nothing that varies needlessly. Route by session or match, and take load
#   into account. In one engine, longest match first finds most in a small cache, and lets those wait that match nothing.
# - Outputs are the same with and without a cache, up to rounding.
