# %% [markdown] name="title"
# # 04 · Paged attention: one memory, cut into blocks
#
# About 45 minutes. You need chapter 02 (the KV cache and its bytes) and chapter 03 (which requests run in a step). The
# lab is [Build paged attention](../../labs/04_paged_attention/paged_attention.ipynb).

# %% name="setup"
import inspect
import json
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from chapters import widgets
from chapters.widgets.block_table import draw, snapshot
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, figure, show, tidy
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.features.baselines.contiguous_manager import ContiguousKVManager
from reference_impl.assembly.parts import Parts
from reference_impl.simulation.executor import END, SimulatedGPU, weightless
from reference_impl.interfaces import KVSpec
from reference_impl.kernels import reference
from reference_impl.core.block_pool import BlockPool
from reference_impl.features.sizing.usage import memory_use
from reference_impl.core.attention import TorchAttention
from reference_impl.theory import kv_cache, model_shapes, roofline
from reference_impl.theory.deployment import WORKED, Deployment
from reference_impl.theory.hardware import device
from reference_impl.theory.units import format_bytes

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
folder = course_model("target")
# The prefix cache is off, so that blocks are shared only where this chapter shares them; chapter 06 turns it on.
llm = LLM(folder, dtype="float32", kv_cache_bytes=32 * 2**20, prefix_cache="off")
model = llm.engine.model
shape = model_shapes.from_config(json.loads((folder / "config.json").read_text()), "course model")
on_gpu = model.device.type == "cuda"
text = llm.encode(inspect.getsource(Engine))  # a few thousand tokens to cut prompts from


def greedy(n, **more):
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, **more)


def finish(engine):
    while engine.has_work():
        engine.step()
    return engine


# %% [markdown] name="question"
# ## 1. A question with a number
#
# A model takes up to 32,768 tokens. The length of an answer is not known in advance, so a server reserves memory for
# all 32,768 when a request arrives. The requests turn out to be 300 tokens long, prompt and answer together.
#
# Now the server allocates memory in blocks of 16 tokens instead, and only when they are needed. **How many times more
# of these requests fit into the same memory?** Section 5 asks for a second guess: how many times more tokens per second
# that gives. You will see that the two numbers are barely related.

# %% name="predict"
widgets.predict("04-requests", "How many times more requests of 300 tokens fit, instead of 32,768 reserved?", "times")

# %% [markdown] name="idea"
# ## 2. The idea
#
# Picture a room full of writers. Nobody knows how much each will write. You could hand everyone a bound book of a
# thousand pages. Soon the shelf is empty, and most pages stay blank.
#
# Or you put one **stack of loose sheets** on the table, all of the same size, with 16 lines each and a number printed
# on each. Whoever fills a sheet takes the next from the stack. A writer's text is then no longer in one piece, so each
# keeps a small **list**: my first sheet is number 7, my second is number 3. To find line 20 of a text, look at the
# second entry of its list, and go to line 4 of that sheet. When a writer leaves, the sheets go back to the stack.
#
# Loose sheets can do one thing that a book cannot. Two texts with the same beginning can **name the same sheet** in
# both lists. A tally on the sheet says how many lists name it. It goes back to the stack when the tally reaches zero.
# And whoever wants to *write* on a sheet that others read must first copy it: **copy-on-write**.
#
# Sheet, stack and list are called *block*, *block pool* and *block table*. Attention that reads keys and values through
# the table is **paged attention** (Kwon et al., 2023).

# %% name="idea-figure" jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

fig = figure(7.8, 2.9)
ax = fig.subplots()
words = {"a": ("a", "list", "keeps", "the", "order", "of", "its"), "b": ("a", "list", "keeps", "the", "sheets")}
tables, looks = {"a": (3, 0), "b": (3, 4)}, {"a": (BLUE, ""), "b": (ORANGE, "//")}
where = {block: (8.1 + 2.0 * (block % 3), 1.5 - 1.5 * (block // 3)) for block in range(6)}
for row, (name, tokens) in enumerate(words.items()):
    y = 1.7 - 1.9 * row
    ax.text(-0.1, y + 0.25, name, ha="right", va="center", fontsize=11, color=INK)
    for i, word in enumerate(tokens):
        shared = i < 4
        ax.add_patch(Rectangle((0.85 * i, y), 0.8, 0.5, facecolor=PURPLE if shared else looks[name][0], alpha=0.35))
        ax.text(0.85 * i + 0.4, y + 0.25, word, ha="center", va="center", fontsize=7.5)
    for i, block in enumerate(tables[name]):
        ax.text(0.85 * 4 * i + 1.2, y - 0.35, f"entry {i}: block {block}", fontsize=8, color=INK)
        x, top = where[block]
        from_below = row == 1 and i == 1
        ax.annotate(
            "", (x + 0.4, top - 0.04) if from_below else (x - 0.05, top + 0.25), (0.85 * 4 * i + 3.0, y - 0.27),
            arrowprops={"arrowstyle": "->", "color": GREY, "linewidth": 1},
        )  # fmt: skip
for block, (x, y) in where.items():
    names = [name for name, table in tables.items() if block in table]
    colour, hatch = (PURPLE, "xx") if len(names) > 1 else looks[names[0]] if names else ("white", "")
    filled = {3: 4, 0: 3, 4: 1}.get(block, 0)
    ax.add_patch(Rectangle((x, y), 0.4 * filled, 0.5, facecolor=colour, edgecolor="white", hatch=hatch))
    ax.add_patch(Rectangle((x, y), 1.6, 0.5, facecolor="none", edgecolor=INK))
    ax.text(x, y + 0.56, f"block {block}, tally {len(names)}", fontsize=8, color=INK)
ax.set_xlim(-0.5, 14)
ax.set_ylim(-0.8, 2.6)
ax.axis("off")
show(
    fig,
    "Two texts of 7 and 5 tokens, cut into blocks of four. Their first four tokens are the same, so the first entry of "
    "both block tables is block 3, which has a tally of 2. Their second entries are blocks 0 and 4, partly filled. "
    "Blocks 1, 2 and 5 are free.",
)

# %% [markdown] name="answer-text"
# That is enough to answer the question. A request of 300 tokens takes whole blocks of 16, and the last of them is not
# quite full.

# %% name="answer"
blocks = kv_cache.blocks_for(300, 16)
print(f"{blocks} blocks of 16 are {16 * blocks} slots, instead of 32,768")
widgets.reveal("04-requests", 32_768 / (16 * blocks))

# %% [markdown] name="analogy"
# ### The older idea behind it
#
# Operating systems have allocated memory to programs this way since the 1960s. The mapping is close:
#
# | operating system | paged KV cache | where it stops fitting |
# |---|---|---|
# | page, often 4 KiB | block, often 16 tokens | a block's bytes depend on the model |
# | virtual address | position in the request's text | a text grows only at its end |
# | physical address | slot: block × block size + offset | there is one such slot in each layer |
# | page table | block table | the kernel reads it in software; there is no hardware for it |
# | page fault | a block is taken when the text grows into it | the scheduler knows a step ahead, and frees blocks first |
# | free list | block pool | the same |
# | two processes map one page | two tables name one block, counted | the same |
# | `fork` with copy-on-write | more samples of a prompt, beams | the same, but only the last block of a text is ever written |
# | swapping to disk | swapping to host memory | one can also drop and recompute |
#
# The last column is what an interviewer wants to hear. A page fault is an exception that hardware raises; here nothing
# is ever accessed before the scheduler has allocated it. If no block is free, a request waits or is preempted (chapter
# 03).

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# One layer, one head, blocks of four. First the memory: a pool that counts references, and an `append` that takes a block
# when the text grows into it, and copies a shared one before it writes.

# %% name="scratch"
B, NUM, d = 4, 6, 8
k_cache, v_cache = torch.full((2, NUM * B, d), float("nan"))  # slots never written are NaN
free, refs = list(range(NUM)), [0] * NUM


def take():
    block = free.pop(0)
    refs[block] = 1
    return block


def append(table, position, k, v):
    index, offset = divmod(position, B)
    if index == len(table):  # the text grows into a new block: the "page fault"
        table.append(take())
    elif refs[table[index]] > 1:  # shared with another text: copy-on-write
        old, table[index] = table[index], take()
        refs[old] -= 1
        for cache in (k_cache, v_cache):
            cache[table[index] * B : (table[index] + 1) * B] = cache[old * B : (old + 1) * B]
    slot = table[index] * B + offset
    k_cache[slot], v_cache[slot] = k, v


# %% [markdown] name="scratch-attention-text"
# Then attention that reads through the table. Two requests of different length write into the same memory by turns, and
# after each token the result is compared with attention over keys and values that lie in one piece.


# %% name="scratch-attention"
def paged_attention(q, table, length):
    slots = [table[p // B] * B + p % B for p in range(length)]  # the one extra lookup
    return ((k_cache[slots] @ q / d**0.5).softmax(0)) @ v_cache[slots]


torch.manual_seed(0)
keys, values, queries = torch.randn(3, 2, 7, d)  # for two requests, up to 7 tokens
tables = ([], [])
for position in range(7):
    for r, length in enumerate((7, 3)):
        if position < length:
            append(tables[r], position, keys[r, position], values[r, position])
            plain = F.scaled_dot_product_attention(
                queries[r, position][None], keys[r, : position + 1], values[r, : position + 1]
            )[0]
            torch.testing.assert_close(paged_attention(queries[r, position], tables[r], position + 1), plain)
print("block tables", tables, "free", free, "- the same outputs as without blocks")

# %% name="scratch-fork"
branch = list(tables[1])  # a second text that continues after the first three tokens
refs[branch[0]] += 1
before = k_cache[[tables[1][0] * B + p for p in range(3)]].clone()
append(branch, 3, torch.ones(d), torch.ones(d))
print("the branch writes token 3: tables", tables[1], branch, "tally", refs)
assert branch != tables[1], "the writer got a copy"
assert torch.equal(k_cache[[tables[1][0] * B + p for p in range(3)]], before), "the other text did not change"

# %% [markdown] name="scratch-reading"
# That is all there is to it. The rest of the chapter covers what paging costs, what it saves, and common claims about
# it.
#
# Note the NaNs. Slots that were never written are NaN here, and no output is. A kernel that reads a slot it should not
# and multiplies it by a weight of zero would still give NaN. The lab checks that too.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The pool handles only integers. It never sees a tensor, so it can be tested by itself and replaced by yours. Dropping
# a reference that does not exist is a bug in the caller, so `decref` raises. It looks at the whole list before it
# changes anything: one bad entry, a block named more often than it has references, and no reference is dropped. So does
# the one that you build in the lab.

# %% name="engine-pool"
print(inspect.getsource(BlockPool.allocate))
print(inspect.getsource(BlockPool.decref))
pool = BlockPool(4)
pool.allocate(2)
try:
    pool.decref([0, 1, 1])
except ValueError as error:
    print(f"decref([0, 1, 1]): {error}; references {[pool.ref_count(block) for block in range(2)]}")
assert pool.ref_count(0) == pool.ref_count(1) == 1, "nothing changed"

# %% [markdown] name="three-text"
# Three requests over ten blocks of four tokens. They arrive with 6, 3 and 2 tokens and grow by one in each step. Blocks
# are taken when a text grows into them, so those of the three requests interleave. In the picture, *refs* is the
# reference count of a block.

# %% name="three"
engine = Engine(model, EngineConfig(num_blocks=10, block_size=4, prefix_cache="off"))
for name, length in (("A", 6), ("B", 3), ("C", 2)):
    engine.add(text[:length], greedy(8), name)
for _ in range(6):
    before = {name: list(request.block_table) for name, request in engine.requests.items()}
    engine.step()
    for name, request in engine.requests.items():
        if len(request.block_table) > len(before[name]):
            print(f"step {engine.trace.steps()[-1].step_id}: {name} has {request.num_computed_tokens:2d} tokens, "
                  f"table {before[name]} -> {request.block_table}")  # fmt: skip
three = snapshot(engine)
print("free:", list(three.free))
draw([three], 0, "A", 9)

# %% [markdown] name="translate-text"
# The kernel does in software what a processor's memory management unit does in hardware. This is the translation, from
# the engine:

# %% name="translate"
print(inspect.getsource(reference.context_slots))
table = torch.tensor(engine.requests["A"].block_table)
print("A's tokens lie in slots", reference.context_slots(table, engine.requests["A"].num_computed_tokens, 4).tolist())

# %% [markdown] name="scatter-text"
# Does it matter where the blocks are? It must not. Here the same prompts run in four engines: with blocks of 16, with
# blocks of 1 and of 5, and with a pool that allocates blocks in a random order. This attention gathers the slots first
# and then computes as without blocks, so the outputs have to be equal. In general they are equal *up to rounding*: a
# kernel that goes through a text block by block sums in another order for another block size, and a batch of another
# size is rounded differently. That can flip a near tie, above all in 16 bits. The same bits whatever else is in the
# batch are a promise of their own: `batch_invariant=True`.


# %% name="scatter"
def shuffled(num_blocks, seed=3):
    pool = BlockPool(num_blocks)
    order = random.Random(seed).sample(range(num_blocks), num_blocks)
    pool.allocate(num_blocks)
    pool.decref(order)  # freed blocks queue up in this order
    return pool


outputs = {}
for name, size, pool in (("16", 16, None), ("1", 1, None), ("5", 5, None), ("16, shuffled", 16, shuffled(40))):
    num_blocks = 40 if size == 16 else -(-640 // size)
    tried = Engine(
        model, EngineConfig(num_blocks=num_blocks, block_size=size, prefix_cache="off"), Parts(block_pool=pool)
    )
    requests = [tried.add(text[40 * i : 40 * i + n], greedy(12)) for i, n in enumerate((3, 16, 37))]
    tried.step()
    print(f"blocks of {name:12s}: table of the longest starts {requests[2].block_table[:6]}")
    finish(tried)
    outputs[name] = [request.output_tokens for request in requests]
assert all(outputs[name] == outputs["16"] for name in outputs)
print("four layouts, the same texts")

# %% [markdown] name="fork-text"
# ### Sharing
#
# Four samples of one prompt (`n=4`). The prompt is computed once, then three children are forked. They share its
# blocks. Each draws its own first token from the logits of the last prompt token, and in this engine each computes that
# token again, into a block of its own. If the token falls *inside* a block, that block is copied first. If it is the
# first of its block, there is nothing to copy.

# %% name="predict-copies"
widgets.predict("04-copies", "Blocks of 16, a prompt of 33 tokens, four samples: how many blocks are copied?", "blocks")


# %% name="fork"
def copies_of(trace):
    return sum(len(step.transfers.copies) for step in trace.steps())


copies = {}
for prompt_len in (18, 32, 33, 40):
    forked = Engine(model, EngineConfig(num_blocks=40, block_size=16, prefix_cache="off"))
    parent = forked.add(
        text[:prompt_len], SamplingParams(max_tokens=8, temperature=1, seed=5, n=4, ignore_eos=True), "p"
    )
    forked.step()
    shared = sum(forked.block_pool.ref_count(block) > 1 for block in parent.block_table)
    finish(forked)
    offset = (prompt_len - 1) % 16
    print(f"prompt of {prompt_len}: {shared} shared blocks, last prompt token at offset {offset}: "
          f"{copies_of(forked.trace)} copies for 3 forks")  # fmt: skip
    assert copies_of(forked.trace) == (3 if offset else 0)
    assert forked.block_pool.num_free == 40, "every block came back when its tally reached zero"
    copies[prompt_len] = copies_of(forked.trace)
widgets.reveal("04-copies", copies[33])

# %% [markdown] name="beam-text"
# *Beam search* looks for the most probable text. It keeps the few best texts so far, the *beams*, and in every step it
# extends each and keeps the best of all continuations. So beams are forked and dropped at every step, and tables
# constantly share blocks and diverge. The cell counts the entries of all tables, and the blocks that actually exist.


# %% name="beam"
entries, exist = [], []


class Watching(Engine):
    def step(self):
        result = super().step()
        use = memory_use(self.block_pool, self.num_blocks, 16, self.requests.values())
        entries.append(use.references)
        exist.append(use.held_blocks)
        return result


from reference_impl.features.beams.search import beam_search

beams = Watching(model, EngineConfig(num_blocks=60, block_size=16, prefix_cache="off"))
found = beam_search(beams, text[:100], width=4, max_tokens=32)
print(f"best of {len(found)} beams: {llm.tokenizer.decode(list(found[0].tokens))!r}")
print(f"after the last step: {entries[-1]} entries in block tables, {exist[-1]} blocks: sharing saves "
      f"{1 - exist[-1] / entries[-1]:.0%}; {copies_of(beams.trace)} copied on the way")  # fmt: skip
assert beams.block_pool.num_free == 60

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# Cache memory can be unused in three ways, and the three are often confused:
#
# - **Reservation:** held for future tokens (*later* in the table and the figure below).
# - **Internal fragmentation:** held and *never* filled, because the text ends earlier.
# - **External fragmentation:** free, but *stranded* in holes too small for the next request.
#
# The first two can be told apart only in hindsight, which a simulation has.
#
# To see them we need a large model and many requests, but neither its weights nor its GPU. Scheduler, pool and block
# tables are the engine's own and really run; the duration of each step comes from the cost model of chapter 01:
# Llama-2-13B in 16 bits on one A100 with 80 GB, at the limits of the hardware. The load is a burst of 300 requests,
# prompts of 160 tokens and answers of 340 on average, both exponential and capped at 1,000. The model's context is
# 2,048 tokens. Four ways to allocate memory:
#
# - *maximum*: one piece of 2,048 tokens for each request;
# - *power of two*: one piece of the next power of two that holds prompt and answer, assuming that this much was
#   predicted right;
# - *oracle*: one piece of the right size, which nobody can know (rounded up to 16 tokens, as all pieces are);
# - *paged*: blocks of 16.

# %% name="simulate-load"
LIMIT, SIZE, NUM_REQUESTS = 2048, 16, 300
machine = Deployment(model_shapes.model("llama-2-13b"), device("A100-80GB"))
pool_blocks = machine.cache_tokens() // SIZE
rng = np.random.default_rng(4)
prompt_lens, answer_lens = (np.clip(rng.exponential(mean, NUM_REQUESTS), 1, 1000).astype(int) for mean in (160, 340))
reserve = {
    "maximum": lambda p, n: LIMIT,
    "power of two": lambda p, n: 2 ** int(np.ceil(np.log2(p + n))),
    "oracle": lambda p, n: p + n,
    "paged": lambda p, n: LIMIT,  # the length it may grow to; nothing is reserved for it
}
print(f"{machine.shape.name}: {machine.bytes_per_token:,.0f} bytes per token, room for {pool_blocks * SIZE:,} tokens "
      f"= {pool_blocks * SIZE // LIMIT} reservations of {LIMIT:,}")  # fmt: skip

# %% name="predict-throughput"
widgets.predict("04-throughput", "Tokens per second in blocks, over those with the maximum reserved?", "times")

# %% name="simulate-watch" jupyter={"source_hidden": true}
FIELDS = ("filled", "later", "never", "stranded", "free")


class MemoryWatch:
    """Shares of memory while requests wait for memory; final: how many tokens each request has at its end."""

    def __init__(self, engine, way):
        self.engine, self.way, self.final, self.shares, self.spent = engine, way, {}, [], []

    def look(self):
        engine = self.engine
        if len(engine.trace.events) % 10:  # counting every tenth step is enough
            return
        last = engine.trace.steps()[-1]
        if not last.num_waiting or sum(row.num_tokens for row in last.rows) == 2048:
            return  # no request waits, or only for the token budget and not for memory
        if self.way == "paged":
            use = memory_use(engine.block_pool, pool_blocks, SIZE, engine.requests.values())
            never = sum(max(0, len(r.block_table) * SIZE - self.final[r.id]) for r in engine.requests.values())
            later = use.ahead_slots + use.tail_slots - never
            parts_of = (use.filled_slots, later, never, 0, use.free_blocks * SIZE)
        else:
            wanted = -(-(engine.scheduler.waiting.first().max_total_tokens - 1) // SIZE) * SIZE
            use = engine.kv.allocator.memory(self.final, wanted)
            parts_of = (use.used, use.later, use.never, use.stranded, use.usable)
        self.shares.append(np.array(parts_of) / (pool_blocks * SIZE))
        self.spent.append(last.finished_at - last.started_at)

    def mean(self):
        return np.average(self.shares, axis=0, weights=self.spent)


def in_flight(trace):
    """(requests in a step, tokens that a decoding request has in the cache), both as means over time."""
    steps = trace.steps()
    rows = np.average([len(s.rows) for s in steps], weights=[s.finished_at - s.started_at for s in steps])
    return rows, np.mean([row.start for s in steps for row in s.rows if row.num_tokens == 1])


def summary(way, ran, share, seconds):
    """One row of the table."""
    preempted = sum(len(s.preempted) for s in ran.trace.steps())
    speed = f"{answer_lens.sum() / seconds:,.0f}"
    return [way, *(f"{part:.0%}" for part in share), f"{in_flight(ran.trace)[0]:.1f}", speed, preempted]


# %% [markdown] name="simulate-run-text"
# The four runs differ in two lines: who manages the memory, and how long a request is said to become. (The folded cell
# above only watches: it counts, every tenth step, what the memory holds.)


# %% name="simulate"
def serve(way):
    """(engine, mean shares of memory while requests wait for memory, seconds) under one way of allocating it."""
    lengths = {}
    gpu = SimulatedGPU(machine, lengths, block_size=SIZE)
    parts = Parts(executor=gpu, clock=gpu, kv_cache=object())
    if way != "paged":
        parts.kv_manager = ContiguousKVManager(pool_blocks, SIZE)
    config = EngineConfig(num_blocks=pool_blocks, block_size=SIZE, max_num_seqs=256, prefix_cache="off")
    engine = Engine(weightless(machine), config, parts)
    memory = MemoryWatch(engine, way)
    for i, (p, n) in enumerate(zip(prompt_lens.tolist(), answer_lens.tolist(), strict=True)):
        room = max(reserve[way](p, n) - p, n)
        request = engine.add([1] * p, SamplingParams(max_tokens=room, ignore_eos=True, stop_token_ids=(END,)), f"r{i}")
        lengths[request.id], memory.final[request.id] = n, p + n - 1
    while engine.has_work():
        engine.step()
        memory.look()
    return engine, memory.mean(), gpu.time


runs = {way: serve(way) for way in reserve}
heads = ["share of memory", *FIELDS, "requests at once", "tokens/s", "preempted"]
widgets.table([summary(way, *run) for way, run in runs.items()], heads)

# %% name="simulate-figure" jupyter={"source_hidden": true}
fig = figure(8.2, 3.3)
left, right = fig.subplots(1, 2, width_ratios=(1.15, 1))
kinds = (
    ("filled", BLUE, ""), ("later", SKY, "//"), ("never", ORANGE, "xx"), ("stranded", RED, ".."), ("free", GREY, ""),
)  # fmt: skip
for i, (share_name, colour, hatch) in enumerate(kinds):
    lows = [share[:i].sum() for _, share, _ in runs.values()]
    left.barh(
        range(len(runs)), [share[i] for _, share, _ in runs.values()], left=lows, color=colour, hatch=hatch,
        edgecolor="white", label=share_name,
    )  # fmt: skip
left.set_yticks(range(len(runs)), list(runs))
left.invert_yaxis()
tidy(left, "share of KV memory while requests wait")
left.legend(fontsize=7.5, frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.42, 1.16), columnspacing=0.8)
batch = np.arange(1, 161)
context = in_flight(runs["paged"][0].trace)[1]
right.plot(
    batch, [n / machine.tpot(context, n) for n in batch], color=INK, linestyle="--", label="formula: only decode steps"
)
looks_of = (("o", RED), ("s", ORANGE), ("D", GREEN), ("^", BLUE))
for (way, (ran, _, seconds)), (marker, colour) in zip(runs.items(), looks_of, strict=True):
    rows, _ = in_flight(ran.trace)
    right.plot(rows, answer_lens.sum() / seconds, marker, color=colour, markersize=8, label=way)
tidy(right, "requests in a step, mean over time", "tokens/s")
right.set_ylim(bottom=0)
right.legend(fontsize=7.5, frameon=False)
show(
    fig,
    "Left: four stacked bars of KV memory while requests wait. Reserving the maximum fills the least and never uses "
    "most; paged fills nearly everything. Right: tokens per second over requests in a step. The formula bends over, and "
    "the four runs lie below it in the order maximum, power of two, oracle, paged.",
)

# %% name="gain"
worst, best = runs["maximum"], runs["paged"]
print(f"requests at once: {in_flight(best[0].trace)[0] / in_flight(worst[0].trace)[0]:.1f} times more")
needed = int((prompt_lens + answer_lens - 1).sum())
again = sum(row.num_tokens for s in best[0].trace.steps() for row in s.rows) - needed
print(f"paged: {again:,} tokens computed a second time after preemptions; {needed:,} are needed")
widgets.reveal("04-throughput", worst[2] / best[2])

# %% [markdown] name="gain-why"
# Four times as many requests at once, and only about twice the tokens per second. Where does the rest go? Three more
# measurements of the same runs: which caches are read, how much of the time goes to steps that only decode, and what a
# step reads for each token at three batch sizes.
# <!-- printed: gain -->

# %% name="gain-parts"
context = in_flight(best[0].trace)[1]
half_way = np.mean(prompt_lens) + np.mean(answer_lens) / 2
print(f"the average request has {half_way:.0f} tokens halfway through its answer;")
print(f"one that runs at a random moment has {context:.0f} in the cache")
for way in ("maximum", "paged"):
    steps = runs[way][0].trace.steps()
    pure = [s for s in steps if all(row.num_tokens == 1 for row in s.rows)]
    seconds = sum(s.finished_at - s.started_at for s in pure)
    print(f"{way}: {seconds / runs[way][2]:.0%} of the time in steps that only decode; these give "
          f"{sum(len(s.rows) for s in pure) / seconds:,.0f} tokens/s")  # fmt: skip
for n in (1, 25, 100):
    ledger = roofline.bytes_per_generated_token(machine.shape, n, context)
    print(f"{n} requests in a step: {format_bytes(ledger.weights)} of weights and "
          f"{format_bytes(ledger.cache_read)} of cache read for each token")  # fmt: skip

# %% [markdown] name="gain-reading"
# Read the right plot first. More requests in a step share one read of the weights, so each token gets cheaper: that is
# where the gain of paging comes from. **Memory becomes batch, and batch becomes throughput.** The paper's "2 to 4 times
# the throughput at the same latency" was measured against two systems of its time, with its models and loads. Ours has
# a different load, a different baseline and no latency limit, so the number differs.
#
# Why is the gain in tokens per second smaller than the gain in requests? Each request has its own cache, and that read
# is not shared. At a batch of 1 the weights are nearly all the traffic; at 100 the caches are more than half of it, and
# the dashed curve bends. It also matters *which* caches: long requests run longer, so those running at a random moment
# have more tokens than the average request halfway through. The cell printed both.
#
# The points lie below the curve for two reasons. The runs also prefill prompts: the cell printed the share of time in
# steps that only decode. And the batch changes all the time. It is large at first, and the last requests of a burst run
# nearly alone. On a concave curve like this one, the mean rate of a small and a large batch is below the rate at their
# mean. *Paged* has a third reason: it admits requests without knowing how long they get, so it preempts some and
# recomputes their tokens: the cell under the plots printed how many. That is the price of filling memory completely,
# and chapter 03 shows what to do about it.
#
# Now the left plot. With the *maximum*, most of the memory is held and never filled. The often quoted "60 to 80 %
# waste" is such a measurement, of other systems and loads (section 8). With pieces of *different sizes* some memory is
# stranded in holes. Even the *oracle* holds much that is filled only later. *Paged* strands nothing and reserves
# nothing beyond the last block of each text. What remains is the empty end of that block: for most texts it is still to
# be filled by their next tokens, and it stays empty only in the block in which a text ends.
#
# ### What remains: the end of the last block
#
# A text of `L` tokens takes `ceil(L / B)` blocks. Between 0 and `B − 1` slots of the last one stay empty. If lengths
# are uniformly distributed over a block, the mean is `w = (B − 1) / 2`, and the wasted share is `w / (L + w)`. Theory
# and measurement, for texts of exponentially distributed length:

# %% name="tail"
sizes, means = (8, 16, 32, 64, 128, 256), (50, 200, 500, 2000)
drawn = {mean: 1 + rng.exponential(mean, 4000 * (5 if on_gpu else 1)).astype(int) for mean in means}


def measured_tail(lengths, size):
    """Allocates every text in a pool and counts slots: (share of held slots that is empty, most in one text)."""
    pool = BlockPool(int(sum(kv_cache.blocks_for(lengths, size))))
    held = np.array([len(pool.allocate(int(kv_cache.blocks_for(n, size)))) * size for n in lengths])
    assert pool.num_free == 0, "every block of the pool could be had: no hole is too small"
    return 1 - lengths.sum() / held.sum(), int((held - lengths).max())


shares = {mean: [measured_tail(drawn[mean], size) for size in sizes] for mean in means}
assert all(most < size for found in shares.values() for (_, most), size in zip(found, sizes, strict=True))
rows = []
for mean in means:
    formula = [f"{kv_cache.tail_waste_share(drawn[mean].mean(), size):.1%}" for size in sizes]
    rows.append([f"mean of {mean:,}, formula", *formula])
    rows.append([f"mean of {mean:,}, measured", *(f"{share:.1%}" for share, _ in shares[mean])])
widgets.table(rows, ["tokens", *(f"blocks of {size}" for size in sizes)])

# %% name="tail-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 3.1)
ax = fig.subplots()
fine = np.unique(np.logspace(2, 8, 60, base=2).astype(int))
for mean, colour, marker in zip(means, (RED, ORANGE, GREEN, BLUE), "osD^", strict=True):
    ax.plot(fine, 100 * kv_cache.tail_waste_share(drawn[mean].mean(), fine), "--", color=colour)
    ax.plot(sizes, [100 * share for share, _ in shares[mean]], marker, color=colour, label=f"about {mean:,} tokens")
ax.axhline(4, color=GREY, linewidth=1)
ax.text(1.01, 4, "4 %", fontsize=8, color=INK, va="center", transform=ax.get_yaxis_transform())
ax.set_xscale("log", base=2)
ax.set_xticks(sizes, [str(size) for size in sizes])
tidy(ax, "block size, tokens", "held and empty, %")
ax.legend(fontsize=8, frameon=False, title="formula dashed, measured dots", title_fontsize=8)
show(
    fig,
    "Share of held slots that is empty over the block size, for texts of about 50, 200, 500 and 2,000 tokens. It grows "
    "with the block size and falls with the length. Measured points lie on the formula for blocks far shorter than the "
    "texts, and above it for longer blocks. Each curve crosses 4 % at another block size.",
)

# %% [markdown] name="tail-reading"
# The points rise above the dashed curve as the block size approaches the length of the texts. There, lengths are no
# longer uniformly distributed over a block: short ones are more frequent, so on average more than half of the last
# block is empty. The formula's condition does not hold, and the measurement is right.
#
# ### Bytes of a block
#
# A block is not one object. It is a block number, which refers to the same slots in every layer. Here is the tensor,
# and the bytes of a 70B model's block on one and on eight GPUs.

# %% name="block-bytes"
print("engine:", tuple(llm.engine.kv_cache.data.shape), "= layers, K or V, blocks, block size, KV heads, head dim")
L70 = model_shapes.model("llama-3-70b")
for devices in (1, 8):
    spec = KVSpec(L70.layers, L70.num_kv_heads // devices, L70.head_dim, block_size=16, bits_per_value=16)
    layer = spec.bytes_per_block / spec.num_layers
    print(f"16 tokens of a 70B on {devices} GPU(s): {format_bytes(spec.bytes_per_block)} on each in {spec.num_layers} layers, "
          f"{format_bytes(layer, binary=True)} in each, half of it keys")  # fmt: skip

# %% [markdown] name="worked-text"
# ### Two problems, worked
#
# The machine of all worked problems in this course: Llama-3-70B in BF16, cache too, on four H100 with 80 GB, tensor
# parallel over all four, at the limits of the hardware. Solve them with pencil and the cell below, then open the answers.

# %% name="worked"
node = WORKED
print(f"weights {format_bytes(node.weights)}; cache {node.bytes_per_token:,.0f} bytes per token; "
      f"room for {node.cache_tokens():,} tokens in 90 % of the memory")  # fmt: skip
print(f"one decode step of 10 requests with 1,000 tokens each: {1e3 * node.tpot(1000, 10):.1f} ms")

# %% [markdown] name="worked-memory"
# **1. Memory into batch.** A server reserves 8,192 tokens for each request. A request has 1,000 tokens in the cache at a
# random moment of its life. (a) How many run at once, and how many with blocks of 16? (b) How many tokens per second do
# steps that only decode give in both cases? (c) Each user should get a token every 16 ms. What is left of the gain?
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_04_memory_into_batch -->
#
# <details><summary>Answer</summary>
#
# (a) 448,280 // 8,192 = 54 reservations. In blocks a request holds 1,000 tokens and 7.5 empty slots on average, so
# 448,280 / 1,007.5 = 444 run at once: 8.2 times as many.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_04_memory_into_batch -->
#
# (b) 54 requests: a step takes 14.1 ms, 3,834 tokens/s. 444 requests: 27.0 ms, 16,426 tokens/s. That is 4.3 times as
# many, for 8.2 times the requests: the weights are shared, but each request adds a cache of 328 MB to the bytes of a
# step, and its vector to the all-reduces.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_04_memory_into_batch -->
#
# (c) At most 111 requests fit into 16 ms: 6,947 tokens/s, 1.8 times as many as with reservations. The latency
# objective is the limit then, and not the memory.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_04_memory_into_batch -->
#
# The condition of (a): it is the *mean* that fits. At 444 requests every new token needs memory that is taken already,
# so a real server stays below it or preempts.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_04_memory_into_batch -->
#
# </details>

# %% [markdown] name="worked-block-size"
# **2. A block size.** Requests are short: a shared system prompt of 200 tokens and 100 more of their own, 300 on
# average. Compare blocks of 16, 128 and 256. (a) How many KiB of one layer does one GPU hold in a block? (b) What share
# of a request's slots is empty on average? (c) A prefix cache shares full blocks. How much of the system prompt is found?
# Which size do you choose, and what would change your mind?
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_04_a_block_size -->
#
# <details><summary>Answer</summary>
#
# (a) Four GPUs share eight KV heads, two each: 2 · 2 heads · 128 · 2 bytes are 1 KiB for each token, so 16, 128 and 256
# KiB. That is what a kernel loads in one piece, and even the smallest is long enough for full memory transactions.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_04_a_block_size -->
#
# (b) `w / (300 + w)` with `w = (B − 1) / 2`: 2.4 %, 17.5 % and 29.8 %. The condition is that lengths are spread over
# whole blocks; if all requests have exactly 300 tokens, they take 304, 384 and 512 slots.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_04_a_block_size -->
#
# (c) 192, 128 and 0 tokens. At 256 the system prompt does not fill one block, and nothing is shared.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_04_a_block_size -->
#
# So 16. What would change it: a kernel that needs larger blocks (some do), texts of many thousands of tokens, where the
# empty end no longer counts and shorter tables help, or a transfer to another machine, where few large pieces travel
# better than many small ones.
# <!-- tested: tests/claims/test_worked_04_06.py::test_worked_04_a_block_size -->
#
# </details>

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# A run of the engine with blocks of four, recorded after each step. Request `p` has a prompt of ten tokens and asks for
# three samples. `q` arrives at the same time. Move the snapshot with the slider. Find:
#
# - the step in which three tables name the same blocks, and the next step, in which one block is copied twice, while
#   the third sample keeps the original. Why is that safe?
# - a full block that stays shared to the end;
# - the free list. Freed blocks go to its end: how many steps does it take until a block of `q` is reused?
#
# Then choose a position and read off its slot.

# %% name="explore"
watched = Engine(model, EngineConfig(num_blocks=12, block_size=4, prefix_cache="off"))
watched.add(text[:10], SamplingParams(max_tokens=9, temperature=1, seed=2, n=3, ignore_eos=True), "p")
watched.add(text[50:55], greedy(5), "q")
frames = [snapshot(watched)]
while watched.has_work():
    watched.step()
    frames.append(snapshot(watched))
widgets.block_table(frames, "p/1", start=2, position=9)

# %% [markdown] name="errata-internal"
# ## 7. What the cheat sheets get wrong
#
# **"Paging has no internal fragmentation, only what is used is allocated."** (E04.1) Blocks are allocated whole. Paging
# removes the reservation and the holes. Internal fragmentation remains, and is *bounded*: less than one block per text.
# Here are all lengths from 1 to 160, and the engine of the burst while it ran. (All that is currently empty in a last
# block is usually called internal fragmentation. A growing text will still fill most of it.)

# %% name="errata-internal-cell"
lengths = np.arange(1, 161)
empty = kv_cache.blocks_for(lengths, 16) * 16 - lengths
print(f"blocks of 16: between {empty.min()} and {empty.max()} empty slots, mean {empty.mean():.1f} = (16 - 1) / 2")
assert empty.max() == 15
assert empty.mean() == 7.5
later, never = runs["paged"][1][1:3]
print(f"in the burst: {later + never:.1%} of the memory was held and empty; {never:.2%} stayed so to the end")

# %% [markdown] name="errata-four"
# **"Under 4 % waste."** (E04.4) That is one paper's number, for its loads. Waste depends on how long your texts are: in
# the figure above, each length crosses the line at 4 % at another block size.

# %% name="errata-four-cell"
for size in (16, 128):
    found = ", ".join(f"{kv_cache.tail_waste_share(length, size):.1%} at {length}" for length in (50, 200, 500, 2000))
    print(f"blocks of {size:3d}: {found} tokens")

# %% [markdown] name="errata-cow"
# **"Prefix sharing is copy-on-write."** (E04.2) Watch the counters. Two prompts begin with the same 32 tokens, two full
# blocks, and then differ. With the prefix cache the second shares both blocks, *appends* to a new one, and nothing is
# ever copied, since full blocks are never written. Copies occur where texts diverge *inside* a block: samples of one
# prompt, and beams. (The 2023 paper also let requests share the partly filled end of a prefix, and copied that.)

# %% name="errata-cow-cell"
cached = Engine(model, EngineConfig(num_blocks=40, block_size=16, prefix_cache="hash"))
first = cached.add(text[:32] + text[100:105], greedy(8), "first")
cached.step()
second = cached.add(text[:32] + text[200:207], greedy(8), "second")
cached.step()
print("tables", first.block_table, second.block_table, "tokens found:", second.num_cached_tokens)
assert second.block_table[:2] == first.block_table[:2]
finish(cached)
print(f"copies with a shared prefix: {copies_of(cached.trace)}; with beams: {copies_of(beams.trace)}")
assert copies_of(cached.trace) == 0 < copies_of(beams.trace)

# %% [markdown] name="errata-launches"
# **"Small blocks need more kernel launches."** (E04.3) One attention call per layer and step, whatever the size. Small
# blocks cost longer tables, more lookups and shorter runs of memory per lookup. Large blocks cost emptier ends and,
# with a prefix cache, coarser matches. The cell counts the calls, and every torch operation inside them. It also times
# a gather of one long text.


# %% name="errata-launches-count" jupyter={"source_hidden": true}
class Operations(TorchDispatchMode):
    """Counts torch operations."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


class CountingAttention(TorchAttention):
    calls, operations = 0, 0

    def forward(self, *arguments):
        with Operations() as asked:
            out = super().forward(*arguments)
        self.calls, self.operations = self.calls + 1, self.operations + asked.count
        return out


tokens = 200_000 if on_gpu else 20_000
cache = torch.zeros(2 * tokens, shape.num_kv_heads, shape.head_dim, device=model.device)


def gather_seconds(size):
    """Shortest of several gathers of one long text with scattered blocks."""
    table = torch.randperm(2 * tokens // size, device=model.device)[: int(kv_cache.blocks_for(tokens, size))]
    times = []
    for _ in range(20):
        started = time.perf_counter()
        float(cache[reference.context_slots(table, tokens, size)][-1, 0, 0])  # waits for a GPU to finish
        times.append(time.perf_counter() - started)
    return min(times)


_ = gather_seconds(16)  # the first call includes one-time setup

# %% [markdown] name="errata-launches-run"
# The same prompt in five engines, whose attention is wrapped by the counter of the folded cell.

# %% name="errata-launches-cell"
rows, operations = [], set()
for size in (1, 8, 16, 32, 128):
    counting = CountingAttention(model.config.attention_scale, model.dtype)
    tried = Engine(
        model, EngineConfig(num_blocks=-(-512 // size), block_size=size, prefix_cache="off"), Parts(attention=counting)
    )
    request = tried.add(text[:100], greedy(6))
    tried.step()
    entries_now = len(request.block_table)
    finish(tried)
    calls = counting.calls // len(tried.trace.steps())
    assert calls == shape.layers
    operations.add(counting.operations)
    rows.append([size, calls, counting.operations, entries_now, f"{1e3 * gather_seconds(size):.2f} ms"])
assert len(operations) == 1, "as many operations for every block size"
heads = ["block size", "calls per step", "operations in all", "table entries for 100 tokens"]
widgets.table(rows, [*heads, f"gather of {tokens:,} tokens, one layer's keys"])

# %% [markdown] name="errata-launches-reading"
# The times are those of PyTorch's gather on this machine, not of a paged kernel: another machine, another PyTorch or a
# kernel has another price, and another best size. An efficient kernel is written in chapter 05. The counts do not
# depend on the block size at all.
#
# **"A block of a 70B model is a 5 MB object."** (E04.5) That sum is over all layers and GPUs. The end of section 5
# printed it: what one kernel sees in one layer is 64 KiB, and tensor parallelism divides it again.
# <!-- printed: block-bytes -->
#
# **"PagedAttention shrinks the KV cache."** (E04.6) And: **"paging makes continuous batching possible."** (E03.7) Both
# are tested by running the same scheduler, with continuous batching, over both allocators. Six users may each get up to
# 200 tokens. Each disconnects after a number of tokens that was not known in advance. There is memory for all of them,
# so both runs take the same steps.

# %% name="errata-both-users"
HANG_UP = (20, 50, 12, 33, 64, 8)


def with_memory(kv_manager, num_blocks=96):
    """(texts, filled bytes per step, held bytes per step) of six users."""
    engine = Engine(
        model, EngineConfig(num_blocks=num_blocks, block_size=16, prefix_cache="off"), Parts(kv_manager=kv_manager)
    )
    users = [engine.add(text[30 * i : 30 * i + 10 + 7 * i], greedy(200)) for i in range(6)]
    filled, held = [], []
    while engine.has_work():
        engine.step()
        running = list(engine.requests.values())
        filled.append(sum(r.num_computed_tokens for r in running) * engine.kv_spec.bytes_per_token)
        held.append(sum(len(r.block_table) for r in running) * engine.kv_spec.bytes_per_block)
        for user, enough in zip(users, HANG_UP, strict=True):
            if user.id in engine.requests and len(user.output_tokens) >= enough:
                engine.abort(user.id)
    return [user.output_tokens for user in users], filled, held


# %% [markdown] name="errata-both-run"
# First with memory for everybody's 200 tokens, then with a quarter of it. The texts are the same in all four runs: here
# each request is computed alone or beside others with the same result, up to rounding, and no near tie flips.

# %% name="errata-both"
in_blocks, in_pieces = with_memory(None), with_memory(ContiguousKVManager(96, 16))
assert in_blocks[0] == in_pieces[0], "the same texts"
assert in_blocks[1] == in_pieces[1], "the same bytes filled, in every step"
print(f"at the fullest step both have {format_bytes(max(in_blocks[1]))} filled; held: {format_bytes(max(in_blocks[2]))} "
      f"in blocks, {format_bytes(max(in_pieces[2]))} in pieces")  # fmt: skip
small_blocks, small_pieces = with_memory(None, 24), with_memory(ContiguousKVManager(24, 16), 24)
assert small_blocks[0] == small_pieces[0] == in_blocks[0]
print(
    f"with memory for {24 * 16} tokens: {len(small_blocks[1])} steps in blocks, {len(small_pieces[1])} in pieces; the same texts"
)

# %% name="errata-both-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 2.7)
ax = fig.subplots()
steps = np.arange(1, len(in_blocks[1]) + 1)
ax.step(steps, np.array(in_pieces[2]) / 1e6, where="post", color=GREY, linewidth=2, label="held in pieces")
ax.step(steps, np.array(in_blocks[2]) / 1e6, where="post", color=ORANGE, label="held in blocks of 16")
ax.plot(steps, np.array(in_blocks[1]) / 1e6, color=BLUE, linestyle="--", label="filled: the same for both")
tidy(ax, "step", "MB")
ax.set_ylim(bottom=0)
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Memory of six users over the steps. The filled bytes are one dashed curve for both allocators. Blocks hold slightly "
    "more than that, contiguous pieces several times as much.",
)

# %% [markdown] name="errata-both-reading"
# The model determines the bytes per token: paging does not change them. Grouped-query attention, latent attention and
# 8-bit caches do (chapters 02, 07 and 09). Paging raises the share of the memory that is *used*, and lets requests
# share it. And the scheduler above did continuous batching over contiguous pieces. Orca did so in 2022, a year before
# paging. Paging makes it more valuable, because more requests fit. Preemption needs no blocks either: dropping a
# request's cache and recomputing it works with any allocator. With blocks, others can use the freed memory, whatever
# their lengths.
#
# **"Each request: 8,192 tokens x 2.68 GB."** (E02.6) 2.68 GB *is* the 8,192 tokens. Check the units, then the waste:

# %% name="errata-units"
each = kv_cache.bytes_per_token(L70)
print(f"llama-3-70b, 8,192 tokens x {each:,} bytes = {format_bytes(8192 * each)}")
for used in (500, 2000):
    lost = kv_cache.stranded_bytes(8192, used, each)
    blocks = kv_cache.blocks_for(used, 16) * 16 - used
    print(f"{used:,} used: {8192 - used:,} tokens = {format_bytes(lost)} empty ({1 - used / 8192:.0%}); in blocks of 16: "
          f"{blocks} tokens = {format_bytes(blocks * each)}")  # fmt: skip
slot = 32_768 * each
print(f"and a reservation of 32,768 tokens: {format_bytes(slot)} = {format_bytes(slot, binary=True)}")

# %% [markdown] name="errata-units-reading"
# The question at the top had a hundred times more requests, and the burst of section 5 gained about twice the tokens per
# second. There are three reasons for the difference. Its reservation was 2,048, not 32,768. A larger batch gains less and less. And at some
# batch size the GPU's arithmetic, the scheduler's limit or the latency objective is the limit, not the memory.
#
# **A drawing with a leaked block.** (E04.7) A popular drawing shows ten blocks: eight in use, two free, and three
# tables `[0, 3, 5]`, `[1, 4]` and `[2, 6]`. Every block in use must be in some table or in the prefix index. Check it:


# %% name="errata-leak"
def leaked(references, tables, indexed=()):
    """Blocks whose reference count is not the number of tables that name them (plus one for the prefix index)."""
    named = [sum(block in table for table in tables) + (block in indexed) for block in range(len(references))]
    return [block for block, count in enumerate(references) if count != named[block]]


print("the drawing, leaked:", leaked([1] * 8 + [0] * 2, [[0, 3, 5], [1, 4], [2, 6]]))
assert leaked([1] * 8 + [0] * 2, [[0, 3, 5], [1, 4], [2, 6]]) == [7]
for frame in (three, *frames):
    assert leaked(frame.references, frame.tables.values()) == []
print(f"{1 + len(frames)} snapshots of this chapter's engines: nothing leaked")

# %% [markdown] name="errata-levers"
# **"FlashAttention and PagedAttention reduce the bytes that decode must read."** (E05.14) They solve two other
# problems. FlashAttention does not write the score matrix to memory, which matters when there are many queries and many
# keys: prefill. A decoding request has one row of scores per head. PagedAttention wastes less *capacity*. Here is what
# one decode step of Llama-3-8B reads for each token, in 16 bits at a batch of 1 with 8,192 tokens of context, and what
# each lever does to it. (Of the input embedding a step reads one row for each token, so that it does not count.
# The 4-bit checkpoint keeps the output matrix in 16 bits, as most do.)

# %% name="errata-levers-cell"
L8 = model_shapes.model("llama-3-8b")
ledger = roofline.bytes_per_generated_token(L8, 1, 8192)
# One row per head and layer: the scores, written and read, and likewise the weights after softmax.
scores = 4 * kv_cache.score_bytes(L8.num_heads, 1, 8192) * L8.layers
table_bytes = kv_cache.blocks_for(8192, 16) * 4 * L8.layers  # int32, read in each layer
print(f"one decode step moves {format_bytes(ledger.total)}")
print(
    f"FlashAttention saves {format_bytes(scores)} of score rows ({scores / ledger.total:.1%}), if they were written out"
)
print(f"PagedAttention saves nothing of it and adds {format_bytes(table_bytes)} of block table")
four_bits = kv_cache.read_bytes(L8, kv_cache.bits_per_weight(4, 128), embedding_bits=16)
levers = {
    "as it is": (1, {}),
    "8-bit cache": (1, {"kv_bytes": 1}),
    "4-bit weights, groups of 128": (1, {"weights": four_bits}),
    "batch of 16": (16, {}),
}
rows = []
for name, (requests_at_once, change) in levers.items():
    ledger = roofline.bytes_per_generated_token(L8, requests_at_once, 8192, **change)
    rows.append([name, format_bytes(ledger.weights), format_bytes(ledger.cache_read)])
widgets.table(rows, ["lever", "weights per token", "cache per token"])

# %% [markdown] name="errata-levers-reading"
# Fewer bytes per decoded token come from fewer bits, fewer KV heads or a latent, more requests in a batch (for the
# weights), or several tokens per pass (speculative decoding, chapter 08). Paging helps *indirectly*: it lets the batch
# grow. Propose both in an interview, and say which does what: FlashAttention is about traffic between memory and chip,
# PagedAttention about where the cache is stored. Today's kernels do both at once: they tile like FlashAttention and
# find their tiles through a block table.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026. Names of options change; look them up in the version you run.
#
# **The paper** is Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP
# 2023. It found that 20 to 38 % of the KV memory held token states in the systems it compared with, and 96 % in its
# own. It also reports the price: its attention kernel was 20 to 26 % slower than a contiguous one, and the system was
# still faster overall. Read its section 4 beside `reference_impl/core/kv_manager.py`.
#
# **vLLM** began as that paper's code, and spread the idea: an open implementation that others could read, measure and
# copy. Blocks have 16 tokens unless you or the attention backend choose otherwise (`--block-size`). Its V1 engine
# (2025) keeps block tables append-only: samples of one prompt are separate requests that share *full* blocks through
# the prefix cache, and no block is copied on write.
#
# **SGLang** uses a page size of 1 by default (`--page-size`), so one table entry per token, and finds shared prefixes
# in a radix tree (chapter 06). Some attention backends require larger pages.
#
# **TensorRT-LLM** has blocks of 32 tokens by default (`tokens_per_block` of `KvCacheConfig`). It also reuses a block
# whose first part matches, by default by copying it (`enable_partial_reuse`, `copy_on_partial_reuse`). So "prefix
# sharing never copies" is a rule for engines that share full blocks, not a law.
#
# **Kernels.** FlashAttention, FlashInfer and TensorRT-LLM's kernels take a block table. On AMD, vLLM and SGLang can use
# AITER, whose paged decode kernels are partly written in assembly. The one of this course follows in chapter 05.
#
# **Without a table.** vAttention (Prabhu et al., 2024) keeps the cache contiguous in *virtual* addresses and lets
# CUDA's own virtual memory map physical pages on demand, so that an unpaged kernel can be used. Pages are then those of
# the driver, 2 MiB unless the driver is modified.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Each wrong option stands for a particular mistake, and the feedback names it. Change the seed for other numbers. Then
# build it yourself: [lab 04](../../labs/04_paged_attention/paged_attention.ipynb).

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("04_paged_attention").draw(seed=1))

# %% [markdown] name="card"
# ## 10. Card
#
# - Position `p` of a request: table entry `p // B`, offset `p % B`, slot `table[p // B] · B + p % B`. One more lookup.
# - Three wastes: reserved for later, never filled (internal), free but in holes (external). Paging removes the holes,
#   and all of the other two except the end of the last block: fewer than `B` slots per text. If lengths are uniform
#   over a block, the mean is `w = (B − 1) / 2`, a share of `w / (L + w)`.
# - A block is taken when a text grows into it, counted by the tables that name it, and freed when none names it.
# - Sharing full blocks copies nothing. Copy-on-write is for texts that diverge inside a block: samples, beams.
# - Bytes of a block: `B ·` bytes per token over all layers; divide by layers for what a kernel sees, by the GPUs that
#   share heads.
# - Block size trades lookups and short runs (small) against empty ends and coarse matches (large); which side weighs
#   more depends on kernel, hardware and the lengths of the texts. The number of attention calls stays the same.
# - The layout changes no text, up to rounding.
# - Paging does not shrink a token's bytes and is not needed for continuous batching. It turns wasted memory into batch,
#   and batch into throughput, until cache reads or arithmetic take over.
