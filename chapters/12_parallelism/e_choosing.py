# %% [markdown] name="title"
# # 12e · Choosing
#
# About 40 minutes. You need what the parts before this one divide: matrices (a), messages (b), layers and replicas (c),
# experts (d). Here a layout is chosen, by formula, for links and racks that exist; then a running model gets new weights.
# Sections marked *(more)* can be left out.

# %% name="setup"
import random
import shutil
import tempfile
import time
from dataclasses import replace
from math import exp
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from chapters import widgets
from chapters.widgets.figure import BLUE, GREY, ORANGE, figure, show, tidy
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.cli.planning import vllm_flags
from reference_impl.theory import collectives, experts, kv_cache, latency, training
from reference_impl.theory.hardware import device
from reference_impl.theory.links import LINKS, Topology, link, topology
from reference_impl.theory.mixtures import mixture_of
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.plan import plan
from reference_impl.theory.schedules import best_all_reduce, closed
from reference_impl.theory.units import GB, format_bytes, format_seconds

torch.set_num_threads(1)
h100, l70, l8 = device("H100"), shape_of("llama-3-70b"), shape_of("llama-3-8b")
ENGINE = {"device": "cpu", "num_blocks": 256, "block_size": 4}

# %% [markdown] name="question"
# ## 1. A question with a number
#
# Llama-3-70B in 16 bits has 141 GB of weights. Two GPUs of 80 GB have 160 GB, so it fits; an engine uses 90 % of a GPU.
# **For how many tokens, of all requests together, is there room in the KV cache?**
# <!-- printed: scratch-room -->

# %% name="predict"
widgets.predict("12e-room", "Tokens of KV cache beside a 70B on two H100?", "tokens")

# %% [markdown] name="idea"
# ## 2. The idea
#
# Moving house: does it fit into the van; how long is one trip; is the road wide enough; and only then, how many vans? A
# layout is chosen in the same order.
#
# 1. **Bytes.** Weights and caches of the load have to fit. That gives the fewest GPUs of one copy.
# 2. **Time of one stream.** If TPOT or TTFT is missed, more GPUs have to share each token: tensor parallelism (TP).
# 3. **Links.** What is exchanged in every layer stays on the fast link. What crosses nodes is what is sent rarely:
#    hidden states between stages (PP), or nothing (replicas, DP).
# 4. **Throughput.** The rest of the GPUs become replicas of the smallest layout that passes 1 and 2.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.7)
ax = fig.subplots()
ax.set_xlim(0, 10)
ax.set_ylim(0, 4)
ax.axis("off")


def box(x, y, text, colour, width=1.15):
    ax.text(
        x,
        y,
        text,
        ha="center",
        va="center",
        fontsize=8,
        bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": colour},
    )


for left in (0, 5.6):
    ax.plot([left + 0.6, left + 3.8], [3.0, 3.0], color=BLUE, linewidth=5, zorder=0)
    for i, name in enumerate(("GPU 0", "...", "GPU 7")):
        box(left + 0.6 + 1.6 * i, 3.0, name, BLUE)
    for i, name in enumerate(("NIC 0", "CPU, memory", "NIC 7")):
        box(left + 0.6 + 1.6 * i, 1.2, name, GREY)
    for i in (0, 2):
        ax.plot([left + 0.6 + 1.6 * i] * 2, [1.5, 2.7], color=GREY, linewidth=2)
        ax.plot(
            [left + 2.2, left + 0.6 + 1.6 * i],
            [1.5, 2.7],
            ":",
            color=GREY,
            linewidth=1.2,
        )
    ax.text(left + 2.2, 3.6, "NVLink", ha="center", fontsize=8)
    ax.text(left + 0.7, 2.05, "PCIe", ha="left", fontsize=8)
ax.plot([4.35, 5.7], [1.2, 1.2], color=ORANGE, linewidth=2)
ax.text(5.0, 0.4, "InfiniBand, RoCE or EFA", ha="center", fontsize=8)
show(
    fig,
    "Two nodes. In each, GPUs 0 to 7 share NVLink. A network card (NIC) sits beside "
    "each GPU on PCIe, and the CPU with its memory is on PCIe, too. Between the nodes "
    "the network cards are joined by InfiniBand, RoCE or EFA.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# **Bytes first.** What is left beside the weights, over the bytes of a token:


# %% name="scratch-room"
def room(n, bits, per_token=2 * 80 * 8 * 128 * 2):
    """Tokens of KV cache beside a 70B's weights on n H100, at 90 % of their memory."""
    left = 0.9 * n * h100.capacity - l70.num_params * bits / 8
    return int(left / per_token) if left > 0 else None


print(f"weights in 16 bits: {format_bytes(l70.num_params * 2)}")
rows = []
for n in (1, 2, 4, 8):
    each = [room(n, bits) for bits in (16, 8, 4)]
    assert each[0] is None or each[0] == kv_cache.tokens_that_fit(
        n * h100.capacity, kv_cache.weight_bytes(l70), kv_cache.bytes_per_token(l70)
    )
    rows.append([n, *("does not fit" if t is None else f"{t:,}" for t in each)])
widgets.reveal("12e-room", room(2, 16))
widgets.table(rows, ["GPUs", "KV tokens, 16-bit weights", "8-bit", "4-bit"])

# %% [markdown] name="scratch-room-reading"
# On two GPUs the 70B "fits", and one or two long chats fill what is left. So the usual choice in 16 bits is TP 4 or TP 8, and TP 2
# with weights of 8 bits (E12.7).
#
# **Then the time of one stream**: weights are read by all ranks at once, and two all-reduces in each of 80 layers are paid.
# With rings, 8 GPUs in a node, and the nodes by InfiniBand, *at how many GPUs is a token of one stream fastest?*

# %% name="scratch-best-predict"
widgets.predict(
    "12e-best", "GPUs at which a 70B's single stream is fastest, with rings?", "GPUs"
)


# %% name="scratch-best"
def token(shape, n, way):
    """Least seconds of one stream's token on n ranks."""
    message = collectives.all_reduce_message(1, shape.hidden_size)
    where = topology("DGX H100")
    read = kv_cache.read_bytes(shape, 16) / (n * h100.bandwidth)
    if n == 1:
        return read
    cost = best_all_reduce(message, n, where) if way == "best" else None
    cost = cost or closed("ring", message, n, where)
    return read + collectives.all_reduces_per_token(shape.layers) * cost.seconds


DEGREES = (1, 2, 4, 8, 16, 32)
curves = {(s.name, way): [token(s, n, way) for n in DEGREES]
          for s in (l70, l8) for way in ("ring", "best")}  # fmt: skip
names = [f"{name}, {way}" for name, way in curves]
rows = [[n, *(format_seconds(times[i]) for times in curves.values())]
        for i, n in enumerate(DEGREES)]  # fmt: skip
fastest = {at: DEGREES[int(np.argmin(times))] for at, times in curves.items()}
widgets.reveal("12e-best", fastest["llama-3-70b", "ring"])
print(", ".join(f"{name} {way}: {n} GPUs" for (name, way), n in fastest.items()))
widgets.table(rows, ["GPUs", *names])

# %% name="curves" jupyter={"source_hidden": true}
fig = figure(7.0, 2.8)
axes = fig.subplots(1, 2, sharey=True)
for ax, name in zip(axes, ("llama-3-70b", "llama-3-8b"), strict=True):
    for way, style, colour in (("ring", "--", ORANGE), ("best", "-", BLUE)):
        times = [1e3 * t for t in curves[name, way]]
        ax.plot(DEGREES, times, style, color=colour, marker="o", label=way)
    ax.axvline(8, color=GREY, linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(DEGREES, DEGREES)
    ax.minorticks_off()
    tidy(ax, "GPUs, 8 a node", "ms per token" if ax is axes[0] else "", name)
    ax.set_yticks((0.5, 1, 3, 10, 30), ("0.5", "1", "3", "10", "30"))
axes[0].legend(fontsize=8, frameon=False)
said = "; ".join(
    f"{name} {way} " + ", ".join(f"{1e3 * t:.2f}" for t in times)
    for (name, way), times in curves.items()
)
show(fig, f"Milliseconds per token on 1, 2, 4, 8, 16 and 32 GPUs: {said}.")

# %% [markdown] name="scratch-best-reading"
# **More GPUs can slow one stream.** Reading falls as 1/n, messages do not. A ring's steps grow with n, and beyond the node
# each of them waits for the network: there a token costs more than twice as much as on eight. With the best all-reduce for
# each size the 70B gains longer, and the 8B still turns. But to gain is not to pay: the last doublings of the GPUs shorten
# a token by much less than half.
#
# **Then the links.** Per direction, what one GPU has (vendors print both directions of NVLink, E00.8), and 160 all-reduces
# of one token (16 KiB) and of 64 over eight ranks, if all of them were joined by that link:

# %% name="scratch-links"
rows = []
for row in LINKS.values():
    if row.alpha is None:
        continue
    alone = Topology(row.name, 8, row, row)
    times = [160 * best_all_reduce(16384 * tokens, 8, alone).seconds
             for tokens in (1, 64)]  # fmt: skip
    if row.scope == "chip":  # joins a GPU with its CPU
        times = []
    texts = [format_seconds(t) for t in times] or ["-", "-"]
    speed = f"{row.per_direction / GB:,.1f}"
    rows.append([row.name, row.since, row.scope, speed, f"{row.alpha * 1e6:g}", *texts])
headers = ["link", "since", "spans", "GB/s one way", "µs", "160 of 1", "160 of 64"]
widgets.table(rows, headers)

# %% [markdown] name="scratch-links-reading"
# One token is latency: a NIC with a ninth of NVLink 4's bandwidth takes not nine but about three times as long. Sixty-four tokens,
# and prompts even more, are bandwidth. Bandwidths are as specified; some of the µs are assumed (`LINKS` says which). Each GPU
# has its link for itself, as in nodes with one NIC for each GPU.
# <!-- printed: scratch-links -->

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The planner, `plan`, does that for every TP × PP × DP with the right product, on its busiest rank, with the messages that
# the engine sends: the command is `inferlab plan --model llama-3-70b --gpu h100 --gpus 8 --ttft 0.5 --tpot 0.05`. Half of the peak
# arithmetic and 70 % of the bandwidth are assumed; prompts of 1,024 tokens, answers of 256.
# <!-- stands: reference_impl/theory/plan.py -->
#
# *Which layout of eight GPUs gives the most tokens per second at 50 ms: one of 8, two of 4, four of 2?*

# %% name="engine-predict"
widgets.predict("12e-tp", "TP of the best layout of eight H100 at TPOT 50 ms?", "ranks")


# %% name="engine-plan"
def compare(found, count=6):
    """A planner's layouts as a table."""
    rows = []
    for each in found.layouts[:count]:
        sent = ", ".join(f"{format_bytes(b)} {on}" for on, b in each.per_token.items())
        times = [format_seconds(t) for t in (each.ttft, each.tpot)]
        rate = f"{each.tokens_per_second:,.0f}"
        share = f"{each.communication:.0%}"
        rows.append([each.name, each.batch, *times, rate, f"{each.kv_tokens:,}", share,
                     sent or "0 B"])  # fmt: skip
    headers = ["layout", "at once", "TTFT", "TPOT", "tokens/s", "KV tokens"]
    return widgets.table(rows, [*headers, "messages", "sent per token"])


asked = plan("llama-3-70b", "H100", 8, ttft=0.5, tpot=0.05)
widgets.reveal("12e-tp", asked.best.tp)
print(asked.why)
print(vllm_flags(asked, asked.best, "llama-3-70b"))
compare(asked)

# %% [markdown] name="engine-plan-reading"
# The first two are close, and which of them is first depends on what is asked: see the next table. **Four replicas of TP 2
# fit, and write less than a fifth of the tokens**, since there is hardly any room for caches. This is the answer to "why
# not TP 2". Two stages of TP 2, twice over, have the room, but each token is read at the speed of two GPUs.

# %% name="engine-asked"
rows = []
for name, options in (
    ("as above", {"tpot": 0.05}),
    ("TPOT 20 ms", {"tpot": 0.02}),
    ("8-bit weights", {"tpot": 0.05, "weight_bits": 8}),
    ("prompts of 8,192", {"tpot": 0.05, "prompt_tokens": 8192}),
    ("one stream", {"batch": 1}),
):
    best, second = plan("llama-3-70b", "H100", 8, **options).layouts[:2]
    rates = [f"{each.name}: {each.tokens_per_second:,.0f}" for each in (best, second)]
    rows.append([name, *rates, format_seconds(best.tpot)])
widgets.table(rows, ["asked", "first, tokens/s", "second", "TPOT of the first"])

# %% [markdown] name="engine-nodes-text"
# ### Two nodes
#
# "Tensor parallel inside a node, pipeline across": what goes over which link if it is kept, and if not? A 405B in 16 bits
# needs more than a node. TP 16 divides every matrix over both nodes; TP 8 × PP 2 makes each node a stage.

# %% name="engine-nodes-predict"
widgets.predict(
    "12e-across",
    "TP 8 x PP 2 of a 405B: bytes a rank sends to the other node, per token?",
    "bytes",
)

# %% name="engine-nodes"
rows, sent = [], []
for tp, pp in ((16, 1), (8, 2)):
    one, prompts = (
        plan("llama-3.1-405b", "H100", 16, tp=tp, pp=pp, **options).best
        for options in ({"batch": 1}, {"batch": 32, "prompt_tokens": 2048})
    )
    over = one.per_token["InfiniBand NDR 400G"]
    cells = [format_bytes(over), format_seconds(one.tpot), f"{one.communication:.0%}"]
    busy = f"{prompts.tokens_per_second:,.0f}"
    rows.append([one.name, *cells, format_seconds(prompts.ttft), busy])
    sent.append(over)
widgets.reveal("12e-across", sent[1])
print(f"TP 16 sends {sent[0] / sent[1]:.0f} times as much to the other node")
headers = ["layout", "to the other node", "one stream's token", "messages"]
widgets.table(rows, [*headers, "TTFT of 2,048", "tokens/s of 32"])

# %% [markdown] name="engine-nodes-reading"
# **More than two hundred times the bytes.** By this model TP 16 nevertheless has the shorter token: twice the GPUs read at once, and an
# all-reduce between two nodes at a few µs costs less than that saves. So "never TP across nodes" is no law. It is a rule
# for throughput, slow links, and collectives that are slower than their formula. Long prompts, over three links:

# %% name="engine-prompt"
rows = []
for name in ("InfiniBand NDR 400G", "AWS EFA 400G", "Ethernet 100G"):
    for tp, pp in ((16, 1), (8, 2)):
        best = plan("llama-3.1-405b", "H100", 16, tp=tp, pp=pp, batch=32, between=name,
                    prompt_tokens=8192).best  # fmt: skip
        times = [format_seconds(t) for t in (best.ttft, best.step)]
        rate = f"{best.tokens_per_second:,.0f}"
        rows.append([name, best.name, *times, f"{best.communication:.0%}", rate])
headers = ["between nodes", "layout", "TTFT of 8,192", "step of 32", "messages"]
widgets.table(rows, [*headers, "tokens/s"])

# %% [markdown] name="engine-prompt-reading"
# One prompt, and one step, are shorter where both nodes work on them at once. **Tokens per second are more with stages**, on
# each link: different prompts fill both stages, and hardly anything is sent. (With the shorter prompts of the table before,
# TP 16 was ahead.) So "TP inside a node, PP across" is about many requests with much to send.

# %% [markdown] name="hybrid-text"
# ### Combined layouts *(more)*
#
# A table of "which combination for which use", computed: the best of each, and why it is first.

# %% name="hybrid"
uses = [
    ("an 8B, many users", ("llama-3-8b", "H100", 8), {"tpot": 0.05}),
    ("an 8B, one stream", ("llama-3-8b", "H100", 8), {"batch": 1}),
    ("a 70B, chat", ("llama-3-70b", "H100", 8), {"tpot": 0.05}),
    ("a 70B without NVLink", ("llama-3-70b", "H100", 8),
     {"tpot": 0.1, "inside": "PCIe 5 x16", "prompt_tokens": 8192}),
    ("a 405B in FP8, one node", ("llama-3.1-405b", "H100", 8),
     {"tpot": 0.1, "weight_bits": 8}),
    ("DeepSeek-V3, one node", ("deepseek-v3", "H200", 8),
     {"tpot": 0.05, "weight_bits": 8}),
    ("DeepSeek-V3, two nodes", ("deepseek-v3", "H200", 16),
     {"tpot": 0.05, "weight_bits": 8}),
]  # fmt: skip
rows = []
for use, (name, gpu, n), options in uses:
    best = plan(name, gpu, n, **options).best
    rate = f"{best.tokens_per_second:,.0f}"
    rows.append([use, f"{n} x {gpu}", best.name, rate, f"{best.communication:.0%}"])
widgets.table(rows, ["use", "GPUs", "first layout", "tokens/s", "messages"])

# %% [markdown] name="rack-text"
# ### A rack of 72 *(more)*
#
# GB200 NVL72 (2024) joins 72 GPUs by NVLink 5, nine times as many as a node. A dense model gains little, since its TP is
# limited by heads long before. **Experts gain**: each layer's all-to-alls then stay on NVLink. DeepSeek-V3 on 72 B200, with
# NVLink among 72, and the same GPUs in nodes of eight:
# <!-- stands: reference_impl/theory/links.py -->

# %% name="rack"
sizes = [{"tp": 1, "dp": 72, "ep": 72}, {"tp": 8, "dp": 9, "ep": 1}]
rows, rates = [], []
for node in (72, 8):
    for fixed in sizes:
        best = plan("deepseek-v3", "B200", 72, weight_bits=8, tpot=0.05, pp=1,
                    devices_per_node=node, **fixed).best  # fmt: skip
        rates.append(best.tokens_per_second / 72)
        weights, share = format_bytes(best.weights), f"{best.communication:.0%}"
        rows.append([node, best.name, weights, best.batch, share, f"{rates[-1]:,.0f}"])
print(f"EP 72 in the rack: {rates[0] / rates[1]:.1f} times the replicas of TP 8")
print(f"EP 72 over nodes of eight: {rates[2] / rates[3]:.1f} times")
headers = ["share NVLink", "layout", "weights/GPU", "at once", "messages"]
widgets.table(rows, [*headers, "tokens/s per GPU"])

# %% [markdown] name="rack-reading"
# Even experts, no overlap, TPOT of 50 ms: a formula's rack. It is one group, so **one GPU that dies concerns all 72**, where
# of replicas only one would end. *Elastic* expert parallelism drops the rank, finds its experts elsewhere, and goes on
# with 71. Lost are the caches of its own requests, which are computed again, and experts without a second copy:
# <!-- stands: reference_impl/theory/plan.py -->

# %% name="rack-death"
mixture, draw = mixture_of(shape_of("deepseek-v3")), random.Random(1)
loads = [draw.lognormvariate(0, 0.8) for _ in range(mixture.num_experts)]
before = experts.placed(loads, 72, num_redundant=32)  # four slots on each rank
left = before[1:]  # rank 0 has died
alive = {expert for rank in left for expert in rank}
gone = [expert for expert in before[0] if expert not in alive]
single = mixture.num_experts - sum(n > 1 for n in experts.replicas(loads, 288))
after = experts.placed(loads, 71, num_redundant=28)
one = mixture.expert_params(7168) * mixture.layers  # FP8: a byte each, all layers
rows = [
    [name, f"{experts.imbalance(experts.rank_loads(loads, where)):.2f}"]
    for name, where in (("72 ranks", before), ("71 ranks, placed again", after))
]
print(f"of {mixture.num_experts} experts {single} have one place only")
print(f"rank 0 had {len(before[0])} slots; without a copy elsewhere: {len(gone)}")
print(f"to fetch: {format_bytes(len(gone) * one)}; a restart: {format_bytes(671e9)}")
widgets.table(rows, ["placement", "busiest rank over mean"])

# %% [markdown] name="rack-death-reading"
# Replicas of *hot* experts do not protect the cold ones. These are fetched, from host memory or from a peer, into slots of
# replicas that can be spared. Until then the router masks them, which changes texts, or steps wait.

# %% [markdown] name="weights-text"
# ## 5. Measure and explain
#
# ### New weights in flight
#
# In reinforcement learning the engine writes answers (*rollouts*) with weights that a trainer keeps changing. If all requests
# had to end first, GPUs would idle until the longest is done. `LLM.update_weights` changes weights between two steps (*in
# flight*). Here the "trained" model is the course model's folder with every weight changed at random by some percent:

# %% name="weights-folder"
OLD = Path(course_model())
holder = tempfile.TemporaryDirectory()
NEW = Path(holder.name) / "trained"
shutil.copytree(OLD, NEW)
tensors, noise = load_file(NEW / "model.safetensors"), torch.Generator().manual_seed(1)
for name, weight in tensors.items():
    changed = weight.float() * (1 + 0.15 * torch.randn(weight.shape, generator=noise))
    tensors[name] = changed.to(weight.dtype)
save_file(tensors, NEW / "model.safetensors", {"format": "pt"})
print(f"{len(tensors)} tensors changed")


# %% name="weights-start"
def ask(prompt):
    """Runs a prompt to its end; how many of its tokens were found in the cache."""
    request = llm.engine.add(llm.encode(prompt), GREEDY)
    while llm.engine.has_work():
        llm.engine.step()
    return request.num_cached_tokens


llm = LLM(OLD, dtype="float32", **ENGINE)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPT, OTHER = "def read_lines(path):\n", "class Queue:\n    def __init__(self):\n"
found = [ask(OTHER), ask(OTHER)]  # the second time its beginning is in the cache
running = llm.start(PROMPT, GREEDY)
for _ in range(12):
    llm.step()
request = running.request
num = request.num_prompt_tokens
print(f"prompt {num} tokens, written {len(request.output_tokens)}")
print(f"keys and values of {request.num_computed_tokens} tokens are in the cache")

# %% [markdown] name="weights-ask"
# Now the weights change in the middle of this request. **For how many tokens are keys and values computed in the next
# step?** (Without the update it would be one.)

# %% name="weights-predict"
widgets.predict(
    "12e-again", "Tokens that the step after the update computes?", "tokens"
)

# %% name="weights-update"
known = list(request.tokens)
began = time.perf_counter()
llm.update_weights(NEW)
took = time.perf_counter() - began
print(f"took {format_seconds(took)}; K/V now of {request.num_computed_tokens} tokens")
llm.step()
again = request.num_computed_tokens
widgets.reveal("12e-again", again)
while running.unfinished:
    llm.step()
fresh = LLM(NEW, dtype="float32", **ENGINE)
rest = replace(GREEDY, max_tokens=24 - (len(known) - request.num_prompt_tokens))
assert fresh.generate(known, rest)[0].token_ids == request.tokens[len(known) :]
split = len(known) - request.num_prompt_tokens
for name, tokens in (("old", request.output_tokens[:split]),
                     ("new", request.output_tokens[split:])):  # fmt: skip
    print(f"{name} weights: {llm.tokenizer.decode(tokens)!r}")
print(f"computed again: {again} tokens, all that were known ({len(known)})")

# %% [markdown] name="weights-reading"
# The text is half of one model and half of another. What was written stays; its keys and values are of the old model, so
# they are computed again, in one step, and what follows is what the new model alone writes after that beginning (the
# assertion). **And the prefix cache?** Another prompt was run twice before the update, and is run twice now:

# %% name="weights-cache"
after = [ask(OTHER), ask(OTHER)]
length = len(llm.encode(OTHER))
rows = [["before the update", *found], ["after the update", *after]]
widgets.table(rows, [f"found of {length} tokens", "first time", "second time"])

# %% [markdown] name="weights-cache-reading"
# | what an engine keeps | after new weights |
# |---|---|
# | keys and values of running requests, prefix cache, pages in host memory or a store | of the old model: computed again, forgotten |
# | the text so far, seeds, stop strings, grammars | valid |
# | CUDA graphs | valid, if weights are copied *in place* |
# | a draft model | valid: drafts are checked. Fewer are accepted |
#
# Some systems keep old keys and values of running requests on purpose (PipelineRL, Piché et al. 2025). The reason:
# <!-- source: Piché et al. 2025, PipelineRL, read November 2026 -->

# %% name="weights-cost"
best = plan("llama-3-70b", "H100", 8, tp=8, tpot=0.05).best
each = best.weights  # of a rank: shards, loaded side by side
rows = [
    [f"a rank's {format_bytes(each)} over {name}",
     format_seconds(link(name).seconds(each, each))]
    for name in ("PCIe 5 x16", "InfiniBand NDR 400G", "Ethernet 100G")
]  # fmt: skip
prompts = best.batch * best.ttft
rows.append([f"{best.batch} running requests again", format_seconds(prompts)])
widgets.table(rows, ["70B on eight H100", "time"])

# %% [markdown] name="weights-cost-reading"
# Weights arrive *by shards*: each rank gets its own part, so eight links work at once. The expensive part is the second one,
# the prefill of everything that runs; it can be spread over steps as any chunked prefill.
#
# ### Trainer and engine are not the same function
#
# Policy gradients weigh a token by $r = p_\text{trainer}(t) / p_\text{engine}(t)$, the *importance ratio*. With equal
# weights it should be 1. Here the engine samples in a cheaper format, and float32 (the trainer) scores the same text.
# *What is the largest factor of any token, an engine in int8?*

# %% name="mismatch-predict"
widgets.predict(
    "12e-ratio", "Largest factor between trainer and int8 engine, one token?", "times"
)

# %% name="mismatch"
llm.update_weights(OLD)  # back again: the engine in float32 is the trainer
trainer = llm
starts = ["def add(a, b):\n", "import os\n", "class Queue:\n", "try:\n", "for i in "]
drawn = [SamplingParams(max_tokens=24, seed=i, logprobs=0, ignore_eos=True)
         for i in range(len(starts))]  # fmt: skip
scoring = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
ratios = {}
for name, options in (("bfloat16", {"dtype": "bfloat16"}),
                      ("int8", {"dtype": "float32", "quantization": "int8"}),
                      ("int4", {"dtype": "float32", "quantization": "int4"})):  # fmt: skip
    outputs = LLM(OLD, **ENGINE, **options).generate(starts, drawn)
    both = zip(starts, outputs, strict=True)
    texts = [trainer.encode(start) + out.token_ids for start, out in both]
    scored = trainer.generate(texts, scoring)
    ratios[name] = [[s.logprob - e.logprob for s, e in zip(
        score.prompt_logprobs[-24:], out.logprobs, strict=True)]
        for score, out in zip(scored, outputs, strict=True)]  # fmt: skip
factors = {name: exp(np.abs(each).max()) for name, each in ratios.items()}
widgets.reveal("12e-ratio", factors["int8"])

# %% name="mismatch-table"
rows = []
for name, each in ratios.items():
    logs = np.array(each)
    whole = np.exp(np.abs(logs.sum(axis=1)).max())
    mean = f"{np.abs(logs).mean():.4f}"
    rows.append([name, mean, f"{factors[name]:.2f}", f"{whole:.2f}"])
headers = ["engine", "mean |log r|", "largest factor, a token", "a text of 24 tokens"]
widgets.table(rows, headers)

# %% [markdown] name="mismatch-reading"
# No token is far off in bfloat16 or int8, but ratios *multiply*: over a whole text they are larger, and answers can have
# thousands of tokens. Remedies: the engine's own log-probabilities as the
# denominator, with a truncated ratio; one precision for both; kernels whose result does not depend on the batch.

# %% [markdown] name="training-text"
# ## Training-side parallelism, on a page *(more)*
#
# Training keeps more than weights. With Adam and mixed precision a parameter costs 2 bytes (16-bit weight), 2 (gradient) and
# 12 (32-bit weight, two moments). **DDP** replicates all 16 on every rank; **ZeRO** divides them among the ranks of data
# parallelism: ZeRO-1 the 12, ZeRO-2 also gradients, **ZeRO-3 (FSDP)** also parameters, which are gathered layer by layer.
# <!-- source: Rajbhandari et al. 2020, ZeRO -->


# %% name="training"
def per_rank(params, n, stage):
    """Bytes of a rank: parameters, gradients, optimizer; ZeRO stage 0 is DDP."""
    parts = [2 * params, 2 * params, 12 * params]
    return [b / n if 3 - i <= stage else b for i, b in enumerate(parts)]


rows = []
for name, stage in (("DDP", 0), ("ZeRO-1", 1), ("ZeRO-2", 2), ("ZeRO-3, FSDP", 3)):
    sizes = [sum(per_rank(shape.num_params, 64, stage)) for shape in (l8, l70)]
    parts = [format_bytes(b) for b in per_rank(l8.num_params, 64, stage)]
    assert tuple(per_rank(l8.num_params, 64, stage)) == training.state(
        l8.num_params, 64, stage
    )
    moved = training.sent_bytes(l8.num_params, 64, stage)
    rows.append([name, *parts, *map(format_bytes, sizes), format_bytes(moved)])
headers = ["64 ranks", "weights, 8B", "gradients", "optimizer", "all, 8B", "all, 70B"]
widgets.table(rows, [*headers, "sent per step, 8B"])

# %% name="training-activations"
seq, hidden, heads = 4096, l8.hidden_size, l8.num_heads
kept = seq * hidden * (34 + 5 * heads * seq / hidden)  # one sequence, one layer
fused = seq * hidden * 34  # flash attention keeps no scores
again = 2 * seq * hidden  # only the input of the layer
rows = [
    [name, format_bytes(b), format_bytes(32 * b), cost]
    for name, b, cost in (
        ("all kept, scores too", kept, "-"),
        ("scores computed again", fused, "attention twice"),
        ("only each layer's input", again, "one more forward pass: a third more"),
    )
]
widgets.table(rows, ["activations, a sequence of 4,096", "layer", "32 layers", "price"])

# %% [markdown] name="training-reading"
# (The optimizer of an 8B alone is more than an 80 GB GPU has; DDP is for small models.) The last row is **activation
# checkpointing**. (Formula for GPT's layer, 16 bits, without TP: Korthikanti et al. 2022.) **3D**
# is DP × PP × TP, TP in the node, PP across, DP outermost with ZeRO; **4D** adds the sequence (context parallelism), and
# experts may be a fifth. An engine has none of this: no gradients, no optimizer, no backward pass.
# <!-- source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models -->

# %% [markdown] name="explore"
# ## 6. Explore
#
# Change a line and run it again. *Which link between nodes makes TP 16 lose? From which prompt length on? What do 8-bit
# caches change?* Every argument of `inferlab plan` is there.

# %% name="explore-plan"
compare(
    plan(
        "llama-3-70b",
        "H100",
        16,
        batch=64,
        prompt_tokens=1024,
        between="InfiniBand NDR 400G",
        kv_bits=16,
    )
)

# %% [markdown] name="worked-problem"
# ### Worked problem: four more GPUs
#
# The course's deployment: Llama-3-70B in 16 bits on four H100 of a node, TP 4, at the limits of the hardware; a message
# takes 2 µs and its bytes, all-reduces go by rings. 64 requests have 2,000 tokens each. Four more H100 are yours.
# <!-- tested: tests/claims/test_worked_12.py::test_worked_12_four_more_gpus -->
#
# *What is TPOT now? With TP 8? With two replicas of TP 4? How many requests of 4,096 tokens fit in each? And if the new
# four are in another node, how many bytes per token would TP 8 send through a NIC, and how many do two stages?*
# <!-- tested: tests/claims/test_worked_12.py::test_worked_12_four_more_gpus -->
#
# <details><summary>Answer</summary>
#
# Now: (139.0 + 41.9) GB / (4 · 3.35 TB/s) = 13.5 ms, and 160 rings of 1 MiB over four at 15.5 µs: 2.5 ms. **16.0 ms.**
# TP 8: half of the first, 6.8 ms, and 160 · 32.1 µs = 5.1 ms: **11.9 ms**, so eight GPUs are 1.34 times as fast as four.
# Two replicas: 32 each, 11.9 ms of reading and 2.2 of messages: **14.1 ms.**
# <!-- tested: tests/claims/test_worked_12.py::test_worked_12_four_more_gpus -->
#
# Caches: 109 requests now; 324 with TP 8, 218 with replicas. The second copy of the weights costs 106 requests.
# <!-- tested: tests/claims/test_worked_12.py::test_worked_12_four_more_gpus -->
#
# Another node: a ring sends 160 · 2 · 7/8 · 16 KiB = **4.6 MB** for each token through the slowest link, two stages
# **16 KiB**. So: TP 8 in the node if latency or room counts, replicas or stages if the new GPUs are elsewhere.
# <!-- tested: tests/claims/test_worked_12.py::test_worked_12_four_more_gpus -->
#
# </details>

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"70B on 80 GB GPUs: TP 2 inside two-GPU nodes, stages across."** (E12.7) Section 3: two GPUs have next to no room for
# caches. Nodes have eight GPUs; TP 4 or 8 needs no second one.
#
# **"Slow cross-node PCIe rules out TP over nodes."** (E12.8) PCIe ends in the node; between nodes is InfiniBand, RoCE or EFA.
# See the column "spans" of section 3.
#
# **"NVLink 5 gives 900 GB/s, and so does H100's."** (E00.8) Both numbers are of different things: 900 is NVLink 4 in both
# directions, or NVLink 5 in one. In a transfer time only the one-way number belongs.
# <!-- printed: errata-nvlink -->

# %% name="errata-nvlink"
rows = []
for name in ("NVLink 3", "NVLink 4", "NVLink 5", "NVLink-C2C"):
    row = link(name)
    speeds = [f"{x / GB:,.0f} GB/s" for x in (row.both_directions, row.per_direction)]
    time_8k = row.seconds(*[kv_cache.cache_bytes(l70, 8192)] * 2)
    rows.append([name, *speeds, format_seconds(time_8k)])
widgets.table(rows, ["link", "printed, both ways", "one way", "KV of 8,192, a 70B"])

# %% [markdown] name="errata-c2c-text"
# **"With NVLink-C2C, models larger than HBM just work."** (E12.13) A Grace-Hopper GPU reads the CPU's memory coherently (*unified
# memory*: one address space, no copies by hand). But that memory is slower than the link, and weights are read for each token:

# %% name="errata-c2c"
gh200 = device("GH200")
slow = gh200.host_memory[1]
parts = [(90e9, gh200.bandwidth), (50e9, slow)]
all_hbm = latency.tiered_read_seconds([(140e9, gh200.bandwidth)], overlapped=True)
rows = [["all in HBM, were it large enough", format_seconds(all_hbm), "1.0"]]
for overlapped in (True, False):
    t = latency.tiered_read_seconds(parts, overlapped)
    name = "90 GB in HBM, 50 GB in LPDDR" + (", overlapped" if overlapped else "")
    rows.append([name, format_seconds(t), f"{t / all_hbm:.1f}"])
gbs = [f"{x / GB:,.0f}" for x in (gh200.bandwidth, slow)]
print(f"HBM {gbs[0]} GB/s, LPDDR {gbs[1]} GB/s")
widgets.table(rows, ["140 GB of weights", "a token, at least", "times"])

# %% [markdown] name="errata-rdma-text"
# It is good for what is read rarely: caches of idle requests.
#
# **"GPUDirect RDMA makes TP over nodes the thing to do."** (E12.14) GPUDirect RDMA lets a NIC read and write GPU memory over
# PCIe: no copy through the host's memory, no CPU in the path. It helps *whatever* crosses nodes: stages, experts,
# KV transfer. Against a bounce through host memory on both sides (a copy costs 10 µs, assumed), sent whole:
# <!-- printed: errata-rdma -->

# %% name="errata-rdma"
nic, pcie, copy = link("InfiniBand NDR 400G"), link("PCIe 5 x16"), 10e-6
print(f"a copy costs {copy * 1e6:.0f} µs and its bytes over {pcie.name}")
things = [
    ("one token's hidden state, a stage", 8192 * 2),
    ("a prompt's of 8,192, a stage", 8192 * 8192 * 2),
    ("KV of 8,192 tokens, over eight NICs", kv_cache.cache_bytes(l70, 8192) / 8),
]
rows = []
for name, size in things:
    direct = nic.seconds(size, size)
    bounced = direct + 2 * (copy + size / pcie.per_direction)
    times = [format_seconds(t) for t in (direct, bounced)]
    rows.append([name, format_bytes(size), *times, f"{bounced / direct:.1f}"])
host = 2 * 8 * nic.per_direction / GB
print(f"eight NICs that bounce: {host:.0f} GB/s of host memory, in and out, one way")
widgets.table(rows, ["what", "bytes", "direct", "through the host", "times"])

# %% [markdown] name="errata-rdma-reading"
# Pieces in a pipeline hide the copies of a large message, and then host memory is what binds. RDMA does not change what
# TP sends. A prompt of 8,192 tokens through a 70B: with rings over 16 GPUs at a NIC's speed 829 ms; over eight on NVLink 88 ms,
# and 2.7 ms to hand the hidden states on. RDMA is needed most for experts and KV transfer.
# <!-- tested: tests/claims/test_chapter_12.py::test_e12_14_between_nodes_tensor_parallelism_pays_for_every_layer_and_a_pipeline_once -->
#
# **"DP/FSDP replicates the model and shards optimizer states."** (E12.11) Three things in one: DDP replicates, ZeRO-1 shards
# optimizer states, FSDP (ZeRO-3) shards all. The table of the page above has each.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026.
#
# **vLLM** and **SGLang** take layouts by flags and choose none themselves; vLLM's guide has the rule of section 2: one GPU if
# it fits, TP in a node, TP × PP over nodes, and a look at the cache size that the engine prints. **NVIDIA Dynamo** has a
# profiler that tries layouts. Measure the two or three that a planner puts first.
#
# **Weights in flight**: vLLM and SGLang pause, take weights over NCCL or CUDA IPC from a trainer (verl, OpenRLHF, slime,
# NeMo RL), drop their caches or, where asked, keep them, and go on. Truncated importance sampling and batch-invariant
# kernels are usual answers to the mismatch.
#
# **Racks**: GB200 and GB300 NVL72 serve mixtures with wide expert parallelism. vLLM can change the number of data-parallel
# ranks of a mixture while it runs (elastic EP, 2026); elsewhere a dead rank most often means a restart of the group.
# <!-- source: vLLM's blog, 14 May 2026, Elastic Expert Parallelism -->

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

for each in (llm, fresh):
    each.engine.close()
holder.cleanup()
widgets.quiz(load_quiz("12_parallelism").draw(seed=1, tag="choosing"))

# %% [markdown] name="card"
# ## 10. Card
#
# - In this order: bytes, one stream's time, links, throughput. Smallest layout that passes, then replicas of it.
# - A model that "fits" may have no room for caches: count tokens. 70B in 16 bits: TP 4 or 8; TP 2 with 8-bit weights.
# - t(n) = weights / (n · bandwidth) + 2 · layers · t(all-reduce, n): it has a minimum. Beyond it GPUs slow one stream.
# - Per token TP sends some vectors in every layer, PP one per border, DP none. The first stays on NVLink.
# - One way is half of what NVLink's vendors print. PCIe ends in the node.
# - A rack is one large node: good for all-to-alls. Copies of hot experts do not save the cold ones of a dead rank.
# - New weights: text stays; keys, values and prefix cache go. Trainer and engine differ; ratios multiply.
# - DDP keeps all on each rank; ZeRO-1 divides the optimizer, ZeRO-2 also gradients, ZeRO-3 (FSDP) also parameters.
