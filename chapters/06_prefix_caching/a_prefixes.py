# %% [markdown] name="title"
# # 06 · Prefix caching and radix trees
#
# About 45 minutes. Parts whose heading says *(more)* are optional, about 30 minutes together; nothing later needs them.
# You need chapter 02 (the KV cache); chapter 04 (blocks and block tables) helps. The lab is [Build a prefix
# index](../../labs/06_prefix_caching/prefix_index.ipynb).

# %% name="setup"
import hashlib
import inspect
import json
import random
from collections import OrderedDict
from contextlib import contextmanager

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, figure, show, tidy
from chapters.widgets.radix_tree import snapshot
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.interfaces import Request
from reference_impl.kernels import reference
from reference_impl.core.block_pool import BlockPool
from reference_impl.annexes.prefix.hash_index import HashIndex
from reference_impl.core.kv_manager import KVManager
from reference_impl.annexes.prefix.radix_index import RadixIndex
from reference_impl.simulation import Result, simulate_replicas
from reference_impl.theory import latency, model_shapes, prefix_cache
from reference_impl.theory.deployment import Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.units import format_seconds
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
# order), and how many *references* each block has, that is, how many holders.

# %% name="share"
engine = new_engine("radix", num_blocks=12)
shared, own_a, own_b = text[:32], text[100:108], text[300:308]
six = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
life = []


def look(what):
    tables = {r.id: list(r.block_table) for r in engine.requests.values()}
    refs = {b: engine.block_pool.ref_count(b) for b in range(6)}
    life.append((what, tables, refs))
    print(f"{what:28s} tables {tables}  references {refs}")


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
# chat: any repeated prefix is found. Six prompts of that kind, served one after the other by three engines.

# %% name="identical"
SYSTEM = "# You complete Python code. Answer with code only, no prose.\n"
SHOTS = "def double(x):\n    return 2 * x\n\ndef square(x):\n    return x * x\n\n"
FILE = inspect.getsource(BlockPool)[:700]
asked = [SYSTEM + SHOTS + "def cube(x):\n", SYSTEM + SHOTS + "def half(x):\n", SYSTEM + FILE + "\n# Q: what is freed?\n",
         SYSTEM + FILE + "\n# Q: who counts?\n", SYSTEM + "import os\n", SYSTEM + SHOTS + "def cube(x):\n"]  # fmt: skip
outputs, computed = {}, {}
for kind in ("off", "hash", "radix"):
    engine = new_engine(kind)
    served = [serve(engine, llm.encode(prompt), max_tokens=8) for prompt in asked]
    outputs[kind] = [r.output_tokens for r in served]
    computed[kind] = sum(row.num_tokens for step in engine.trace.steps() for row in step.rows)
    print(f"{kind:5s}: {computed[kind]:4d} tokens computed; found per request {[r.num_cached_tokens for r in served]}")
assert outputs["off"] == outputs["hash"] == outputs["radix"]
assert computed["hash"] == computed["radix"] < computed["off"]
print("the same outputs in all three")

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# First the chat of the question, turn by turn, in the engine. The *hit ratio* is found tokens over prompt tokens, and
# it comes from the trace: each admission records how many tokens were found. A request that is preempted (sent back to
# wait, because memory ran out) is admitted again and may find its own blocks, so only its first admission counts.


# %% name="chat"
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

# %% [markdown] name="chat-reading"
# No user wrote anything twice, and yet most of what was sent was found: each turn repeats the whole history, answers
# included. The gap to the ideal is less than one block per turn.
#
# ### The effect on the time to first token
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
for cached, seconds, left in zip(shares, measured, flops, strict=True):
    print(f"{cached:5d} of {n} cached: {format_seconds(seconds)}; {flops[0] / left:6.1f}x fewer operations, "
          f"{measured[0] / seconds:5.1f}x faster")  # fmt: skip

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
    "Time to first token over the number of cached tokens. The measured points fall along the line of the operations "
    "that are left, and stay above it at the right end, where a pass has its fixed price.",
)

# %% [markdown] name="ttft-reading"
# The time is proportional to the operations, until few are left: compare the last rows of the table. A pass over 16
# tokens still runs every layer: it reads all weights, launches every operation, and runs through Python. That cost does
# not shrink with the prompt. (Times vary with your machine's other load; the operations do not.) The decode steps of
# such a request gain nothing: with the same context, tokens come as fast as before.
#
# ### A long system prompt on a real machine
#
# A formula for a larger model: Llama-3-8B in bf16 on one H100 SXM, 100 user tokens after the system prompt, no queue.
# (Its successor 3.1 has the same shape and a context of 128k tokens; 3 itself stops at 8k.) The time is that of the
# operations at 50 % of the dense peak, or of reading weights and cache, whichever is longer. So a hit cannot be faster
# than reading all weights once.

# %% name="system-prompt"
llama, h100 = model_shapes.model("llama-3-8b"), device("H100")
floor_ms = 1e3 * prefix_cache.prefill_seconds(llama, 2, 1, h100)
for system in (500, 2000, 8000, 32_000):
    miss, hit = (prefix_cache.prefill_seconds(llama, system + 100, c, h100, mfu=0.5)
                 for c in (0, prefix_cache.cached_tokens(system, system + 100)))  # fmt: skip
    print(f"system prompt {system:6,d}: {1e3 * miss:7.1f} ms without, {1e3 * hit:5.1f} ms with: {miss / hit:5.1f}x, "
          f"saved {1e3 * (miss - hit):7.1f} ms")  # fmt: skip
print(f"reading the weights takes {floor_ms:.1f} ms")
blocks = prefix_cache.cached_tokens(2000, 2100) // 16
print(
    f"50 requests over the same 2,000 tokens: {blocks} blocks for them together, {50 * blocks:,} if each kept its own"
)

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
# It saves memory as well: the shared blocks are stored **once**. The last line counts the blocks of 50 such requests.
#
# ### Many short requests *(more)*
#
# Three templates of 160 tokens with examples, 24 short questions. The same requests, one after the other, or all at
# once on a cold engine.


# %% name="many-short"
templates = [random_tokens(160) for _ in range(3)]
questions = [templates[i % 3] + random_tokens(8) for i in range(24)]


def many(kind, together, warm=False):
    engine = new_engine(kind, num_blocks=1024)
    for template in templates if warm else ():
        serve(engine, [*template, 9])
    before = sum(row.num_tokens for step in engine.trace.steps() for row in step.rows)
    for prompt in questions:
        engine.add(prompt, SamplingParams(max_tokens=1, temperature=0))
        while not together and engine.has_work():
            engine.step()
    while engine.has_work():
        engine.step()
    return sum(row.num_tokens for step in engine.trace.steps() for row in step.rows) - before


counts = {
    "no prefix cache": many("off", together=True),
    "one after the other": many("radix", together=False),
    "all at once, cold": many("radix", together=True),
    "all at once, templates warmed up": many("radix", together=True, warm=True),
}
for what, count in counts.items():
    print(f"{what:33s} {count:5d} tokens computed")
assert counts["no prefix cache"] == 24 * 168
assert counts["one after the other"] == 3 * 160 + 24 * 8
assert counts["all at once, templates warmed up"] == 24 * 8

# %% [markdown] name="many-short-reading"
# With `N` requests of `q` own tokens over a prefix of `P` (full blocks), an index turns `N·(P + q)` computed tokens
# into `P + N·q`. But a block can be found only after it has been computed. Requests that are admitted together, before
# the first of them has finished its prefix, all compute it: here as many as fit into the first step of at most 2,048
# tokens. One warm-up request per template, or a scheduler that holds the others back, avoids that.
#
# ### The hit ratio depends on the workload and on memory
#
# No model is needed to count hits. `Replica` is the engine's own manager with its pool and index, given one request at
# a time. Four workloads, each with caches of growing size.


# %% name="replica"
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


works = {
    "a new document each time": documents(),
    "one system prompt of 1,000, short questions": support(),
    "chats: 10 users, 8 turns": sessions(10, 8, 400, 60, 120),
    "agents: 4, 20 steps each": sessions(4, 20, 1000, 120, 40),
}
capacities = [320, 512, 768, 1024, 1536, 2048]  # blocks of 16 tokens
curves = {}
for name, work in works.items():
    curves[name] = []
    for capacity in capacities:
        replica = Replica(capacity)
        for _, prompt, answer in work:
            replica.serve(prompt, answer)
        curves[name].append(replica.found / replica.prompted)
    print(f"{name:44s} {len(work)} requests, hit ratio " + " ".join(f"{100 * r:5.1f}%" for r in curves[name]))

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


# %% name="routing"
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


WAYS = ("round robin", "by session", "longest match", "longest match, load in view")
FLEETS = (1, 2, 4, 8)
traffic = sessions(16, 6, 400, 60, 120)
routed = {how: [route(traffic, replicas, how) for replicas in FLEETS] for how in WAYS}
for how, results in routed.items():
    for replicas, (ratio, skew) in zip(FLEETS, results, strict=True):
        if replicas == 4:
            print(f"4 replicas, {how:28s} {ratio:5.1%} found; the busiest has {skew:.2f}x the mean load")
assert routed["round robin"][2][0] < routed["by session"][2][0]

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


# %% name="router-check"
def served_by(router, replicas=4, rate=16, requests=500):
    """(share of the prompt tokens found, p99 TTFT in seconds, busiest replica over the mean)."""
    h100_8b = Deployment(llama, h100, mfu=0.5, mbu=0.8)
    calls = workload("agents", seed=1, rate=rate, num_requests=requests)
    results = simulate_replicas(calls, replicas, h100_8b, processes=1, router=router)
    together, busy = Result.fold(results), [r.busy_seconds for r in results]
    return together.hit_rate, float(np.percentile(together.ttft, 99)), max(busy) / np.mean(busy)


def say(name, numbers):
    print(f"{name:28s} {numbers[0]:5.1%} found, p99 TTFT {numbers[1]:5.2f} s, busiest {numbers[2]:.2f}x the mean")


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


# %% name="hygiene"
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
ratios = {}
for how, write in WRITTEN.items():
    replica = Replica(512)
    for i in range(20):
        replica.serve(llm.encode(write(i) + f"def f{i}(x):\n    return x + {i}\n"), [1, 2])
    ratios[how] = replica.found / replica.prompted
    print(f"{how:40s} {ratios[how]:6.1%} of {replica.prompted:,} prompt tokens found")
assert max(ratios, key=ratios.get) == "rules, sorted facts, the time last"

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
# the same replica (or a prefix-aware router), not evicted since, the same tokens to the last blank, and *after* the
# first one is computed, not during. The same adapter and salt are also required (below). The cold bursts and the
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


# %% name="errata-evict-cell"
class BlockLRU(HashIndex):
    """Least recently used block first, leaf or not. Wrong on purpose."""

    def __init__(self, block_size):
        super().__init__(block_size)
        self.table = OrderedDict()  # digest -> (block, parent's digest)

    def __len__(self):
        return len(self.table)

    def match(self, tokens, key):
        found = []
        for digest in self.digests(tokens, key):
            if digest not in self.table:
                break
            self.table.move_to_end(digest)
            found.append(self.table[digest][0])
        return found

    def insert(self, tokens, key, blocks):
        parent = None
        for digest, block in zip(self.digests(tokens, key), blocks, strict=True):
            self.table.setdefault(digest, (block, parent))
            self.table.move_to_end(digest)
            parent = digest
        return [self.table[digest][0] for digest in self.digests(tokens, key)]

    def evict(self, num_blocks, evictable):
        going = [d for d, (block, _) in self.table.items() if evictable(block)][:num_blocks]
        return [self.table.pop(digest)[0] for digest in going]

    def stranded(self):
        """Blocks that can no longer be reached from the root."""
        reached = set()
        for digest, (_, parent) in self.table.items():
            path = [digest]
            while parent is not None and parent in self.table:
                path.append(parent)
                parent = self.table[parent][1]
            if parent is None:
                reached.update(path)
        return len(self.table) - len(reached)


evictions = {}
chats = works["chats: 10 users, 8 turns"]
for name, kind in (("leaf first", HashIndex), ("leaf first, radix", RadixIndex), ("block by block", BlockLRU)):
    evictions[name] = []
    for capacity in capacities[:4]:
        replica, worst = Replica(capacity, kind), 0
        for _, prompt, answer in chats:
            replica.serve(prompt, answer)
            if kind is BlockLRU:
                worst = max(worst, replica.index.stranded() / len(replica.index))
        evictions[name].append(replica.found / replica.prompted)
        if kind is BlockLRU:
            print(f"{capacity:5d} blocks: up to {worst:.0%} of the cached blocks stranded behind a gap")
for name, ratios_of in evictions.items():
    print(f"{name:18s} hit ratio " + " ".join(f"{ratio:6.1%}" for ratio in ratios_of))
assert evictions["leaf first"] == evictions["leaf first, radix"]
assert evictions["leaf first"][1] > evictions["block by block"][1]

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
for name in (None, "poet"):
    engine = new_engine("hash", num_blocks=32)
    serve(engine, prompt, max_tokens=12)  # the base model, first
    logprobs, found = served_by_adapter(engine, name)
    off = (logprobs - alone).abs().max().item()
    print(f"adapter in the key: {name!s:5s} found {found:2d} tokens; log-probabilities off by up to {off:.4f}")
    assert (off < 1e-3) == (name is not None)

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
# tokens, and extras (adapter, hashes of images, salt). Only full blocks are cached. References count requests only: a
# block with none is among the free blocks, and can be found until it is reused. A finished request's blocks are freed
# in reverse order, so that the end of a path is reused before its start. On by default in V1.
#
# **SGLang** has the radix tree (RadixAttention), cut at tokens or, with a larger page size, at pages. It evicts leaves that
# no running request holds; `lru` is the default, and others (such as `lfu`) can be chosen. Its scheduler can serve
# waiting requests with the longest match first.
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
bills = {}
for name, (write_factor, read_factor) in PRICES.items():
    bills[name] = np.cumsum(prefix_cache.input_price(0, prompts - read, read, write_factor, read_factor))
    print(f"{name:34s} 12 turns cost {bills[name][-1]:7,.0f}")
for name, factors in list(PRICES.items())[1:3]:
    print(f"{name}: the dearer write is paid back by {prefix_cache.reads_to_break_even(*factors):.2f} reads")

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
# - Found = `floor(min(shared, prompt − 1) / B) · B`: the last token is always computed. Full blocks are shared, writes
#   go after them, nothing is copied. Copy-on-write is for forks inside a block (`n > 1`, beams).
# - References here: one per request, one from the index. With only the index's left, a block is cached and evictable.
#   Evict **leaf first**, least recently used; never a block that a request holds.
# - A hit saves prefill (TTFT, FLOP), and memory among the requests that share. It does not change a request's decode
#   steps, and even prefill does not fall below one read of the weights.
# - Hit ratio = found tokens / prompt tokens. It depends on workload, memory, arrival, routing and template. Turns of a
#   chat hit because each repeats its history.
# - Stable first, volatile last; one template; nothing that varies needlessly. Route by session or match, and take load
#   into account.
