# %% [markdown] name="title"
# # 07f · Fewer numbers: pruning, low rank, adapters, students
#
# About 45 minutes. You need `a_numbers`, `b_what_it_buys` and `c_methods`. The parts before this one made each number
# of a model smaller. This one leaves numbers out, and asks of each way what it saves in bytes, in time, and what it
# costs.

# %% name="setup"
import argparse
import inspect
import json
import time
import warnings

import numpy as np
import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, ORANGE, figure, show, tidy
from reference_impl import course_model
from reference_impl.assembly.model import load_model
from reference_impl.bench import compression
from reference_impl.bench.harness import RESULTS
from reference_impl.bench.quality import logprobs, windows_of
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.core.prompts import PromptEncoder
from reference_impl.models.compression import adapters, distillation, low_rank, pruning
from reference_impl.models.quantization.awq import rounded
from reference_impl.models.quantization.by_layer import linears_of
from reference_impl.models.quantization.calibration import Rows, Statistics, calibration_tokens
from reference_impl.models.quantization.folding import matrix
from reference_impl.models.quantization.recipes import SCHEMES, Recipe
from reference_impl.models.quantization.straight_through import straight_through
from reference_impl.theory import kv_cache
from reference_impl.theory.adapters import lora_params
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as shape_of

torch.set_num_threads(1)
warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
FOLDER = course_model("target")
encode_text = PromptEncoder(FOLDER).tokens_of
held_out = encode_text(inspect.getsource(json.decoder))
windows = windows_of(held_out, 96, 4)
# Plain matrices, which can be written to: on some CPUs the engine packs them.
plain = UnquantizedLinear(torch.float32, torch.device("cpu"))
model = load_model(FOLDER, torch.float32, linear_method=plain)
linears = {linear.name: linear for layer in model.layers for linear in linears_of(layer)}
originals = {name: matrix(linear).clone() for name, linear in linears.items()}
exact = [logprobs(model, window[:-1]) for window in windows]

# The Gram matrix of each matrix's inputs, over calibration rows of other text, seen by the model as it is.
calibration = calibration_tokens(encode_text(inspect.getsource(argparse)), 4, 96)
rows, grams = Rows.of(model, calibration), {}
for layer in model.layers:
    for linear in linears_of(layer):
        grams[linear.name] = rows.watch(layer, linear, Statistics()).known_gram
    rows.advance(layer)


def kl_with(change):
    """KL to the model as it is, nats a token; change(name, weight) takes the place of each matrix of the layers."""
    for name, weight in originals.items():
        matrix(linears[name]).copy_(change(name, weight))
    pairs = list(zip(exact, (logprobs(model, window[:-1]) for window in windows), strict=True))
    for name, weight in originals.items():
        matrix(linears[name]).copy_(weight)
    return sum(float((p.exp() * (p - q)).sum(-1).mean()) for p, q in pairs) / len(windows)


def int4(name, weight):
    return rounded(weight, Recipe("int4").scheme_of(name, weight.shape[1]))


# %% [markdown] name="question"
# ## 1. A question with a number
#
# INT4 in groups keeps about a quarter of each weight's bits. Remove half of the weights instead, the smaller ones of
# each output, and keep the rest in 16 bits. With a bit a place to say which are there that is nine bits a weight, twice
# as many as INT4 has. **How many times as large is the KL of the model with half of its weights as that in INT4?**

# %% name="predict"
widgets.predict("07f-half", "KL with half of the weights removed over KL in INT4?", "times")


# %% name="answer"
def half_gone(name, weight):
    return weight * pruning.keep(pruning.magnitude(weight), 0.5)


pruned, quantized = kl_with(half_gone), kl_with(int4)
shapes = [tuple(weight.shape) for weight in originals.values()]
print(f"{compression.bits_per_weight(shapes, 'bitmap'):.2f} bits a weight, KL {pruned:.4f}; INT4: KL {quantized:.4f}")
widgets.reveal("07f-half", pruned / quantized)

# %% [markdown] name="idea"
# ## 2. The idea
#
# A telegram was paid by the word. Abbreviating every word, which is what quantization does, loses a little of each.
# Striking out words loses nothing of those that stay, and all of the others. Whoever reads it must know where words are
# missing; and a blank that is sent like a letter takes the time of a letter.
#
# - **Pruning**: some weights become 0. Which ones, and what can skip them?
# - **Low rank**: a matrix becomes a product of two thin ones.
# - **Adapters**: many variants of a model are one model and a small change for each.
# - **Distillation**: a smaller model learns to say what the large one says.
#
# What happens when more and more weights go:

# %% name="idea-figure" jupyter={"source_hidden": true}
shares = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
cliff = [kl_with(lambda n, w, s=s: w * pruning.keep(pruning.magnitude(w), s)) for s in shares]
fig = figure(7.0, 2.6)
ax = fig.subplots()
ax.plot([100 * s for s in shares], cliff, "o-", color=BLUE, label="the smallest weights removed")
ax.axhline(quantized, color=ORANGE, linestyle="--", label="INT4, nothing removed")
ax.set_yscale("log")
tidy(ax, "weights removed, %", "KL, nats")
ax.legend(fontsize=8, frameon=False)
show(fig, "KL by share removed: " + ", ".join(f"{s:.0%} {kl:.4f}" for s, kl in zip(shares, cliff, strict=True)) + ".")

# %% [markdown] name="idea-reading"
# The "quality cliff" has no edge: the first tenth costs next to nothing, the second several times that, and each later
# one two to three times what the one before cost. Small weights are many and do little; after them there are none that do
# little.

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# Two scores say which weight goes. **Magnitude**: |W|. **Wanda** (Sun et al. 2024): |W| times the norm of its input
# over calibration rows, since a small weight on a large input can move the output more than a large weight on a small one.
# Both compare within a row, one output's weights. And two patterns say what may go: any weights of the row, or **2:4**,
# two of each four neighbours.


# %% name="scratch-keep"
def keep_largest(scores, share):
    """bool [out, in]: all but the share of least score in each row."""
    place = scores.argsort(-1, descending=True).argsort(-1)  # 0 for the largest score of a row
    return place < scores.shape[1] - int(share * scores.shape[1])


def two_of_four(scores):
    """bool [out, in]: of inputs 0 to 3, 4 to 7, ... the two of highest score."""
    fours = scores.reshape(len(scores), -1, 4)
    return (fours.argsort(-1, descending=True).argsort(-1) < 2).reshape(scores.shape)


weight = originals["model.layers.3.mlp.down_proj"]
norms = grams["model.layers.3.mlp.down_proj"].diagonal().sqrt()
for scores in (weight.abs(), weight.abs() * norms):
    for own, theirs in (
        (keep_largest(scores, 0.5), pruning.keep(scores, 0.5)),
        (two_of_four(scores), pruning.keep_two_of_four(scores)),
    ):  # of equal scores, either may stay
        torch.testing.assert_close((scores * own).sum(1), (scores * theirs).sum(1))
print(f"as the library does; {keep_largest(weight.abs(), 0.5).float().mean():.0%} stay")

# %% [markdown] name="scratch-outputs-text"
# Wanda's score is made for the output. **By what factor does Wanda's choice make the error of the outputs of this
# matrix smaller than magnitude's, half of the weights gone?** And with outliers planted (`c_methods`, section 4, lists what is planted where): every eighth input 30 times
# as large, its column of weights divided by 30, so that the layer computes the same?

# %% name="scratch-outputs-predict"
widgets.predict("07f-wanda", "Error of the outputs, magnitude over Wanda, half of the weights removed?", "times")


# %% name="scratch-outputs"
def output_error(weight, kept, gram):
    """|x (W - W')^T| over |x W^T|, percent, for the inputs that made the Gram matrix."""
    lost, whole = (float(((w.double() @ gram.double()) * w.double()).sum()) for w in (weight * ~kept, weight))
    return 100 * (lost / whole) ** 0.5


def both_scores(weight, gram, pattern):
    norms = gram.diagonal().sqrt()
    return [output_error(weight, pattern(scores), gram) for scores in (weight.abs(), weight.abs() * norms)]


gram = grams["model.layers.3.mlp.down_proj"]
factor = torch.ones(len(gram))
factor[::8] = 30
planted = (weight / factor, gram * factor[:, None] * factor)
lines = []
for name, case in (("as it is", (weight, gram)), ("planted", planted)):
    for words, pattern in (("any half", lambda s: keep_largest(s, 0.5)), ("2:4", two_of_four)):
        lines.append([name, words, *(f"{e:.1f} %" for e in both_scores(*case, pattern))])
magnitude, wanda = both_scores(weight, gram, lambda s: keep_largest(s, 0.5))
widgets.reveal("07f-wanda", magnitude / wanda)
widgets.table(lines, ["inputs", "pattern", "magnitude", "Wanda"])

# %% [markdown] name="scratch-outputs-reading"
# Magnitude strikes out the small weights of large inputs, which matter most; Wanda's choice is the same with or without
# what was planted. Large models have such inputs. The course model has few: Wanda makes the error of one matrix a little
# smaller, and (section 4) the KL of the whole model not at all. The error of a matrix is a means, the model is the end.
#
# ### What zeros save
#
# A zero in a dense matrix is a number like any other: as many bytes, as many operations. Something has to say where the
# others are. **At what share of zeros, in whole percent, does a list of values with their columns (CSR, 16 bits each)
# begin to need fewer bytes than the dense matrix?**

# %% name="scratch-bits-predict"
widgets.predict("07f-csr", "Zeros from which CSR takes fewer bytes than 16-bit dense?", "%")

# %% name="scratch-bits"
bits = {
    form: [pruning.stored_bits(4096, 4096, share, form) / 4096**2 for share in (0.5, 0.7, 0.9)]
    for form in ("dense", "bitmap", "csr")
}
least = next(s for s in range(101) if pruning.stored_bits(4096, 4096, s / 100, "csr") < 16 * 4096**2)
widgets.reveal("07f-csr", least)
lines = [[form, *(f"{n:.2f}" for n in found)] for form, found in bits.items()]
lines.append(["2:4", f"{pruning.stored_bits(4096, 4096, 0.5, '2:4') / 4096**2:.2f}", "", ""])
widgets.table(lines, ["bits a weight, 4096 × 4096", "half zeros", "70 %", "90 %"])

# %% [markdown] name="scratch-time-text"
# Bytes are one thing; a product that jumps is another. Here a matrix of 1024 × 1024 and one row, as in decoding, both
# in float32. **Half of the weights are zero: how long does the sparse product take, over the dense one of the same
# zeros?**

# %% name="scratch-time-predict"
widgets.predict("07f-time", "Half zeros: time of the CSR product over that of the dense one?", "times")


# %% name="scratch-time"
def seconds(product, repeats=20):
    """The least of several runs: what others do on this machine only ever adds."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        product()
        found.append(time.perf_counter() - start)
    return min(found)


random = torch.Generator().manual_seed(0)
x, square = torch.randn(1, 1024, generator=random), torch.randn(1024, 1024, generator=random)
ratio = {}
for share in (0.5, 0.9, 0.97):
    zeros = square * keep_largest(square.abs(), share)
    csr = zeros.to_sparse_csr()
    assert torch.allclose((csr @ x.T).T, x @ zeros.T, atol=1e-3)
    ratio[share] = seconds(lambda csr=csr: csr @ x.T) / seconds(lambda zeros=zeros: x @ zeros.T)
widgets.reveal("07f-time", ratio[0.5])
widgets.table([[f"{s:.0%}", f"{r:.2f}"] for s, r in ratio.items()], ["zeros", "CSR over dense, this machine, now"])

# %% [markdown] name="scratch-time-reading"
# With torch's CSR on a CPU, half zeros anywhere lost time in the runs that we took; yours stands above. Special GPU kernels that unpack a map of places gain bytes,
# and so time in decoding small batches; the common engines do not have them. A pattern that hardware supports is
# surer. 2:4 is one: tensor cores since NVIDIA's A100 take two values and two places of 2 bits and multiply at twice the dense
# rate. <!-- source: NVIDIA's A100 white paper --> And leaving out whole neurons of an MLP is another: what remains is a
# smaller dense matrix, which every machine multiplies faster.


# %% name="scratch-neurons"
def without_neurons(share):
    """change(name, weight): the MLP's neurons of least effect are gone, a row of gate and of up and a column of down."""

    def change(name, weight):
        if "mlp" not in name:
            return weight
        down = name.replace("gate_up_proj", "down_proj")
        score = originals[down].norm(dim=0) * grams[down].diagonal().sqrt()  # how much a neuron moves the output
        kept = keep_largest(score[None], share)[0].to(weight.dtype)
        return weight * kept if name == down else weight * torch.cat((kept, kept))[:, None]

    return change


def single_weights(share):
    """change(name, weight): of the same matrices as many weights, each chosen by itself."""

    def change(name, weight):
        scores = pruning.wanda(weight, grams[name].diagonal().sqrt())
        return weight * pruning.keep(scores, share) if "mlp" in name else weight

    return change


# %% name="scratch-neurons-table"
lines = []
for share in (0.125, 0.25, 0.5):
    single = kl_with(single_weights(share))
    lines.append([f"{share:.1%}", f"{single:.4f}", f"{kl_with(without_neurons(share)):.4f}"])
widgets.table(lines, ["of the MLP gone", "KL, single weights", "KL, whole neurons"])

# %% [markdown] name="scratch-neurons-reading"
# The stricter the pattern, the more it costs for the same number of weights, and the more surely it saves time: any
# place, 2:4, whole neurons, whole layers. What a method reports as "50 % sparse" means nothing without its pattern.
#
# ## 4. The same thing inside the engine
#
# `python -m reference_impl.bench compression` prunes the whole course model layer by layer, each calibrated on what
# those before it have become, and measures on more text than this notebook does. What it found last, with its date:

# %% name="engine-results"
record = json.loads((RESULTS / "compression.json").read_text("utf-8"))
print(record["stamp"]["date"], record["stamp"]["cpu"])
lines = [
    [name, f"{row['bits_per_weight']:.2f}", f"{row['kl']:.3f}", f"{row['agreement']:.1%}"]
    for name, row in record["quality"].items()
]
widgets.table(lines, ["matrices of all layers", "bits a weight", "KL, nats", "same first token"])

# %% [markdown] name="engine-results-reading"
# No engine that reads a pruned model as a dense one is faster by it, and that holds for ours: it has no sparse product.
# What would a GPU with 2:4 gain? At batch 1 a step is bound by bytes, so count them. **A decode step of an 8B in 2:4
# (16-bit values): what part of the dense step's weight bytes does it read? Which other format reads fewer?**

# %% name="engine-predict"
widgets.predict("07f-bytes", "Weight bytes of a step in 2:4 over those in dense 16 bits?", "%")

# %% name="engine-bytes"
two_four = pruning.stored_bits(4096, 4096, 0.5, "2:4") / 4096**2
forms = {
    "16 bits": 16,
    "2:4 of 16 bits": two_four,
    "INT8, groups of 128": kv_cache.bits_per_weight(8, 128),
    "INT4, groups of 128": kv_cache.bits_per_weight(4, 128),
    "2:4 of INT4": 0.5 * (4 + 2) + 16 / 128,
}
widgets.reveal("07f-bytes", 100 * two_four / 16)
H100 = device("H100")
lines = [[name, f"{n:.3f}", f"{n / 16:.1%}"] for name, n in forms.items()]
print(f"prefill on an H100, bf16: {H100.peak('bf16', sparse=True) / H100.peak('bf16'):.0f} times the peak with 2:4")
widgets.table(lines, ["weights in", "bits a weight", "bytes of a step at batch 1"])

# %% [markdown] name="engine-bytes-reading"
# In decoding 2:4 is worth a format of nine bits, and INT8 is smaller and loses far less. In prefill and large batches
# it may be worth up to two, since operations are what is counted there; measured gains are below that.
# <!-- printed: engine-bytes -->
#
# ### Sparse by design
#
# A mixture of experts is sparse from the start: a router takes a few experts for each token, and the others are not
# read. It was trained so. But a *batch* reads whatever any of its tokens needs. An expert stays unread only if every
# token leaves it. **Mixtral has 8 experts and takes 2. With 16 tokens in a step, what share of the experts is read, if
# routers choose at random?**

# %% name="engine-experts-predict"
widgets.predict("07f-experts", "2 of 8 experts a token, 16 tokens: share of experts read?", "%")

# %% name="engine-experts"
read = {tokens: 1 - (1 - 2 / 8) ** tokens for tokens in (1, 2, 4, 16, 64)}
widgets.reveal("07f-experts", 100 * read[16])
mixtral = shape_of("mixtral-8x7b")
print(f"Mixtral uses {mixtral.active_params / mixtral.stated_params:.0%} of its weights for one token")
widgets.table([[n, f"{share:.0%}"] for n, share in read.items()], ["tokens in a step", "of the experts read"])

# %% [markdown] name="rank-text"
# ## 5. Measure and explain
#
# ### Low rank
#
# W [out, in] as A B with A [out, rank], B [rank, in]: fewer numbers if rank is small. The best A B for W alone is its
# singular value decomposition, cut. **How many of the 256 singular values of a 768 × 256 matrix may stay for half of
# its numbers?**

# %% name="rank-predict"
widgets.predict("07f-rank", "Largest rank of 768 × 256 with half of the numbers?", "")

# %% name="rank"
half = low_rank.rank_for(768, 256, 0.5)
widgets.reveal("07f-rank", half)
fig = figure(7.0, 2.5)
ax = fig.subplots()
alt = []
shown = {
    kind: originals[f"model.layers.3.{kind}"] for kind in ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
}
noise = torch.Generator().manual_seed(0)
for (kind, weight), colour in zip(shown.items(), (BLUE, ORANGE, GREEN), strict=True):
    for one, style, label in (
        (weight, "-", kind),
        (torch.randn(weight.shape, generator=noise), ":", "random, its shape"),
    ):
        values = torch.linalg.svdvals(one).square()
        kept = (values.cumsum(0) / values.sum()).numpy()
        ax.plot(np.arange(1, len(kept) + 1) / len(kept), kept, style, color=colour, label=label)
        alt.append(
            f"{kind}, {label}: the first half of the singular values has {kept[len(kept) // 2 - 1]:.0%} of the square"
        )
tidy(ax, "share of singular values kept", "of the squared weights")
ax.legend(fontsize=8, frameon=False)
show(fig, "; ".join(alt) + ".")

# %% [markdown] name="rank-reading"
# Trained weights are not of low rank: each curve hardly bends more than that of a random matrix of its shape. What helps is that
# their *inputs* use few directions: choosing for the output (W times the Cholesky factor of the inputs' Gram matrix is
# cut, and the factor divided out again, as SVD-LLM does) is much better in the table of section 4 than choosing for the
# matrix, and still the most expensive way there.
#
# ### A change of low rank
#
# A *change* of low rank is often enough for fine-tuning (what full fine-tuning changes is not of low rank: Biderman et al.
# 2024). **LoRA**: W + s B A, W frozen. **DoRA** learns the length of each
# row apart. 100 variants of an 8B with rank 16 on all matrices: **how many times the bytes of the model itself?**

# %% name="adapters-predict"
widgets.predict("07f-variants", "An 8B and 100 adapters of rank 16, over the 8B alone?", "times")

# %% name="adapters"
L8 = shape_of("llama-3-8b")
one = lora_params(L8, 16)
widgets.reveal("07f-variants", 1 + 100 * one / L8.num_params)
print(f"one adapter: {one / 1e6:.0f} million numbers, {one / L8.num_params:.2%} of the model; 100 copies: 100 times")
weight, x = originals["model.layers.3.mlp.down_proj"].double(), torch.randn(5, 768, dtype=torch.float64)
lines = []
for name, dora in (("LoRA", False), ("DoRA", True)):
    delta = adapters.fresh(weight, 8, dora=dora)
    assert torch.allclose(delta.merged(weight), weight)  # it changes nothing yet
    delta.b.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    apart, merged = delta.apply(weight, x), x @ delta.merged(weight).T
    lines.append([name, f"{delta.num_parameters():,}", f"{float((apart - merged).abs().max()):.0e}"])
widgets.table(lines, ["a delta of rank 8 for 768 inputs", "numbers", "beside the matrix or merged: largest difference"])

# %% [markdown] name="adapters-reading"
# Merged, an adapted model is as fast as the one before, and one model holds one variant. Unmerged, many variants share
# one W in one batch, at the price of two thin products a matrix. An engine that serves many needs them apart, and its
# prefix cache must not mix them: keys of different adapters differ. Ours does not serve adapters.
#
# ### A student
#
# A smaller model learns from a large one in three ways: from its **text** (response), from its **distribution** on
# given text (logits: KL(teacher ‖ student)), or from the teacher's opinion of what the **student itself** wrote
# (on-policy). Which KL is taken matters when the student *cannot* match the teacher. Here the teacher has two
# favourites, around tokens 4 and 14 of 20, and the student can only make one hump of any place and width. The best
# student by **KL(teacher ‖ student)**, the forward one: **how much probability does it put on tokens 8 to 11, between
# the humps, to which the teacher gives next to nothing?**

# %% name="student-predict"
widgets.predict("07f-humps", "Forward KL: the student's probability on tokens 8 to 11?", "%")


# %% name="student-toy"
def hump(place, width):
    """Logits over 20 tokens: a bell."""
    return -((torch.arange(20.0) - place) ** 2) / (2 * width**2)


teacher = torch.logaddexp(hump(4.5, 1.2) + 0.3, hump(14.5, 1.2))
candidates = [hump(place, width) for place in torch.linspace(0, 19, 77) for width in torch.linspace(0.5, 8, 31)]
students = {}
for name, loss in (("forward", distillation.forward_kl), ("reverse", distillation.reverse_kl)):
    best = min(candidates, key=lambda student: float(loss(student[None, None], teacher[None, None])))
    students[name] = best.softmax(-1)
between = {name: 100 * float(p[8:12].sum()) for name, p in students.items()}
widgets.reveal("07f-humps", between["forward"])
print("tokens 8 to 11:", {name: f"{p:.1f} %" for name, p in between.items()})
print(f"the teacher: {teacher.softmax(-1)[8:12].sum():.2%}")

# %% name="student-figure" jupyter={"source_hidden": true}
fig = figure(7.0, 2.3)
ax = fig.subplots()
ax.bar(range(20), teacher.softmax(-1), color="0.8", label="teacher")
for (name, p), colour, style in zip(students.items(), (BLUE, ORANGE), ("o-", "s--"), strict=True):
    ax.plot(range(20), p, style, color=colour, markersize=4, label=f"student, {name} KL")
tidy(ax, "token", "probability")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "The teacher has two humps. " + "; ".join(f"{n} KL puts {p:.0f} % between them" for n, p in between.items()) + ".",
)

# %% [markdown] name="student-reading"
# Forward KL covers all that the teacher may say, and so says much that it never would. Reverse KL says little that is
# wrong, and leaves out one favourite. Learned from the teacher's traces alone, a student also never sees its own
# mistakes: in serving it goes on from text that it wrote itself, which no training row looked like. That is what
# on-policy distillation is for: the student writes, and the teacher says at each token what it would have said.
#
# The course's draft learned from the same text as its target, not from the target. A short comparison of the three ways
# from these weights, by the repository's script; greedy drafts of one token are kept as often as the two agree:

# %% name="student-results"
short = record["distill"]
print(f"{short['steps']} steps of {short['rows']} rows of {short['length']} tokens; {short['stamp']['date']}")
lines = [
    [name, f"{row['before']:.1%}", f"{row['after']:.1%}", f"{row['seconds']:.0f} s"]
    for name, row in short["losses"].items()
]
widgets.table(lines, ["learned from", "agreement before", "after", "time"])

# %% [markdown] name="student-results-reading"
# The three differ by less than a run of this length can tell. Response is the cheapest: the teacher is not run again.
# On the student's own text the student has to write as well; here it wrote only once, before the first step, so that
# later steps were on-policy no more.
#
# ### Learning while rounded
#
# What a 4-bit format loses can be learned back in part. Going forward the weight is rounded, going backward rounding is
# taken for the identity, and the target is what the unrounded model says: *quantization-aware distillation*. Here for
# one matrix in NVFP4, its outputs on calibration rows being what is to be kept. **What part of the squared error of the
# outputs is left after 40 steps?**

# %% name="aware-predict"
widgets.predict("07f-aware", "Squared error of the outputs, after over before?", "%")

# %% name="aware"
name = "model.layers.3.mlp.down_proj"
scheme, gram = SCHEMES["nvfp4"], grams[name] / grams[name].diagonal().mean()
right = originals[name].contiguous()
learned = right.clone().requires_grad_()
optimizer = torch.optim.Adam([learned], lr=1e-3)
errors = []
for _ in range(41):
    optimizer.zero_grad()
    off = straight_through(learned, scheme) - right
    error = ((off @ gram) * off).sum()  # of the outputs, over all calibration tokens
    errors.append(error.item())
    error.backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
widgets.reveal("07f-aware", 100 * errors[-1] / errors[0])
print("squared error after 0, 10, 20, 30, 40 steps:", [round(e, 2) for e in errors[::10]])

# %% [markdown] name="aware-other-text"
# That is the error on the rows it learned from: 384 tokens for 768 inputs. **And on other text, after over before?**

# %% name="aware-other-predict"
widgets.predict("07f-aware-other", "Squared error of the outputs on other text, after over before?", "%")


# %% name="aware-other"
def gram_of_layer_3(tokens):
    """Of the inputs of its down_proj."""
    seen = Rows.of(model, tokens)
    for layer in model.layers[:3]:
        seen.advance(layer)
    return seen.watch(model.layers[3], linears_of(model.layers[3])[-1], Statistics()).known_gram


fresh = gram_of_layer_3(calibration_tokens(held_out, 4, 96))
before, after = (straight_through(w, scheme).detach() - right for w in (right, learned))
after_over_before = float(((after @ fresh) * after).sum() / ((before @ fresh) * before).sum())
widgets.reveal("07f-aware-other", 100 * after_over_before)
print(f"on other text the squared error is {after_over_before:.2f} of what it was")

# %% [markdown] name="aware-other-reading"
# What is learned on fewer tokens than a matrix has inputs holds for these tokens. Training a whole model takes many
# more, and what it took here:

# %% name="aware-results"
trained = {key.removeprefix("qat "): row for key, row in record.items() if key.startswith("qat")}
lines = []
for key, row in trained.items():
    kls, same = ([row[when][what] for when in ("before", "after")] for what in ("kl", "agreement"))
    took = f"{row['seconds'] / 60:.0f} min"
    lines.append([key, row["steps"], *(f"{kl:.3f}" for kl in kls), *(f"{share:.1%}" for share in same), took])
head = [
    "all matrices, trained while rounded",
    "steps",
    "KL before",
    "after",
    "same first token before",
    "after",
    "took",
]
widgets.table(lines, head)

# %% [markdown] name="aware-reading"
# Second row: rounded to ternary, two of three first tokens are others, and minutes of training take back a part of the
# KL. Models that are ternary for good are mostly trained so from the start.
#
# ## 6. Explore
#
# Change `share` and `score`. *INT8 takes a little over eight bits a weight. Is there any way of removing weights that
# beats its KL with as many bits?*

# %% name="explore"
share, score = 0.25, pruning.wanda  # also: lambda weight, norms: pruning.magnitude(weight)
found = kl_with(lambda n, w: int4(n, w * pruning.keep(score(w, grams[n].diagonal().sqrt()), share)))
int8 = kl_with(lambda n, w: rounded(w, Recipe("int8").scheme_of(n, w.shape[1])))
weights = sum(w.numel() for w in originals.values())
bits = {
    name: sum(
        Recipe(name).scheme_of(n, w.shape[1]).bits_per_weight(tuple(w.shape)) * w.numel() for n, w in originals.items()
    )
    / weights
    for name in ("int4", "int8")
}
print(f"{share:.0%} removed and the rest in INT4: {1 + (1 - share) * bits['int4']:.2f} bits, KL {found:.4f}")
print(f"INT4 alone: {bits['int4']:.2f} bits, KL {quantized:.4f}; INT8: {bits['int8']:.2f} bits, KL {int8:.5f}")

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"Pruning half of the weights halves the model."** Unstructured, in 16 bits: nine bits of sixteen, and a product that
# is no faster but in special kernels (section 3). 2:4: nine bits as well. Half only if whole rows or columns go.
#
# **"Use 512 samples for calibration."** (E07.10) No number fits all methods. Wanda needs one norm an input; a Gram
# matrix needs at least as many tokens as the matrix has inputs, or it has no inverse without damping. How far are the
# norms of a few rows from those of all?

# %% name="errata-samples"
down = linears_of(model.layers[3])[-1]
some = gram_of_layer_3(calibration[:1])
ranks = [int(torch.linalg.matrix_rank(g.double(), rtol=1e-5)) for g in (some, grams[down.name])]
ways = [pruning.keep(pruning.wanda(matrix(down), g.diagonal().sqrt()), 0.5) for g in (some, grams[down.name])]
print(f"{down.name}: 96 and 384 tokens, Gram matrices of rank {ranks[0]} and {ranks[1]} for {len(some)} inputs")
print(
    f"Wanda's masks agree in {float((ways[0] == ways[1]).float().mean()):.1%} of the places; by chance in {0.5**2 * 2:.0%}"
)

# %% [markdown] name="errata-samples-reading"
# 96 tokens are far too few for an inverse of the Gram matrix, and nearly enough for Wanda's norms: of the distance between
# two random halves and the same mask they leave a fifth.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026; look names up in the version you run.
#
# **2:4**: vLLM read such models until the spring of this year and then dropped them, as hardly anyone used them;
# NVIDIA's libraries still multiply them. <!-- source: vLLM's pull request 36799 --> **Distilled** models are
# everywhere: many small models of today learned from the logits or the text of large ones. **Reasoning and tool
# traces**: what a large model learned by reinforcement, thousands of tokens of working out and calls of tools, is
# written down, filtered by whether the answer is right, and a small model is trained on it: response distillation. It
# hands over behaviour that the small one would hardly find by reinforcement itself. The cost moves to serving: a small
# model that thinks for thousands of tokens is not cheap. **Adapters**: engines keep many in memory and multiply each
# row of a batch by its own (S-LoRA, Punica). <!-- source: their papers; DeepSeek-R1's report on distilled models -->
#
# **What training has fixed, serving cannot change.** The number of KV heads, of layers and of experts; and,
# without further training or scaled positions, the length of the window. For one of them:

# %% name="production-fixed"
lines = []
for name in ("llama-2-7b", "llama-3-8b"):
    shape = shape_of(name)
    per_token = kv_cache.bytes_per_token(shape)
    lines.append(
        [
            name,
            f"{shape.num_heads} and {shape.num_kv_heads}",
            f"{per_token / 2**10:.0f} KiB",
            f"{4096 * per_token / 2**30:.1f} GiB",
        ]
    )
widgets.table(lines, ["model", "query and KV heads", "cache of a token", "of 4,096 tokens"])

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("07_quantization").draw(seed=1, tag="fewer"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Removing weights costs more per byte saved than rounding them: INT4 first.
# - Zeros save what a format and a product can skip: anywhere, bytes, and time in special kernels only; 2:4, 9 of 16 bits
#   and up to twice the peak where the hardware has it; whole neurons, everything.
# - Trained matrices are not of low rank. For fine-tuning a change of low rank is often enough: one model, many adapters.
# - A mixture of experts reads few weights for one token; 2 of 8 experts read nearly all for 16 tokens.
# - Distillation: text, logits, or the student's own text. Forward KL covers, reverse KL keeps to what is sure.
# - Rounding can be learned: straight through, towards the unrounded model.
