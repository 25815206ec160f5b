# %% [markdown] name="title"
# # 02c · The KV cache: many requests, one memory
#
# About 35 minutes. You need `a_mechanism` and `b_memory`. Requests have different lengths, arrive at any time, and
# share one memory. The lab is [Build a KV cache](../../labs/02_kv_cache/kv_cache.ipynb).

# %% name="setup"
import inspect

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, GREY, INK, ORANGE, figure, show, tidy
from reference_impl import LLM, Engine, EngineConfig, SamplingParams, course_model
from reference_impl.features.baselines.contiguous_cache import generate_contiguous_cache
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.kernels import reference
from reference_impl.theory import kv_cache
from reference_impl.theory.units import format_bytes

torch.set_num_threads(1)  # a model this small gains little from more, and times stay comparable
# The prefix cache is off, so that a prompt asked twice is computed twice; chapter 06 turns it on.
llm = LLM(course_model("target"), dtype="float32", kv_cache_bytes=8 * 2**20, prefix_cache="off")
model = llm.engine.model
each = llm.engine.kv_spec.bytes_per_token

text = llm.encode(inspect.getsource(Engine))
PROMPTS, OUTPUTS = (10, 30, 20, 60, 15, 45), (14, 36, 8, 24, 48, 10)  # six requests
prompts = [text[20 * i : 20 * i + n] for i, n in enumerate(PROMPTS)]
params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in OUTPUTS]
MAX_LEN = 256  # the length each could grow to

# %% [markdown] name="question"
# ## 1. A question with a number
#
# Six requests run together. The lengths of their outputs are not known in advance, so each gets a buffer for 256 tokens
# when it starts. Their prompts have 10, 30, 20, 60, 15 and 45 tokens; their outputs turn out to have 14, 36, 8, 24, 48
# and 10. **What percentage of the reserved memory is never written?**

# %% name="predict"
widgets.predict("02c-stranded", "What percentage of six buffers of 256 tokens is never written?", "%")

# %% [markdown] name="idea"
# ## 2. The idea
#
# Back to the wall of drawers. One text, one wall: easy. Now six texts want walls in one building.
#
# - You can give each the longest wall it may ever need (**one contiguous buffer per request**). That is simple, and
#   most of the building stays empty.
# - You can give each a few shelves at a time, wherever some are free, and keep a list of which text has which (**blocks
#   and block tables**, chapter 04). Then what is left over at the end of a request is less than one shelf.
#
# Either way the building is finite. The cache is a **budget that changes with every token**: each running request takes
# one more drawer per step. When nothing is free, new texts wait. When the texts inside outgrow the building, one of
# them has to leave and come back later (it is *preempted*).
#
# And one pass through the model has texts of different lengths side by side. Each token needs its own position, its own
# slot in the cache, and the right wall to look at.

# %% name="idea-figure" jupyter={"source_hidden": true}
from matplotlib.patches import Rectangle

fig = figure(7.6, 2.7)
left, right = fig.subplots(1, 2)
lens, reserve, colours, hatches = (5, 9, 3), 12, (BLUE, ORANGE, GREEN), ("", "//", "..")
for row, n in enumerate(lens):
    left.add_patch(Rectangle((0, -row), reserve, 0.8, facecolor="white", edgecolor=INK))
    left.add_patch(Rectangle((0, -row), n, 0.8, facecolor=colours[row], edgecolor="white", hatch=hatches[row]))
    left.text(reserve - 0.2, -row + 0.4, "unused", ha="right", va="center", fontsize=8)
owners = [0, 1, 0, 2, 1, 1, None, None, None]
used = {0: 4, 1: 4, 2: 1, 3: 3, 4: 4, 5: 1}  # of 4 tokens in each block
for i, owner in enumerate(owners):
    x, y = (i % 3) * 4.4, -(i // 3)
    right.add_patch(Rectangle((x, y), 4, 0.8, facecolor="white", edgecolor=INK))
    if owner is not None:
        right.add_patch(
            Rectangle((x, y), used[i], 0.8, facecolor=colours[owner], edgecolor="white", hatch=hatches[owner])
        )
for ax, title in (
    (left, "a buffer of 12 for each of three requests"),
    (right, "the same tokens in blocks of 4; three are free"),
):
    ax.set_xlim(-0.3, 13.2)
    ax.set_ylim(-2.3, 1.0)
    ax.set_title(title, fontsize=10, loc="left")
    ax.axis("off")
show(
    fig,
    "Left: three requests of 5, 9 and 3 tokens, each in a reserved buffer of 12; more than half is empty. Right: the "
    "same tokens in blocks of four that lie anywhere; only the last block of each request has room, and three are free.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# First the question: what is written, and what was reserved? A request writes its prompt and all outputs but the last.

# %% name="scratch-stranded"
written_in_all = sum(p + o - 1 for p, o in zip(PROMPTS, OUTPUTS, strict=True))
print(f"{written_in_all} of {len(PROMPTS)} x {MAX_LEN} = {len(PROMPTS) * MAX_LEN} reserved tokens are written")
widgets.reveal("02c-stranded", 100 * (1 - written_in_all / (len(PROMPTS) * MAX_LEN)))

# %% [markdown] name="scratch-ways-text"
# Three sequences of 3, 5 and 2 tokens go through attention together. Three ways to keep them apart: one large matrix
# with a mask, a rectangle padded to the longest, or one small matrix per sequence. All are right. They differ in how many
# scores they compute. **How many scores does each way compute?** The smallest of the three numbers is the question.

# %% name="scores-predict"
widgets.predict(
    "02c-scores", "Sequences of 3, 5 and 2 tokens: how many scores does the cheapest way compute?", "scores"
)


# %% name="scratch"
def softmax_attention(q, k, v, mask):  # q [..., n, d], k and v [..., m, d], mask [..., n, m] bool
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v, scores.numel()


def packed(q, k, v, lens):  # all tokens in one matrix; the mask allows own sequence and no later token
    owner = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    return softmax_attention(q, k, v, (owner[:, None] == owner) & torch.ones(len(q), len(q)).tril().bool())


def padded(q, k, v, lens):  # [sequences, longest, d]; what follows a sequence's end is garbage
    def box(t):
        out = torch.full((len(lens), max(lens), t.shape[-1]), 7.0)
        for i, piece in enumerate(t.split(lens)):
            out[i, : len(piece)] = piece
        return out

    causal = torch.ones(max(lens), max(lens)).tril().bool().expand(len(lens), -1, -1)
    out, scores = softmax_attention(box(q), box(k), box(v), causal)
    return torch.cat([out[i, :n] for i, n in enumerate(lens)]), scores


# %% [markdown] name="scratch-ragged-text"
# The third way, and all three on the same input.


# %% name="scratch-ragged"
def ragged(q, k, v, lens):  # one after the other, each with its own keys
    parts = zip(q.split(lens), k.split(lens), v.split(lens), strict=True)
    done = [softmax_attention(*part, torch.ones(n, n).tril().bool()) for part, n in zip(parts, lens, strict=True)]
    return torch.cat([out for out, _ in done]), sum(scores for _, scores in done)


lens = [3, 5, 2]
q, k, v = torch.randn(3, sum(lens), 8)
results = {way.__name__: way(q, k, v, lens) for way in (packed, padded, ragged)}
for name, (out, scores) in results.items():
    torch.testing.assert_close(out, results["ragged"][0])
    print(f"{name}: {scores} scores")
assert [results[name][1] for name in ("packed", "padded", "ragged")] == [
    sum(lens) ** 2,
    len(lens) * max(lens) ** 2,
    sum(n * n for n in lens),
]
widgets.reveal("02c-scores", results["ragged"][1])

# %% [markdown] name="scratch-reading"
# A mask discards results after they were computed. Engines use the third way: matrices and MLPs take all tokens of all
# requests in one flat list, and only attention splits them by request.
#
# In the padded way a causal mask is enough here, because the padding comes *after* each sequence. In decode it is not:
# a single query has no triangle, and would attend to the padding of its row. Then every row needs a mask of its own
# length. The lab asks for exactly that.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# A batch of the contiguous baseline: three rows, each with its own number of cached tokens. Look at positions and slots.
# Row `r` owns the slots from `r · 16`; a token at position `p` of row `r` is written to slot `16 r + p`.

# %% name="ragged-batch"
batch = ragged_batch([([11, 12, 13], 0), ([21], 5), ([31, 32], 2)], max_len=16, device=torch.device("cpu"))
for name in ("input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens"):
    print(f"{name:15s} {getattr(batch, name).tolist()}")

# %% name="engine-unequal"
together = generate_contiguous_cache(model, prompts[:3], 8)
alone = [generate_contiguous_cache(model, [p], 8)[0] for p in prompts[:3]]
assert together == alone
print("prompts of", [len(p) for p in prompts[:3]], "tokens: the same outputs together and alone")

# %% [markdown] name="engine-blocks-text"
# (Equal tokens, here in float32. Matrices of another number of rows may add in another order, so logits agree up to
# rounding, and in 16 bits a choice between two nearly equal ones can tip. Bitwise equality is what an engine's
# `batch_invariant=True` promises, at a price.)
#
# The engine does the same with blocks. Two requests grow in turn, so their blocks interleave. The block table keeps the
# order. That is all there is to paging; chapter 04 builds it.

# %% name="engine-blocks"
engine = Engine(model, EngineConfig(num_blocks=8, block_size=4, prefix_cache="off"))
a = engine.add(prompts[0][:6], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True), request_id="a")
b = engine.add(prompts[1][:3], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True), request_id="b")
for _ in range(7):
    engine.step()
print("block table of a:", a.block_table, " of b:", b.block_table, " free:", engine.block_pool.num_free)
print("slots of a, in order:", reference.context_slots(torch.tensor(a.block_table), a.num_computed_tokens, 4).tolist())

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# Now the six requests of the question, really run, in an engine with plenty of blocks. After each step we record how many tokens
# every running request has in the cache and how many blocks it holds, and compare with a buffer of 256 for each.

# %% name="measure"
roomy = Engine(model, EngineConfig(num_blocks=64, block_size=16, prefix_cache="off"))
added = [roomy.add(p, s, request_id=f"r{i}") for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
used, blocks, reserved = [], [], []
while roomy.has_work():
    roomy.step()
    running = list(roomy.requests.values())
    used.append(sum(r.num_computed_tokens for r in running))
    blocks.append(sum(len(r.block_table) for r in running) * 16)
    reserved.append(len(running) * MAX_LEN)
    assert used[-1] <= blocks[-1] < used[-1] + 16 * max(1, len(running))
written = sum(r.num_computed_tokens for r in added)
assert written == written_in_all
print(f"written: {written} of {len(added) * MAX_LEN} reserved tokens; "
      f"stranded {format_bytes(kv_cache.stranded_bytes(len(added) * MAX_LEN, written, each))}")  # fmt: skip

# %% name="measure-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 3.0)
ax = fig.subplots()
steps = np.arange(1, len(used) + 1)
scale = each / 1e6
ax.step(
    steps, np.array(reserved) * scale, where="post", color=GREY, linewidth=2, label="reserved, 256 tokens per request"
)
ax.step(steps, np.array(blocks) * scale, where="post", color=ORANGE, label="held in blocks of 16")
ax.plot(steps, np.array(used) * scale, color=BLUE, linestyle="--", label="formula: tokens x bytes per token")
tidy(ax, "step", "MB")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Memory of six requests over the steps. The contiguous reservation is several times higher than what is used. "
    "The blocks held follow the formula closely, at most one block per request above it.",
)

# %% [markdown] name="measure-reading"
# The two lower curves differ by less than one block per running request, which the cell asserts. The reservation is not
# a bug. It is the price of not knowing how long an output will be.
#
# ### When memory is short
#
# The same six requests in an engine with 12 blocks of 16 tokens. That is less than they need together. And a step may
# compute at most 48 tokens, so long prompts are prefilled in chunks.
#
# A request that is preempted keeps its tokens and loses its keys and values. **How many tokens will be computed a second
# time?** With plenty of blocks each is computed once, as `measure` asserts.

# %% name="tight-predict"
widgets.predict("02c-again", "12 blocks of 16 for six requests: how many tokens are computed a second time?", "tokens")


# %% name="tight"
def run(num_blocks, max_tokens=None):
    engine = Engine(
        model, EngineConfig(num_blocks=num_blocks, block_size=16, max_num_batched_tokens=48, prefix_cache="off")
    )
    done = []
    for i, (p, s) in enumerate(zip(prompts, params, strict=True)):
        limit = s.max_tokens if max_tokens is None else min(s.max_tokens, max_tokens)
        sampling = SamplingParams(max_tokens=limit, temperature=0, ignore_eos=True)
        done.append(engine.add(p, sampling, request_id=f"r{i}"))
    while engine.has_work():
        engine.step()
    return engine.trace, done


trace, tight = run(num_blocks=12)

# %% [markdown] name="tight-run-text"
# What was preempted, what was computed again, and do the outputs change?

# %% name="tight-run"
needed = sum(-(-(p + o - 1) // 16) for p, o in zip(PROMPTS, OUTPUTS, strict=True))
preempted = [request_id for step in trace.steps() for request_id in step.preempted]
computed = sum(row.num_tokens for step in trace.steps() for row in step.rows)
print(f"{needed} blocks needed together, 12 there; steps: {len(trace.steps())} instead of {len(roomy.trace.steps())}")
print(
    f"preempted: {preempted or 'nobody'}; tokens computed {computed} instead of {written}: {computed - written} a second time"
)
assert [r.output_tokens for r in tight] == [r.output_tokens for r in added]
print("the outputs are the same as with plenty of memory")
widgets.reveal("02c-again", computed - written)

# %% [markdown] name="explore-text"
# ## 6. Explore
#
# The timeline of that run, from the engine's trace. Move the step with the slider or the arrow keys. Find: a request
# that waits although others run; a prompt that takes two steps; the step in which a request is preempted, and what it
# costs when it resumes (orange, hatched). The lower curve is the number of free blocks.

# %% name="explore"
widgets.timeline(trace)

# %% [markdown] name="explore-caps"
# **Context length is a budget.** Operators cap requests far below the model's maximum, because a cap makes concurrency
# predictable. The cell caps outputs and counts preemptions and recomputed tokens, with the same 12 blocks.

# %% name="caps"
capped = []
for cap in (4, 16, None):
    capped_trace, done = run(num_blocks=12, max_tokens=cap) if cap else (trace, tight)
    again = sum(row.num_tokens for s in capped_trace.steps() for row in s.rows) - sum(
        r.num_computed_tokens for r in done
    )
    preemptions = sum(len(s.preempted) for s in capped_trace.steps())
    capped.append([cap or "none", preemptions, again, max(s.num_waiting for s in capped_trace.steps())])
widgets.table(capped, ["cap of the outputs", "preemptions", "tokens computed again", "most waiting at once"])

# %% [markdown] name="errata-padding"
# ## 7. What the cheat sheets get wrong
#
# **"Continuous batching needs no padding; the attention mask keeps sequences apart."** (E03.4) A mask over one packed
# matrix would compute all the scores and throw most of them away, as section 3 counted. Engines use a flat list of
# tokens for the matrices, and attention per sequence. And some padding remains: a captured CUDA graph runs one batch
# size only, so the batch is padded to the next captured size.

# %% name="errata-padding-cell"
print({name: scores for name, (_, scores) in results.items()})
sizes = [1, 2, 4, *range(8, 257, 8)]
graphs = {rows: min(s for s in sizes if s >= rows) for rows in (3, 9, 20, 100)}
widgets.table(
    [[rows, size, f"{1 - rows / size:.0%}"] for rows, size in graphs.items()],
    ["requests", "in a graph for", "rows that are padding"],
)

# %% [markdown] name="errata-padding-more"
# The captured sizes above are an example; engines choose their own lists.
#
# **"Reserve the maximum, the rest is for safety."** (E02.6) You have seen what it strands. Here is the same for a request
# of a 70B model, with 8,192 tokens reserved:

# %% name="errata-reserve-cell"
from reference_impl.theory.model_shapes import model as shape_of

per_token = kv_cache.bytes_per_token(shape_of("llama-3-70b"))
for tokens in (500, 2000, 8192):
    lost = kv_cache.stranded_bytes(8192, tokens, per_token)
    print(f"{tokens:5d} of 8,192 used: {format_bytes(lost)} stranded ({lost / (8192 * per_token):.0%}); in blocks of 16 at most "
          f"{format_bytes(15 * per_token)}")  # fmt: skip

# %% [markdown] name="errata-headroom"
# **"It fits, so it can be served."** (E02.9) A load that fills the memory at the start overflows as it grows, because
# each running request adds a token per step. The run above had to stop a request that it had started.

# %% [markdown] name="next-text"
# ### What you can add to your own cache
#
# Four extensions are often suggested after a first KV cache. Where they are in this course:
#
# | extension | where |
# |---|---|
# | two requests with the same prefix share rows | chapter 06, prefix caching |
# | a cache in blocks | the engine has it (section 4); you build it in chapter 04 |
# | temperature and top-p | the engine has it, below |
# | a draft model that proposes tokens | chapter 08, speculative decoding |
#
# Sampling needs nothing from the cache. With a seed it is reproducible, whatever else runs in the batch.

# %% name="sampling"
warm = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
first, again = llm.generate([prompts[1], prompts[1]], warm)
other = llm.generate([prompts[1]], SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=8, ignore_eos=True))[
    0
]
assert first.token_ids == again.token_ids
print(repr(first.text), repr(other.text), sep="\n")

# %% [markdown] name="worked-problem"
# ### Worked problem: reserve or fill
#
# The course's deployment: Llama-3-70B in 16 bits on four H100 of 80 GB with tensor parallelism, 90 % of the memory
# usable, 327,680 bytes of cache per token, 448,280 tokens of it beside the weights.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_02c_a_reservation_for_the_longest_case_costs_most_of_the_seats -->
#
# *Prompts have 1,500 tokens. Outputs have 500 on average, and `max_tokens` is 4,096. How many requests run at once if
# each reserves its longest case? How many if each holds blocks of 16 for what it has, with outputs half-way done on
# average? How much memory does the reservation strand, and how much do the blocks? What is the price of the second way?*
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_02c_a_reservation_for_the_longest_case_costs_most_of_the_seats -->
#
# <details><summary>Answer</summary>
#
# Reserved: 1,500 + 4,096 = 5,596 tokens each, so **80** requests. At the end a request has written 1,999 tokens. 3,597
# of its reservation, 64 %, were never used: 1.18 GB each, 94.3 GB for all 80.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_02c_a_reservation_for_the_longest_case_costs_most_of_the_seats -->
#
# In blocks: 1,750 tokens half-way, 110 blocks, 1,760 tokens: **254** requests, 3.2 times as many. A block strands at
# most 15 tokens, 4.9 MB for each request and 1.2 GB for all 254.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_02c_a_reservation_for_the_longest_case_costs_most_of_the_seats -->
#
# The price: nothing guarantees that the 254 stay half-way. If all of them reach their mean end at the same time, they
# need 508 thousand tokens, 13 % more than there are. Then some are preempted and computed again. A plan for the ends
# instead of the middles has room for 224.
# <!-- tested: tests/claims/test_worked_02_03.py::test_worked_02c_a_reservation_for_the_longest_case_costs_most_of_the_seats -->
#
# </details>

# %% [markdown] name="production"
# ## 8. In production
#
# As of 2026. Names of options change; look them up in the version you run.
#
# **vLLM** admits a request if its whole input fits into the free blocks (`scheduler_reserve_full_isl`, on by default),
# and while `max_num_seqs` and `max_num_batched_tokens` allow. When running requests need more blocks than are free, it
# preempts one and recomputes its tokens later; since the V1 engine (2025) preemption is always by recomputing. The engine of this course does the same by default.
#
# **SGLang** also admits requests without knowing how long they get. When the pool is full it *retracts* running
# requests. `--schedule-conservativeness` sets how careful it is when it admits.
#
# **TensorRT-LLM** lets you choose. `GUARANTEED_NO_EVICT`, the default, admits a request only if it can finish without
# being paused, so it reserves for the longest case. `MAX_UTILIZATION` packs more and pauses requests when necessary.
#
# **Hugging Face transformers** `generate` pads a batch to a rectangle, usually on the left, with an attention mask and
# positions per row. That is the contiguous baseline of this notebook.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Then build the cache yourself, with a batch of two lengths: [lab 02](../../labs/02_kv_cache/kv_cache.ipynb).

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("02_kv_cache").draw(seed=1, tag="requests"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Rows of unequal length: a length per row determines position, cache slot and mask. Padding must be masked.
# - Ragged batch: a flat list of tokens for the matrices, attention per sequence. A mask alone wastes the scores it
#   discards.
# - A contiguous reservation strands `reserved − used` tokens per request; blocks strand less than one block each.
# - The cache is a budget that shrinks with every token of every running request. When blocks run out, new requests
#   wait, and the request that came last is preempted and recomputed.
# - Cap the context (prompt and output) below the model's maximum to make concurrency predictable.
