# %% [markdown] name="title"
# # 07d · Whole models: which layers, how many bits, which file
#
# About 40 minutes. You need `a_numbers` and `c_methods`. One matrix at a time is how methods work. What is served is a
# model: some of its layers can take 4 bits and others cannot, and it has to lie in a file that an engine reads.

# %% name="setup"
import argparse
import inspect
import json
import tempfile
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, ORANGE, figure, show, tidy
from chapters.widgets.size_speed_quality import Method
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.assembly.model import load_model
from reference_impl.bench.harness import RESULTS
from reference_impl.bench.quality import logprobs, windows_of
from reference_impl.cli import app
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.core.prompts import PromptEncoder
from reference_impl.models.quantization.awq import rounded
from reference_impl.models.quantization.by_layer import Layers, linears_of
from reference_impl.models.quantization.calibration import Rows, calibration_tokens
from reference_impl.models.quantization.folding import folds, matrix
from reference_impl.models.quantization.recipes import SCHEMES, Recipe
from reference_impl.models.quantization.rounding import group_size_for
from reference_impl.models.quantization.scheme import Scheme
from reference_impl.models.quantization.sensitivity import Cost, allocate
from reference_impl.theory import kv_cache
from reference_impl.theory import quantization as theory
from reference_impl.theory.model_shapes import model as shape_of

torch.set_num_threads(1)
FOLDER = course_model("target")
encode_text = PromptEncoder(FOLDER).tokens_of
windows = windows_of(encode_text(inspect.getsource(json.decoder)), 96, 4)
# Plain matrices, which can be written to: on some CPUs the engine packs them.
plain = UnquantizedLinear(torch.float32, torch.device("cpu"))
model = load_model(FOLDER, torch.float32, linear_method=plain)
originals = {
    linear.name: matrix(linear).clone(memory_format=torch.contiguous_format)
    for layer in model.layers
    for linear in linears_of(layer)
}
by_name = {linear.name: linear for layer in model.layers for linear in linears_of(layer)}
exact = [logprobs(model, window[:-1]) for window in windows]


def kl_now():
    """KL of the model as it is now to the one in 16 bits, nats a token, over the same windows."""
    pairs = zip(exact, (logprobs(model, window[:-1]) for window in windows), strict=True)
    return sum(float((p.exp() * (p - q)).sum(-1).mean()) for p, q in pairs) / len(windows)


def apply(schemes):
    """{linear layer: scheme} -> the KL of the model with these rounded to nearest; the model is then as it was."""
    for name, scheme in schemes.items():
        chosen = Recipe(scheme).scheme_of(name, originals[name].shape[1])
        matrix(by_name[name]).copy_(rounded(originals[name], chosen))
    found = kl_now()
    for name in schemes:
        matrix(by_name[name]).copy_(originals[name])
    return found


def bits_of(name, scheme):
    shape = tuple(originals[name].shape)
    return Recipe(scheme).scheme_of(name, shape[1]).bits_per_weight(shape) * shape[0] * shape[1]


def command(*words):
    """Runs the command `inferlab ...` in this process and prints what it says."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    print("$ inferlab", *(Path(w).name if "/" in str(w) else w for w in words))
    print(result.output.strip())
    assert result.exit_code == 0, result.exception


def text_file(source, name):
    path = Path(tempfile.mkdtemp()) / name
    path.write_text(source, "utf-8")
    return path


# %% [markdown] name="question"
# ## 1. A question with a number
#
# The course model has eight layers. Each is rounded to INT4 *alone*, the other seven stay in 16 bits, and the distance of
# the whole model from the unquantized one is measured (KL, nats a token). **How many times as large is the KL of the most
# sensitive layer as that of the least sensitive one?**

# %% name="predict"
widgets.predict("07d-layers", "KL with one layer in INT4: the worst layer over the best?", "times")

# %% name="sweep"
alone = []
for layer in range(8):
    names = [name for name in originals if f".layers.{layer}." in name]
    alone.append(apply(dict.fromkeys(names, "int4")))
widgets.reveal("07d-layers", max(alone) / min(alone))
widgets.table([[i, f"{kl:.5f}"] for i, kl in enumerate(alone)], ["layer in INT4", "KL, nats"])

# %% [markdown] name="idea"
# ## 2. The idea
#
# You pack for a move, and have bubble wrap for a third of your things. Wrapping everything with a third of the wrap
# breaks the glasses. Wrapping the glasses well and the books not at all costs the same. To know which is which you do
# not need a theory of porcelain: you drop one of each.
#
# - **Sensitivity** is measured: change one part, keep the rest, look at the model's output.
# - **Mixed precision** gives each part its own number of bits, under a budget for all.
# - **The format on disk** has to say which part is stored how; otherwise nobody can read it.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.0, 2.4)
ax = fig.subplots()
ax.bar(range(8), [1000 * kl for kl in alone], color=BLUE)
tidy(ax, "the layer that is in INT4", "KL, 1/1000 nats")
show(fig, "KL with one layer in INT4, layer by layer: " + ", ".join(f"{kl:.4f}" for kl in alone) + ".")

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# Two rules of thumb are in circulation: "keep the last one or two layers", and "keep the output projection and the
# embedding". And by kind: are the four matrices of a layer alike? In the course model one table is embedding and output
# projection. **All 32 matrices of the layers in INT4, or this one table: which does more harm?**


# %% name="scratch-kinds"
def table_in(scheme):
    """KL with the embedding, which is the output projection as well, rounded, and nothing else."""
    before = model.embedding.clone()
    model.embedding.copy_(rounded(before, scheme))
    found = kl_now()
    model.embedding.copy_(before)
    return found


int4 = Scheme("int4", "group", group_size_for(256))
rows = []
for kind in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", ""):
    names = [name for name in originals if kind in name]
    weights = sum(originals[name].numel() for name in names)
    rows.append([kind or "all of these", f"{weights:,}", apply(dict.fromkeys(names, "int4"))])
rows.append(["embedding and output", f"{model.embedding.numel():,}", table_in(int4)])
rows = [[name, weights, f"{kl:.4f}", f"{1e9 * kl / int(weights.replace(',', '')):.1f}"] for name, weights, kl in rows]
widgets.table(rows, ["in INT4, the rest in 16 bits", "weights", "KL", "KL per 10^9 weights"])

# %% [markdown] name="scratch-kinds-reading"
# What a part costs in quality and what it saves in bits are different things: the last column is the price per weight.
#
# ### A budget of bits
#
# Each layer may be in INT4 or INT8, and all together may have 5.5 bits a weight, scales included. If harms add up, the
# best choice is a knapsack problem. A greedy solution: begin with INT4 everywhere, and spend bits where they buy most.


# %% name="scratch-greedy"
def greedy(costs, budget):
    """costs: {layer: {scheme: Cost(bits, harm)}}, int4 and int8 -> {layer: scheme} within the budget of bits."""
    chosen = dict.fromkeys(costs, "int4")
    spent = sum(costs[layer]["int4"].bits for layer in costs)

    def worth(layer):  # harm removed for each bit
        small, large = costs[layer]["int4"], costs[layer]["int8"]
        return (small.harm - large.harm) / (large.bits - small.bits)

    for layer in sorted(costs, key=worth, reverse=True):
        more = costs[layer]["int8"].bits - costs[layer]["int4"].bits
        if spent + more <= budget:
            chosen[layer], spent = "int8", spent + more
    return chosen


matrices_of = {layer: [name for name in originals if f".layers.{layer}." in name] for layer in range(8)}
costs = {}
for layer, names in matrices_of.items():
    bits = {s: int(sum(bits_of(name, s) for name in names)) for s in ("int4", "int8")}
    harm = {"int4": alone[layer], "int8": apply(dict.fromkeys(names, "int8"))}
    costs[str(layer)] = {s: Cost(bits[s], harm[s]) for s in bits}
total = sum(weight.numel() for weight in originals.values())
print({layer: scheme for layer, scheme in greedy(costs, 5.5 * total).items() if scheme == "int8"})

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# `allocate` finds the choice of least harm exactly, for any number of schemes. Beside it two rules of thumb with the same
# number of INT8 layers. Does the sum of single harms foretell what the model does? **All layers in INT4 at once: KL
# over the sum of the eight KLs?**

# %% name="engine-predict"
widgets.predict("07d-sum", "All layers in INT4: KL over the sum of the single ones?", "times")

# %% name="engine-allocate"
best = allocate(costs, int(5.5 * total))
number = sum(scheme == "int8" for scheme in best.values())
order = [str(layer) for layer in range(8)]
CHOICES = {
    "INT4 everywhere": dict.fromkeys(order, "int4"),
    "the last ones in INT8": {i: "int8" if int(i) >= 8 - number else "int4" for i in order},
    "the first ones in INT8": {i: "int8" if int(i) < number else "int4" for i in order},
    "allocated": best,
    "INT8 everywhere": dict.fromkeys(order, "int8"),
}
rows = []
for name, choice in CHOICES.items():
    kl = apply({matrix_name: choice[i] for i in order for matrix_name in matrices_of[int(i)]})
    foretold = sum(costs[i][choice[i]].harm for i in order)
    bits = sum(costs[i][choice[i]].bits for i in order) / total
    rows.append(
        [name, ", ".join(i for i in order if choice[i] == "int8"), f"{bits:.2f}", f"{foretold:.4f}", f"{kl:.4f}"]
    )
widgets.reveal("07d-sum", float(rows[0][4]) / float(rows[0][3]))
widgets.table(rows, ["", "layers in INT8", "bits a weight", "sum of single KLs", "KL of the model"])

# %% [markdown] name="engine-reading"
# Harms add up roughly, which is why a choice made layer by layer is a good one. Which rule of thumb does well is a
# property of the model, and to know it you measure.
#
# ### The commands
#
# `inferlab quantize` writes a folder, a layer at a time; `inferlab eval` compares it with what it was made from. Beside KL
# it prints the **perplexity**: $e$ to the mean negative log-likelihood of a token, roughly among how many tokens the model
# is undecided. It asks only for the one token that the text has, and averages over all text: it is the wrong test where a
# task hangs on few tokens (a tool call, a number). There measure the task itself, and KL on its prompts.
#
# NVFP4
# has 4 bits, a scale of 8 bits for 16 weights, and one number for the tensor. **How much of a matrix' 16-bit bytes does
# it take on disk?**

# %% name="commands-predict"
widgets.predict("07d-disk", "Bytes of a matrix in NVFP4 over those in 16 bits?", "%")

# %% name="commands"
out = Path(tempfile.mkdtemp()) / "target-nvfp4"
command("quantize", FOLDER, "--method", "nvfp4", "-o", out)
held_out = text_file(inspect.getsource(json.decoder), "held_out.txt")
command("eval", out, "--against", FOLDER, "--text", held_out, "--length", 96, "--windows", 4)

# %% name="disk"
index = json.loads((out / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
prefix = "model.layers.0.mlp.down_proj."
tensors = load_file(out / index[prefix + "weight_packed"])
rows, stored = [], 0
for name, tensor in tensors.items():
    if name.startswith(prefix):
        stored += tensor.nbytes
        rows.append([name.removeprefix(prefix), str(tensor.dtype), list(tensor.shape), f"{tensor.nbytes:,}"])
weights = 256 * 768
widgets.reveal("07d-disk", 100 * stored / (2 * weights))
print(f"{weights:,} weights: {2 * weights:,} bytes in 16 bits, {stored:,} now: {stored / (2 * weights):.3f} of it")
assert abs(stored / (2 * weights) - theory.stored_bits("e2m1", 16, "e4m3") / 16) < 1e-4
widgets.table(rows, ["tensor of down_proj", "dtype", "shape", "bytes"])

# %% [markdown] name="disk-reading"
# That is **compressed-tensors**, the format of vLLM's llm-compressor. `weight_packed` has two codes in a byte, and
# config.json says how to read them. No tool has to guess from names: <!-- printed: disk -->

# %% name="disk-config"
config = json.loads((out / "config.json").read_text("utf-8"))["quantization_config"]
[group] = config["config_groups"].values()
print(config["quant_method"], config["format"], "| not quantized:", config["ignore"][:2])
print({key: group["weights"][key] for key in ("num_bits", "type", "strategy", "group_size")}, group["targets"][:2])
reply = LLM(out, kv_cache_bytes=2**20).generate(
    ["def read_lines(path):\n"], SamplingParams(max_tokens=16, temperature=0)
)
print(repr(reply[0].text))

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# Size against quality, all matrices of the layers in one scheme. Two have 4-bit floats: MXFP4 with a power of two for 32
# weights, NVFP4 with an 8-bit float for 16. **How many times as large is MXFP4's KL as NVFP4's?**

# %% name="measure-predict"
widgets.predict("07d-mxfp4", "KL of MXFP4 over that of NVFP4, course model?", "times")

# %% name="measure-schemes"
found = {}
for scheme in ("int8", "fp8-weights", "mxfp8", "nvfp4", "mxfp4", "int4", "nf4"):
    bits = sum(bits_of(name, scheme) for name in originals) / total
    found[scheme] = bits, apply(dict.fromkeys(originals, scheme))
widgets.reveal("07d-mxfp4", found["mxfp4"][1] / found["nvfp4"][1])
rows = [[name, f"{bits:.2f}", f"{bits / 16:.3f}", f"{kl:.5f}"] for name, (bits, kl) in found.items()]
widgets.table(rows, ["scheme", "bits a weight", "of 16 bits", "KL, nats"])

# %% name="measure-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 2.9)
ax = fig.subplots()
for place, (name, (bits, kl)) in enumerate(found.items()):
    ax.plot(bits, kl, "os^vD<>"[place], color=(BLUE, ORANGE, GREEN)[place % 3], label=name)
ax.set_yscale("log")
tidy(ax, "bits a weight, scales included", "KL, nats")
ax.legend(fontsize=8, frameon=False, ncols=2)
show(
    fig,
    "KL over bits per weight for seven schemes, rounded to nearest. "
    + "; ".join(f"{name}: {bits:.2f} bits, {kl:.5f}" for name, (bits, kl) in found.items()),
)

# %% [markdown] name="measure-scales-text"
# Blackwell's tensor cores multiply MXFP8 and NVFP4 as they are: MXFP8 takes nearly twice the bits and has about a tenth of
# the KL. Beside FP8 with a scale for each output (`fp8-weights`) MXFP8 gains nothing on weights like these: it has more
# scales, and each is only a power of two. It gains where groups of one output differ by more than the range of E4M3.
#
# ### What shares an FP8 scale
#
# FP8 can have one scale for the tensor, for each output, or for each block of 128 × 128. With ordinary weights it hardly
# matters, since a float brings its own range. It matters when that range is left. Here every other output's weights are
# made very much smaller, which a division of their scales by the same number would undo. **In which of the
# four schemes does the error stay what it was?**

# %% name="measure-scales"
ordinary = originals["model.layers.3.mlp.gate_up_proj"].clone()
faint = ordinary.clone()
faint[::2] *= 2.0**-15
rows = []
for scheme in ("fp8-tensor", "fp8-block", "fp8", "mxfp8"):
    line = [scheme, SCHEMES[scheme].per]
    for weight in (ordinary, faint):
        difference = rounded(weight, SCHEMES[scheme]) - weight
        line.append(f"{100 * float(difference[::2].norm() / weight[::2].norm()):.1f} %")
    rows.append(line)
widgets.table(rows, ["scheme", "a scale per", "every other output", "the same, times 2^-15"])

# %% [markdown] name="measure-entropy-text"
# ### Is it still as sure?
#
# Rounding is noise on the logits. Decoding parameters (temperature, top-p) were chosen for the model without it. **Does
# the mean entropy of the next token rise or fall in INT4?**


# %% name="measure-entropy"
def entropy(logprobs_of_windows):
    """Mean over all tokens, nats."""
    return float(torch.cat([-(p.exp() * p).sum(-1) for p in logprobs_of_windows]).mean())


for name in originals:
    matrix(by_name[name]).copy_(rounded(originals[name], Recipe("int4").scheme_of(name, originals[name].shape[1])))
noisy = [logprobs(model, window[:-1]) for window in windows]
for name in originals:
    matrix(by_name[name]).copy_(originals[name])
best = [float(torch.cat([p.exp().amax(-1) for p in ps]).mean()) for ps in (exact, noisy)]
print(
    f"entropy {entropy(exact):.3f} and {entropy(noisy):.3f} nats; mean probability of the first {best[0]:.3f} and {best[1]:.3f}"
)

# %% [markdown] name="measure-entropy-reading"
# If it has shifted, so has what a temperature means: the same setting is more or less random than it was. After a change
# of precision, look at the parameters again, on your task (here nothing was tuned anew, only the entropy was measured); and
# watch each task by itself, since an average hides the one that broke.
#
# ## 6. Explore
#
# Real activations of the course model. A large model would show yellow vertical lines, the same channels in every token.
# This one has them in one place only. *Find the inputs with the largest outlier: is it a channel or a token that stands
# out? Which scale helps there, and which after a norm? The last entry has channels planted in it (`c_methods`).*

# %% name="explore-widget"
decoder, used = Layers(FOLDER).front(calibration_tokens(encode_text(inspect.getsource(argparse)), 1, 96))
rows, shown = Rows.of(decoder, used), {}


class Kept:
    def __init__(self, name):
        self.name = name

    def add(self, x):
        shown[self.name] = x.numpy()


for index in range(4):
    for kind, fold in folds(model.layers[index]).items():
        if (index, kind) in ((2, "down_proj"), (3, "gate_up_proj"), (3, "o_proj")):
            rows.watch(model.layers[index], fold.linear, Kept(f"layer {index}, {kind}"))
    rows.advance(model.layers[index])
planted = shown["layer 3, gate_up_proj"].copy()
planted[:, [7, 100, 201]] *= 30
widgets.outliers(shown | {"layer 3, gate_up_proj, planted": planted})

# %% [markdown] name="explore-choice-text"
# All methods of `inferlab quantize` on the course model: their KL as it was measured last, over their size, and over the
# time of a decode step of a *large* model at its device's limits (chapter 07b). `w4a8` has INT4 weights and INT8
# activations. Blue: nothing else is as good in both.
# *Which methods are worth having at batch 1? In a large batch with a short context? On an A100, which has no FP8?*

# %% name="explore-choice"
record = json.loads((RESULTS / "gates.json").read_text("utf-8"))["models"]["target"]
arithmetic = dict.fromkeys(("smoothquant", "w8a8", "w4a8"), "int8") | dict.fromkeys(
    ("fp8", "fp8-tensor", "fp8-block"), "fp8"
)
methods = {
    name: Method(runs[0]["bits_per_weight"], median(run["kl"] for run in runs), arithmetic.get(name, "bf16"))
    for name, runs in record.items()
}
widgets.size_speed_quality(methods)

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"Keep the last one or two layers in high precision." "Keep the LM head and the embedding."** (E07.11) Two heuristics for
# one question, and neither says for which model. The sweep of this notebook took seconds:

# %% name="errata-layers"
ranked = sorted(range(8), key=lambda layer: alone[layer], reverse=True)
print(f"most sensitive first: {ranked}; the last layer is number {ranked.index(7) + 1} of 8")
per_weight = {"table": table_in(int4) / model.embedding.numel(), "layers": sum(alone) / total}
print(
    f"per weight the embedding table costs {per_weight['table'] / per_weight['layers']:.1f} times what the layers cost"
)

# %% [markdown] name="errata-reading"
# Most checkpoints leave the output projection and the embedding in 16 bits. In a large model they are a small part of the
# weights; in a small one they are not, and once the rest is in 4 bits their share of the bytes is several times as large.
# (Small models also lose more in 4 bits: with GPTQ the perplexity of OPT rises by an eighth at 125M and by less than 1 %
# at 175B.) <!-- source: GPTQ's paper, Frantar et al. 2022, the table of OPT on WikiText2 -->

# %% name="errata-share"
rows = [["course model", model.embedding.numel() / (model.embedding.numel() + total)]]
for name in ("llama-3-8b", "llama-3-70b"):
    rows.append([name, shape_of(name).embedding_params / shape_of(name).num_params])
widgets.table([[name, f"{share:.0%}"] for name, share in rows], ["model", "share of embedding and output projection"])

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026; look names up in the version you run.
#
# **GGUF** is the file of llama.cpp: one file with weights, tokenizer and settings, made for CPUs and laptops. A block of 32
# codes and its scale lie side by side in memory, so that one pass over the bytes has both. Its types, in bits:

# %% name="production-gguf"
rows = [
    ["Q8_0", "32 codes of 8 bits, a 16-bit scale", kv_cache.bits_per_weight(8, 32)],
    ["Q4_0", "32 codes of 4 bits, a 16-bit scale", kv_cache.bits_per_weight(4, 32)],
    ["Q4_1", "the same and a 16-bit minimum", kv_cache.bits_per_weight(4, 32, zero_point_bits=16)],
    ["Q4_K", "256 codes of 4 bits, 8 scales and 8 minima of 6 bits, two of 16", 4 + (2 * 8 * 6 + 2 * 16) / 256],
]
widgets.table(rows, ["type", "a block has", "bits a weight"])

# %% [markdown] name="production-birth"
# **Quantized at birth.** Some models are published in few bits only. DeepSeek-V3 was trained with FP8 products and
# weights in blocks of 128 × 128; gpt-oss had its experts in MXFP4 already in post-training and was published
# so, with attention in 16 bits. There is then no "loss against BF16" to measure: the quantized model is the original. An engine loads them like any checkpoint (ours:
# `fp8` with block scales, and compressed-tensors), and a GPU without the format unpacks it.
# <!-- source: DeepSeek-V3's report, section 3.3; gpt-oss' model card -->
#
# ### Exercise: a 7B with AWQ
#
# Here, on a CPU, the same steps with the course model, some minutes in all (they are not run in this notebook):
#
# ```
# inferlab quantize target --method awq --calibration YOUR_TEXT --rows 8 --length 128 -o target-awq
# inferlab eval target-awq --against target --text OTHER_TEXT
# inferlab generate "def read_lines(path):" --model target-awq --max-tokens 48
# ```
#
# With a GPU and the folder of a 7B: the first two commands with that folder in the place of the name (it goes a layer at a
# time, so the model need not fit into memory), and then the throughput of both folders, from one request to a large
# batch: serve each, and measure it with 1, 8 and 32 users
#
# ```
# inferlab serve FOLDER
# inferlab bench serve --workload chat --concurrency 8 --num 100
# ```
#
# Write down first what `b_what_it_buys` foretells for each: gain, and why it fades. Then explain the differences.
# (`g_workbench` has forecast, quantizing and both measurements as one program: experiment 9.)

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("07_quantization").draw(seed=1, tag="models"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Sensitivity is measured: one part rounded, the rest exact, KL of the model. Rules of thumb hold for the models they
#   were made with.
# - Under a budget: take what removes most harm per bit, and then look for a better choice: that rule is greedy, and 07g
#   has a case where it ends at more harm than need be. Harms of single layers roughly add up.
# - NVFP4 takes 4.5 of 16 bits, 0.281, for weights and caches.
#   <!-- tested: tests/claims/test_chapter_07.py::test_e07_02_nvfp4_has_4_5_bits_for_weights_and_for_the_cache -->
# - A checkpoint says in config.json what is stored how, and what is not quantized.
# - After a change of precision: each task by itself, and decoding parameters again.
