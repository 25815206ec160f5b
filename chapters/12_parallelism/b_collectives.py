# %% [markdown] name="title"
# # 12b · What a message costs
#
# About 45 minutes. You need `a_matrix`. There ranks added their parts, and how they do it was left open. Here the
# messages are taken one by one: how many follow each other, how many bytes each carries, and which way of adding wins at
# which size.
#
# **Required:** sections 1 to 5, E12.12 in section 7, and the card. The rest may wait.

# %% name="setup"
import inspect
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    figure,
    show,
    tidy,
)
from reference_impl.features.parallel import all_reduce as ways
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.theory import collectives
from reference_impl.theory.hardware import device
from reference_impl.theory.links import link, topology
from reference_impl.theory.schedules import closed, schedule, stepped
from reference_impl.theory.units import GB, KiB, MB, MiB, format_bytes, format_seconds

torch.set_num_threads(1)
torch.manual_seed(0)
H100 = topology("DGX H100")  # 8 GPUs on NVLink 4, nodes on InfiniBand
ALPHA, BANDWIDTH = H100.inside.alpha, H100.inside.per_direction


def on_threads(way, shown):
    """An all-reduce of the engine, ranks as threads. -> results, and the ranks."""
    group = ThreadGroup(len(shown))
    ranks = [group.rank(number) for number in range(len(shown))]
    with ThreadPoolExecutor(len(shown)) as pool:
        results = list(pool.map(lambda rank: way(rank, shown[rank.rank]), ranks))
    return results, ranks


ECHO = """
import os, sys
read, write = sys.stdin.fileno(), sys.stdout.fileno()
held = memoryview(bytearray(2**20))
while head := os.read(read, 8):
    size, got, sent = int.from_bytes(head, "little"), 0, 0
    while got < size:
        got += os.readv(read, [held[got:size]])
    while sent < size:
        sent += os.write(write, held[sent:size])
"""


class OtherProcess:
    """Sends back what it gets, through pipes: at most 1 MiB."""

    where = "two processes, through pipes"

    def __init__(self):
        pipe, command = subprocess.PIPE, [sys.executable, "-c", ECHO]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0)
        self.back = memoryview(bytearray(2**20))

    def there_and_back(self, data):
        self.process.stdin.write(len(data).to_bytes(8, "little"))
        sent, got = 0, 0
        while sent < len(data):
            sent += self.process.stdin.write(memoryview(data)[sent:])
        while got < len(data):
            got += self.process.stdout.readinto(self.back[got : len(data)])

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class OtherThread:
    """The same where no process can be started."""

    where = "two threads, since no process can be started here"

    def __init__(self):
        group = ThreadGroup(2)
        self.me, self.other = group.rank(0), group.rank(1)
        self.pool = ThreadPoolExecutor(1)

    def there_and_back(self, data):
        self.me.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 1)
        self.pool.submit(lambda: self.other.send(self.other.recv(0), 0))
        self.me.recv(1)

    def close(self):
        self.pool.shutdown()


# %% [markdown] name="question"
# ## 1. A question with a number
#
# A 70B on eight H100: 80 layers, hidden size 8,192, 16 bits. One token, alone, needs 160 all-reduces of one vector each, 16
# KiB. Say a message takes 2 µs, plus its bytes at 450 GB/s, and the eight ranks add in a **ring**. Reading the weights
# takes 5.2 ms. **How many ms do the 160 all-reduces take together?**
# <!-- stands: reference_impl/theory/links.py -->
# <!-- stands: reference_impl/theory/model_shapes.py -->

# %% name="predict"
widgets.predict("12b-ring", "160 all-reduces of 16 KiB in a ring of 8?", "ms")

# %% name="question-run"
vector = collectives.all_reduce_message(1, 8192)  # bytes
ring = collectives.ring_all_reduce(vector, 8, ALPHA, BANDWIDTH)
shot = collectives.one_shot_all_reduce(vector, 8, ALPHA, BANDWIDTH)
reading = 140e9 / 8 / device("H100").bandwidth
print(f"weights {reading * 1e3:.1f} ms; one all-reduce {ring * 1e6:.1f} µs")
print(f"if each rank sends all to all others at once: {160 * shot * 1e3:.2f} ms")
widgets.reveal("12b-ring", 160 * ring * 1e3)

# %% [markdown] name="question-reading"
# Nearly as long as reading the weights, and the bytes are not to blame: 16 KiB at 450 GB/s take 36 ns. What takes time is
# that messages **wait for each other**, 14 in a row.
# <!-- stands: reference_impl/theory/links.py -->
# <!-- tested: tests/claims/test_parallel_messages.py::test_a_vector_of_16_kib_takes_36_ns_of_bytes_and_a_ring_of_8_has_14_messages -->

# %% [markdown] name="idea"
# ## 2. The idea
#
# A courier drives ten minutes, whatever is in the van, and then unloads for a second a box. Twenty trips of one box each
# take hours; one trip of twenty boxes takes ten minutes. But who has thousands of boxes thinks about unloading, not driving.
#
# $$t(\text{message}) = \alpha + \beta \cdot \text{bytes}, \qquad \beta = 1 / \text{bandwidth}$$
#
# - **α** is the trip: software, a launch, the way there. It counts once for every message *that waits for one before*.
# - **β** is the boxes. It counts for the bytes of the rank that sends most.
#
# An algorithm is a trade between the two. Below α / β bytes a message is mostly trip, above it mostly boxes.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.9)
ax = fig.subplots()
sizes = np.logspace(2, 8.5, 60)
styles = (
    ("NVLink 4", BLUE, "-"),
    ("PCIe 5 x16", GREEN, "--"),
    ("InfiniBand NDR 400G", ORANGE, "-."),
)
for name, colour, style in styles:
    row = link(name)
    ax.loglog(
        sizes,
        (row.alpha + sizes / row.per_direction) * 1e6,
        style,
        color=colour,
        label=name,
    )
    ax.plot(row.alpha * row.per_direction, 2 * row.alpha * 1e6, "o", color=colour)
for size, said in (
    (16 * KiB, "1 token"),
    (64 * 16 * KiB, "64 tokens"),
    (4096 * 16 * KiB, "4,096 tokens"),
):
    ax.axvline(size, color=GREY, linewidth=0.8, zorder=0)
    ax.text(size, 1100, said, fontsize=8, ha="center", va="bottom", color=INK)
ax.set_ylim(1, 1000)
tidy(ax, "bytes of a message", "time, µs")
ax.legend(fontsize=8, frameon=False)
knees = ", ".join(
    f"{n} {format_bytes(link(n).alpha * link(n).per_direction)}" for n, _, _ in styles
)
show(
    fig,
    "Time of one message over its bytes on three links: flat, then rising. Dots, "
    f"where both parts are equal: {knees}. A 70B's vector is 16 KiB for one token, "
    "far left of all three; for 4,096 tokens it is far right.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# In a **ring** each rank sends to one neighbour only. The vector is cut into $n$ parts. In step $s$ rank $r$ sends part
# $r - s$ (mod $n$) to rank $r + 1$. For $n - 1$ steps what arrives is added, then for $n - 1$ steps it replaces. *How many
# steps with eight ranks?*

# %% name="scratch-steps-predict"
widgets.predict("12b-steps", "Messages one after another in a ring of 8?", "steps")


# %% name="scratch-ring"
def ring_steps(shown):
    """All-reduce of vectors. -> results, and of each step (from, to, part)."""
    n, log = len(shown), []
    parts = [list(x.tensor_split(n)) for x in shown]
    for step in range(2 * (n - 1)):
        messages = [(rank, (rank + 1) % n, (rank - step) % n) for rank in range(n)]
        on_the_way = [parts[source][part] for source, _, part in messages]
        for (_, target, part), x in zip(messages, on_the_way, strict=True):
            parts[target][part] = x + parts[target][part] if step < n - 1 else x
        log.append(messages)
    return [torch.cat(own) for own in parts], log


shown = [torch.randn(64, dtype=torch.float64) for _ in range(8)]
results, log = ring_steps(shown)
for result in results:
    torch.testing.assert_close(result, sum(shown))
print("step 0:", log[0][:4], "... step 1:", log[1][:3], "...")
widgets.reveal("12b-steps", len(log))

# %% [markdown] name="scratch-ring-reading"
# 14 messages in a row, each of an eighth of the vector, so a rank sends 14/8 = 1.75 vectors. Others choose differently:
# <!-- printed: scratch-ring -->
#
# - **one-shot**: each rank sends its whole vector to all others, at once. One step, 7 vectors.
# - **two-shot**: each rank adds one part for all (reduce-scatter), then sends it to all (all-gather). Two steps.
# - **tree**: sums go up in pairs to rank 0 and come down again.
# - **recursive doubling**: partners 1, 2, 4 apart exchange all they have. $\log_2 n$ steps.
# - **hierarchical**: inside each node first, so that only parts travel between nodes.


# %% name="scratch-shots"
def one_shot(shown):
    return [sum(shown) for _ in shown], [
        [(a, b) for a in range(8) for b in range(8) if a != b]
    ]


def two_shot(shown):
    n = len(shown)
    parts = [x.tensor_split(n) for x in shown]
    added = [sum(own[part] for own in parts) for part in range(n)]  # rank p adds part p
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    return [torch.cat(added) for _ in shown], [pairs, pairs]


for way in (one_shot, two_shot):
    results, log = way(shown)
    torch.testing.assert_close(results[3], sum(shown))
    sent = Counter(message[0] for step in log for message in step)
    print(f"{way.__name__}: {len(log)} steps, {sent[0]} messages of a rank")

# %% [markdown] name="scratch-table-text"
# Counted message by message, for 64 KiB, with what they cost on one node of H100 (2 µs, 450 GB/s); the last two on two nodes:
# <!-- stands: reference_impl/theory/links.py -->

# %% name="scratch-table"
rows = []
for name in ("ring", "one-shot", "two-shot", "tree", "recursive doubling"):
    cost = stepped(name, 64 * KiB, 8, H100)
    sent = cost.inside / (64 * KiB)
    rows.append([name, 8, cost.steps, f"{sent:.2f}", format_seconds(cost.seconds)])
for name in ("ring", "hierarchical"):
    cost = stepped(name, 64 * KiB, 16, H100)
    sent = (cost.inside + cost.between) / (64 * KiB)
    rows.append([name, 16, cost.steps, f"{sent:.2f}", format_seconds(cost.seconds)])
widgets.table(
    rows, ["all-reduce", "ranks", "steps", "vectors of the busiest rank", "time"]
)

# %% [markdown] name="scratch-order-text"
# ### In one order, on all ranks
#
# $(a + b) + c$ and $a + (b + c)$ differ in their last bits. In one-shot every rank adds by itself; suppose each begins with
# its own numbers, which are at hand. *Eight ranks add 4,096 sums in float32. Of how many do not all ranks have the same
# bits, in percent?*

# %% name="scratch-order-predict"
widgets.predict(
    "12b-order", "Sums of 8 that differ between ranks, own number first?", "%"
)

# %% name="scratch-order"
few = [torch.randn(4096) for _ in range(8)]
own_first = [
    sum([few[rank], *(x for r, x in enumerate(few) if r != rank)]) for rank in range(8)
]
differ = torch.stack([x != own_first[0] for x in own_first]).any(0)
in_order = [sum(few) for _ in range(8)]
assert all(torch.equal(x, in_order[0]) for x in in_order)
print(
    f"largest difference {max((x - own_first[0]).abs().max() for x in own_first):.1e}"
)
widgets.reveal("12b-order", 100 * float(differ.float().mean()))

# %% [markdown] name="scratch-order-reading"
# A last bit is no error of arithmetic. But ranks with *different* hidden states are no longer one model. Their caches drift
# apart; where each rank computes all logits and picks a token by itself, a close choice ends in different tokens, and from
# then on parts of the model compute different texts; a router of experts may choose differently in the same way. No exception
# says so.
#
# So in every all-reduce all ranks add in the same order (one-shot, two-shot: by rank), or one rank adds and the others copy
# (ring, tree), or partners add the same two numbers (recursive doubling). A ring also adds each *part* in an order of its
# own: the same on all ranks, but a number's bits depend on where it stands in the vector.

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The engine's ways are functions over `send` and `recv`. Two of them:

# %% name="engine-source"
print(inspect.getsource(ways.one_shot))
print(inspect.getsource(ways.two_shot))

# %% [markdown] name="engine-count-text"
# Run, with ranks as threads whose messages are counted, they send exactly the messages of the schedules:

# %% name="engine-count"
RUN = {
    "ring": ways.ring,
    "one-shot": ways.one_shot,
    "two-shot": ways.two_shot,
    "tree": ways.tree,
    "recursive doubling": ways.recursive_doubling,
    "hierarchical": ways.hierarchical(4),
}
few = [torch.randn(1024) for _ in range(8)]
rows = []
for name, way in RUN.items():
    results, ranks = on_threads(way, few)
    assert all(torch.equal(x, results[0]) for x in results)  # the same bits everywhere
    torch.testing.assert_close(results[0], sum(few))
    steps = schedule(name, few[0].nbytes, 8, 4 if name == "hierarchical" else 8)
    messages = [message for step in steps for message in step.messages]
    assert sum(rank.num_sent for rank in ranks) == len(messages)
    assert sum(rank.num_bytes for rank in ranks) == sum(size for _, _, size in messages)
    busiest = max(rank.num_bytes for rank in ranks)
    rows.append([name, len(steps), len(messages), busiest])
widgets.table(
    rows, ["all-reduce of 4 KiB", "steps", "messages", "bytes of the busiest rank"]
)

# %% [markdown] name="engine-five-text"
# An all-reduce is one of five **collectives** of the engine. Each on two ranks, and where it is used:


# %% name="engine-five"
def five(rank):
    x = torch.tensor([1.0, 2.0]) * (10 if rank.rank else 1)
    own = list(x.view(2, 1))  # one for each rank
    return {
        "all-reduce": rank.all_reduce(x),
        "all-gather": torch.cat(rank.all_gather(x)),
        "reduce-scatter": rank.reduce_scatter(own),
        "all-to-all": torch.cat(rank.all_to_all(own)),
        "broadcast": rank.broadcast(x if rank.rank == 0 else None, 0),
    }


(first, second), _ = on_threads(lambda rank, _: five(rank), [None, None])

# %% name="engine-five-table"
USED = (
    "sums of attention and MLP",
    "logits; second half of an all-reduce",
    "first half of an all-reduce",
    "tokens to experts and back",
    "one rank's choice for all",
)
rows = [
    [name, str(first[name].tolist()), str(second[name].tolist()), use]
    for name, use in zip(first, USED, strict=True)
]
widgets.table(
    rows, ["[1, 2] and [10, 20]", "rank 0 has then", "rank 1 has then", "used for"]
)

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# ### α and β of this machine
#
# A message to another process and back, of many sizes; half of it is one way, and of 60 tries the fastest counts. *What is α here, the time of a message
# without bytes?*

# %% name="measure-alpha-predict"
widgets.predict("12b-alpha", "Time of an empty message to another process?", "µs")


# %% name="measure-messages"
def one_way(other, size, rounds):
    data, took = bytes(size), []
    for _ in range(rounds):
        began = time.perf_counter()
        other.there_and_back(data)
        took.append((time.perf_counter() - began) / 2)
    return min(took)  # other programs only add to it


try:
    other = OtherProcess()
except OSError:
    other = OtherThread()
SIZES = [2**n for n in range(6, 21, 2)]  # 64 bytes to 1 MiB
measured = {size: one_way(other, size, 60) for size in SIZES}
other.close()
print(f"{other.where}: {len(measured)} sizes, each 60 times")


# %% name="measure-fit"
def fit(times):
    """alpha, beta of t = alpha + beta * bytes, least squares of relative errors."""
    sizes, t = np.array(list(times)), np.array(list(times.values()))
    left = np.stack((np.ones(len(t)), sizes), axis=1) / t[:, None]
    return np.linalg.lstsq(left, np.ones(len(t)), rcond=None)[0]


alpha, beta = fit(measured)
fitted = {size: alpha + beta * size for size in SIZES}
print(f"α = {format_seconds(alpha)}, 1/β = {1 / beta / GB:.2f} GB/s")
print(f"as much trip as boxes at {format_bytes(alpha / beta)}")
widgets.reveal("12b-alpha", alpha * 1e6)
rows = [
    [
        size,
        format_seconds(t),
        format_seconds(fitted[size]),
        f"{t / fitted[size] - 1:+.0%}",
    ]
    for size, t in measured.items()
]
widgets.table(rows, ["bytes", "measured, one way", "α + β bytes", "residual"])

# %% name="measure-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.9)
left, right = fig.subplots(1, 2, width_ratios=(1.3, 1))
left.loglog(
    SIZES, [measured[s] * 1e6 for s in SIZES], "o", color=BLUE, label="measured"
)
left.loglog(
    SIZES, [fitted[s] * 1e6 for s in SIZES], "-", color=ORANGE, label="α + β · bytes"
)
tidy(left, "bytes", "µs, one way")
left.legend(fontsize=8, frameon=False)
residuals = [100 * (measured[s] / fitted[s] - 1) for s in SIZES]
right.axhline(0, color=INK, linewidth=0.8)
right.stem(SIZES, residuals, basefmt=" ")
right.set_xscale("log")
tidy(right, "bytes", "residual, %")
show(
    fig,
    f"Messages between {other.where}: measured times and the fitted line, "
    f"α {alpha * 1e6:.0f} µs and {1 / beta / GB:.2f} GB/s. Residuals from "
    f"{min(residuals):.0f} to {max(residuals):.0f} percent.",
)

# %% [markdown] name="measure-fit-reading"
# Two numbers describe four decades of sizes, and not exactly: the residuals have a pattern. Where a message outgrows a pipe's
# buffer or a cache, its cost bends, and a busy machine adds noise of its own. The model says which of two algorithms to
# choose; it does not replace a measurement of the one you chose.
#
# ### Where they cross
#
# <!-- printed: scratch-ring -->
# One-shot has one step and seven vectors, a ring 14 steps and 1.75. So one-shot wins for small messages. *On the H100's
# NVLink: at how many MB do they take the same time?*

# %% name="measure-cross-predict"
widgets.predict("12b-meet", "Ring and one-shot of 8 ranks take the same time at?", "MB")

# %% name="measure-cross"
meet = collectives.all_reduce_break_even(8, ALPHA, BANDWIDTH)
here = collectives.all_reduce_break_even(8, alpha, 1 / beta)
rows = []
for said, tokens in (("1 token", 1), ("64 tokens", 64), ("4,096 tokens", 4096)):
    size = collectives.all_reduce_message(tokens, 8192)
    costs = [closed(name, size, 8, H100) for name in ("one-shot", "two-shot", "ring")]
    best = min(costs, key=lambda cost: cost.seconds).name
    rows.append(
        [said, format_bytes(size), *(format_seconds(c.seconds) for c in costs), best]
    )
print(f"one-shot meets two-shot at {format_bytes(ALPHA * BANDWIDTH / (7 - 1.75))}")
print(f"with α and β of this machine, one-shot meets a ring at {format_bytes(here)}")
widgets.reveal("12b-meet", meet / MB)
widgets.table(rows, ["70B, 8 H100", "message", "one-shot", "two-shot", "ring", "best"])

# %% name="measure-cross-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 3.1)
ax = fig.subplots()
sizes = [2**n for n in range(12, 28)]
looks = {
    "one-shot": (BLUE, "-"), "two-shot": (GREEN, "--"), "ring": (ORANGE, "-."),
    "tree": (PURPLE, ":"), "recursive doubling": (RED, (0, (5, 1, 1, 1, 1, 1))),
}  # fmt: skip
for name, (colour, style) in looks.items():
    times = [closed(name, size, 8, H100).seconds * 1e6 for size in sizes]
    ax.loglog(sizes, times, linestyle=style, color=colour, label=name)
for size, said in (
    (16 * KiB, "1 token"),
    (64 * 16 * KiB, "64 tokens"),
    (4096 * 16 * KiB, "4,096 tokens"),
):
    ax.axvline(size, color=GREY, linewidth=0.8, zorder=0)
    ax.text(size, 2500, said, fontsize=8, ha="center", va="bottom", color=INK)
ax.set_ylim(1.5, 2300)
tidy(ax, "bytes of the vector", "time of an all-reduce, µs")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "All-reduces of 8 ranks on NVLink 4 by formula, over the size. One-shot is lowest "
    f"up to 171 KB, two-shot above; one-shot crosses the ring at {meet / MB:.1f} MB. "
    "Tree and doubling begin between them and end above two-shot. A 70B's vector for "
    "one token is at 16 KiB, for 4,096 tokens at 64 MiB.",
)

# %% [markdown] name="measure-cross-reading"
# Two-shot has the ring's bytes in two steps, so in this model it is never slower than a ring: *if* every rank reaches all
# others at full speed at once, as through NVLink switches. Where ranks reach only neighbours well, or messages of many
# senders collide, a ring is what is left. And the numbers are α's: with an α of 10 µs, five times this one, all crossings
# move to five times the size.
#
# ### Over several nodes
#
# Between nodes α is larger and the bandwidth a ninth of NVLink's. A ring over all GPUs crosses the slow link in every step,
# with the others waiting; in a hierarchy each rank sends an eighth of the vector between nodes.

# %% name="measure-nodes"
rows = []
for n in (16, 64, 512):
    for said, size in (("16 KiB", 16 * KiB), ("1 MiB", MiB), ("64 MiB", 64 * MiB)):
        names = ("ring", "tree", "hierarchical")
        times = [closed(name, size, n, H100).seconds for name in names]
        best = names[times.index(min(times))]
        rows.append([n, said, *map(format_seconds, times), best])
widgets.table(rows, ["ranks", "vector", "ring", "tree", "hierarchical", "best"])

# %% [markdown] name="measure-share-text"
# With many nodes and a small vector the hierarchy's ring between nodes has too many steps; a tree has few, and so has doubling
# between nodes, in section 8.
#
# ### The share of a step
#
# Back to the 70B on eight H100. Its step reads weights and adds 160 times, one after the other:

# %% name="measure-share"
rows = []
for tokens in (1, 16, 64):  # so few that reading weights takes longer than computing
    for name in ("ring", "one-shot", "two-shot"):
        size = collectives.all_reduce_message(tokens, 8192)
        adding = 160 * closed(name, size, 8, H100).seconds
        share = adding / (adding + reading)
        rows.append([tokens, name, f"{adding * 1e3:.2f} ms", f"{share:.0%}"])
head = [
    "tokens of a step",
    "all-reduce",
    "160 of them",
    "share of the step (weights 5.2 ms)",
]
widgets.table(rows, head)

# %% [markdown] name="measure-fused-text"
# ### Fused with what follows
#
# Behind each all-reduce stand an addition to the residual stream and a norm. Fused into the kernel that adds, their inputs
# do not make another way through device memory, and two launches go. Which of the two matters?

# %% name="measure-fused"
launch = 2e-6  # assumed: seconds between two small kernels
rows = []
for tokens in (1, 64, 4096):
    n = collectives.all_reduce_message(tokens, 8192)
    apart = 6 * n  # sum written; sum and x read, x written; x read, norm written
    fused = 3 * n  # x read, x written, norm written
    saved = 160 * (apart - fused) / device("H100").bandwidth
    rows.append(
        [
            tokens,
            format_bytes(apart),
            format_bytes(fused),
            saved * 1e3,
            320 * launch * 1e3,
        ]
    )
head = [
    "tokens",
    "bytes apart",
    "fused",
    "160 times: ms of bytes saved",
    "ms of launches saved",
]
widgets.table(rows, head)

# %% [markdown] name="measure-compress-text"
# For a token it is the launches, for a prompt the bytes. By formula only: the engine's ranks are on CPUs, where neither counts.
#
# ### Fewer bytes: compression
#
# Codes of 4 bits with a float32 scale for each 32 numbers are 5 bits a number. On a vector of 16 bits that is 3.2 times
# fewer bytes on the link; rounding and reading back take a few passes through device memory. First what it costs in
# accuracy, run by the engine's own on eight ranks:

# %% name="measure-compress"
few = [torch.randn(32768) for _ in range(8)]
exact = sum(few)
rows = []
for name, way in (
    ("two-shot, float32", ways.two_shot),
    *((f"{b} bits", ways.quantized(b)) for b in (8, 4)),
):
    results, ranks = on_threads(way, few)
    assert all(torch.equal(x, results[0]) for x in results)
    error = float((results[0] - exact).norm() / exact.norm())
    rows.append([name, ranks[0].num_bytes, f"{error:.1%}"])
widgets.table(rows, ["messages", "bytes of a rank", "error of the sum"])

# %% [markdown] name="measure-compress-gain-text"
# The error is made twice in each of 160 sums, so it wants an evaluation (chapter 18). Now the time, with three passes over the
# vector in device memory for the codes (an assumption): *a prompt of 4,096 tokens over PCIe 5: how many times as fast?*

# %% name="measure-compress-predict"
widgets.predict(
    "12b-codes", "64 MiB over PCIe 5 in 4 bits instead of 16: speed-up?", "times"
)


# %% name="measure-compress-gain"
def two_shot_seconds(size, where, times_fewer=1.0):
    moved = 2 * (7 / 8) * size / times_fewer
    coding = 3 * size / device("H100").bandwidth if times_fewer > 1 else 0.0
    return 2 * where.alpha + moved / where.per_direction + coding


rows = []
for tokens in (1, 64, 4096):
    size = collectives.all_reduce_message(tokens, 8192)
    gains = [
        two_shot_seconds(size, link(name)) / two_shot_seconds(size, link(name), 16 / 5)
        for name in ("NVLink 4", "PCIe 5 x16")
    ]
    rows.append([tokens, format_bytes(size), *(f"{gain:.2f}x" for gain in gains)])
widgets.reveal("12b-codes", gains[1])
widgets.table(rows, ["tokens", "vector", "NVLink 4", "PCIe 5"])

# %% [markdown] name="explore"
# ## 6. Explore
#
# Any of the six, step by step. *Ring, 5 ranks: after which step does a rank hold the first whole part? Tree, 8 ranks: which
# rank has sent most at the end, and how many ranks have sent nothing in step 2?*

# %% name="explore-widget"
widgets.ring_stepper("ring", 5, 3)

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"Each all-reduce takes 23 % of decode latency."** (E12.5) There are 160 in a step of an 80-layer model. The number is
# from an experiment in which *all of them together* took about 23 % (eight H100, messages of about 30 KB).

# %% name="errata-share"
print(f"160 times 23 %: {160 * 0.23:.0%} of a step")
all_of_them = 160 * collectives.ring_all_reduce(30 * KiB, 8, ALPHA, BANDWIDTH)
print(f"160 in a ring, 30 KiB each: {format_seconds(all_of_them)}")

# %% [markdown] name="errata-amdahl-text"
# **"A kernel three times faster on that 23 % gives 27 % end to end."** (E12.6) *What does it save?*

# %% name="errata-amdahl-predict"
widgets.predict(
    "12b-amdahl", "A share of 23 % made 3 times as fast saves how much?", "%"
)

# %% name="errata-amdahl"
for factor in (3, float("inf")):
    left = collectives.amdahl(0.23, factor)
    print(f"{factor} times as fast saves {1 - left:.1%}: a speed-up of {1 / left:.2f}")
share = 0.27 / (1 - 1 / 3)
print(f"27 % less time with a factor of 3 needs a share of {share:.1%}")
widgets.reveal("12b-amdahl", 100 * (1 - collectives.amdahl(0.23, 3)))

# %% [markdown] name="errata-amdahl-reading"
# Even if communication vanished, 23 % would be saved. The missing share of the time, up to 40.5 %, is what was fused with it:
# norms, additions, gaps between launches.
# <!-- printed: errata-amdahl -->
#
# **"One-shot and INT4 all-reduces are faster."** (E12.12) At their sizes:

# %% name="errata-sizes"
rows = []
for size in (16 * KiB, 16 * MB):
    ring = collectives.ring_all_reduce(size, 8, ALPHA, BANDWIDTH)
    shot = collectives.one_shot_all_reduce(size, 8, ALPHA, BANDWIDTH)
    rows.append([format_bytes(size), f"{ring * 1e6:.1f} µs", f"{shot * 1e6:.2f} µs"])
rows.append([format_bytes(meet), "the same", "the same"])
widgets.table(rows, ["vector, 8 ranks on NVLink 4", "ring", "one-shot"])

# %% [markdown] name="errata-sizes-reading"
# Decode messages of a 70B are tokens × 16 KiB, so one-shot it is; a prompt's are not. Compression shortens the part that
# bytes take, of which a small message has none; the published gain of over 3 is for prompts of thousands of tokens on slow
# links.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026.
#
# **NCCL** has rings and trees over channels that work in parallel, protocols that trade bandwidth for latency, and chooses
# by size and topology from a cost model like ours; NVLink switches can also add on the way (NVLink SHARP). It is built for
# bandwidth, and weak for small messages between nodes: there its ring and tree pay α many times, which is why engines bring
# kernels of their own. Inside a node **vLLM**, **SGLang** and **TensorRT-LLM** take one-shot for small and two-shot for
# middle sizes, NCCL above; FlashInfer and TensorRT-LLM have kernels in which the all-reduce, the residual addition and the
# norm are one.
#
# **NVRAR** (Singhania et al. 2025) is a hierarchical all-reduce for several nodes: reduce-scatter inside a node, recursive
# doubling between nodes by NVSHMEM, all-gather inside. The authors report 1.9 to 3.6 times lower latency than NCCL for 128 KB
# to 2 MB, on Slingshot and InfiniBand, and up to 1.72 times less batch latency for a 405B in decode-heavy loads. The cell
# below has its form in our model, beside a flat ring.
#
# **NCCLX** (Si et al. 2025, Meta) is about clusters of more than 100,000 GPUs: set-up that scales, a transport of its own
# (CTran), fault localisation. At that size a ring's steps alone take most of a second; see below.
#
# **RCCL** is AMD's library with NCCL's interface. Meta's RCCLX (2026) adds *direct data access* (DDA) inside a node: ranks
# load each other's memory; its flat form is a one-shot, its tree form a two-shot. Meta reports 10 to 50 % over RCCL in decode
# and 10 to 30 % in prefill on MI300X, and low-precision collectives with FP8 on the wire.
#
# **Flash Communication** (Li et al. 2024, Meituan) is the two-shot with 4-bit messages that was run above, meant for prefill on
# slow links.


# %% name="production-nodes"
def nvrar(size, n):
    """Reduce-scatter and all-gather inside, recursive doubling between nodes."""
    part, inside, between = size / 8, H100.inside, H100.between
    doublings = (n // 8).bit_length() - 1
    exchange = inside.alpha + 7 * part / inside.per_direction
    return 2 * exchange + doublings * (between.alpha + part / between.per_direction)


rows = []
for n in (16, 32, 64):
    for size in (128 * KiB, 2 * MiB):
        times = [closed(name, size, n, H100).seconds for name in ("ring", "tree")]
        rows.append(
            [n, format_bytes(size), *map(format_seconds, [*times, nvrar(size, n)])]
        )
for name in ("ring", "tree"):
    cost = closed(name, 64 * MiB, 100_000, H100)
    took = format_seconds(cost.seconds)
    print(f"100,000 ranks, 64 MiB, {name}: {cost.steps:,} steps, {took}")
widgets.table(rows, ["GPUs, 8 a node", "vector", "flat ring", "tree", "NVRAR's form"])

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("12_parallelism").draw(seed=1, tag="messages"))

# %% [markdown] name="card"
# ## 10. Card
#
# - t = α + β · bytes. α counts for each message that waits for one before, β for the bytes of the busiest rank. Fit both on
#   the machine that matters, and look at the residuals.
# - n ranks, a vector of N bytes. Ring: 2 (n − 1) steps, 2 (n − 1) / n · N. One-shot: 1 step, (n − 1) N. Two-shot: 2 steps
#   and the ring's bytes. Tree: 2 log₂ n steps. Recursive doubling: log₂ n steps, log₂ n · N.
# - Small messages: few steps. Large: few bytes. Between nodes: hierarchical. Eight ranks on NVLink 4 at 2 µs: one-shot and
#   ring meet at 2.2 MB. <!-- tested: tests/claims/test_chapter_12.py::test_e12_12_one_shot_wins_below_about_two_megabytes_and_the_ring_above -->
# - All ranks add in one order, or one adds and the others copy: the same bits on all, or their texts part.
# - Amdahl: a share s made f times as fast leaves 1 − s + s / f of the time. All collectives of a step are one share.
# - Compression helps where bytes bind: large messages, slow links. Fusion saves launches in decode, bytes in prefill.
