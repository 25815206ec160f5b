# %% [markdown] name="title"
# # 07c · Which code to choose: GPTQ and AWQ
#
# About 45 minutes. You need `a_numbers`. There a weight got the nearest code. This notebook is about two methods that use
# what the layer will be given: with the same format and the same bits they lose less. Methods for activations that are
# rounded, too, are in `c_outliers`.

# %% name="setup"
import argparse
import inspect
import json
from dataclasses import replace
from pydoc_data.topics import topics

import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, ORANGE, figure, show, tidy
from reference_impl import LLM, course_model
from reference_impl.bench.quality import bootstrap, logprobs, windows_of
from reference_impl.core.prompts import PromptEncoder
from reference_impl.models.quantization import gptq as engine_gptq
from reference_impl.models.quantization.awq import candidate, rounded, scaled_error, search_clipping, search_scales
from reference_impl.models.quantization.by_layer import Layers
from reference_impl.models.quantization.calibration import calibration_tokens
from reference_impl.models.quantization.folding import folds, matrix
from reference_impl.models.quantization.gptq import gptq, inverse_factor, output_error
from reference_impl.models.quantization.one_layer import quantize_layer
from reference_impl.models.quantization.recipes import METHODS
from reference_impl.models.quantization.scheme import Scheme, decode

torch.set_num_threads(1)
FOLDER = course_model("target")
encode_text = PromptEncoder(FOLDER).tokens_of
code_ids = encode_text(inspect.getsource(argparse))
held_out = encode_text(inspect.getsource(json.decoder))
prose_ids = encode_text("\n\n".join(text for _, text in sorted(topics.items())[:20]))
layers = Layers(FOLDER)
INT4 = Scheme("int4", "group", 128)


def rows_before(index, ids, rows=8):
    return layers.rows_before(index, calibration_tokens(ids, rows, 128))


def inputs_of(layer, name, rows):  # what the layer's matrix `name` multiplies, [tokens, in]
    return rows.inputs(layer, folds(layer)[name].linear).float()


def weight_of(layer, name):
    return matrix(folds(layer)[name].linear).contiguous().clone()  # [out, in]


def off(y, exact):
    """The relative error of a product, in percent."""
    return 100 * float((y - exact).norm() / exact.norm())


rows3 = rows_before(3, code_ids)
layer3 = layers.layer(3)
x, weight = inputs_of(layer3, "gate_up_proj", rows3), weight_of(layer3, "gate_up_proj")
gram = x.T @ x
exact = x @ weight.T

# %% [markdown] name="question"
# ## 1. A question with a number
#
# In layer 3 of the course model, gate and up together are a matrix of 1,536 × 256. Rounded to nearest (**RTN**), in INT4
# with a scale for every 128 inputs, its *outputs* on 1,024 tokens of text are wrong by this much: <!-- printed: question-rtn -->

# %% name="question-rtn"
nearest = rounded(weight, INT4)
rtn = off(x @ nearest.T, exact)
print(f"weight {tuple(weight.shape)}, {len(x):,} tokens; the outputs' error {rtn:.1f} %")

# %% [markdown] name="question-text"
# GPTQ keeps the format, the bits, and here **every scale**. All that it does is choose other codes: some weights go to a
# code that is *not* the nearest. What is the error of the outputs then? (Scales that stay are called *static groups*; the
# authors' code, by default, fits a group's scale anew when it gets there.)

# %% name="predict"
widgets.predict("07c-gptq", "Error of the outputs with GPTQ, same scales, other codes?", "%")

# %% name="answer"
found = gptq(weight, gram, INT4)
engines = decode(found.codes, INT4, found.fitted)
with_gptq = off(x @ engines.T, exact)
print(f"outputs: {rtn:.1f} % to nearest, {with_gptq:.1f} % with GPTQ")
widgets.reveal("07c-gptq", with_gptq)

# %% [markdown] name="idea"
# ## 2. The idea
#
# A shop rounds every price to whole coins. Rounding each by itself, a basket of fifty small things may be off by several
# coins. A good cashier keeps the remainder in her head and adds it to the next price before she rounds that: no price is
# nearer to the truth than before, about one in four is further, and the *sum* is never off by more than half a coin.
#
# A layer's output is a sum, so what counts is not how far each weight moved. Two ideas follow from that:
#
# - **GPTQ** carries each column's remainder over to the columns not yet rounded.
# - **AWQ** gives the weights of *large inputs* finer steps.
#
# Both need to see inputs: some rows of text, run through the model once. That is **calibration**. It trains
# nothing; it counts.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.7)
ax = fig.subplots()
random, thirds = torch.Generator().manual_seed(0), []
for name, colour, style in (("qkv_proj", BLUE, "-"), ("gate_up_proj", GREEN, "--"), ("down_proj", ORANGE, "-.")):
    seen = inputs_of(layer3, name, rows3)
    apart = torch.stack([column[torch.randperm(len(column), generator=random)] for column in seen.T], 1)
    for inputs, line, label in ((seen, style, f"inputs of {name}"), (apart, ":", "the same, each shuffled by itself")):
        energy = torch.linalg.eigvalsh(inputs.T @ inputs).flip(0)
        share = 100 * energy.cumsum(0) / energy.sum()
        ax.plot(torch.arange(1, len(share) + 1) * 100 / len(share), share, line, color=colour, label=label)
        thirds.append(f"{share[len(share) // 3 - 1]:.0f} %")
tidy(ax, "directions, % of all, the strongest first", "% of the inputs' energy")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Share of the energy of a layer's inputs in its strongest directions. A third of the directions has "
    f"{thirds[0]}, {thirds[2]} and {thirds[4]} of it for the three matrices. With each column shuffled by itself it is "
    f"{thirds[1]}, {thirds[3]} and {thirds[5]}. GPTQ uses the difference.",
)

# %% [markdown] name="idea-reading"
# A layer's inputs do not go everywhere: a third of all directions has nearly nine tenths of their energy. Part of this is
# that inputs differ in size, and part is chance in 1,024 tokens. Both are left when each input's column is shuffled by
# itself (dotted). The distance between the two lines is what GPTQ uses: inputs that go together. An error of the weights
# that points elsewhere costs little, so there is room to put errors where hardly any input meets them.
#
# ## 3. From scratch
#
# What a method has to know of the inputs fits into one matrix. With $D = W - \hat W$ the squared error of the outputs is
# $\lVert X D^T \rVert^2 = \operatorname{tr}(D H D^T)$, where $H = X^T X$ is the **Gram matrix** of the inputs:

# %% name="scratch-gram"
difference = weight - nearest
direct = (x @ difference.T).square().sum()
by_gram = (difference @ gram * difference).sum()
print(f"{len(x):,} rows of inputs: {x.numel():,} numbers; the Gram matrix: {gram.numel():,}")
print(f"squared error from the inputs {float(direct):.4e}, from the Gram matrix {float(by_gram):.4e}")
assert torch.allclose(direct, by_gram, rtol=1e-3)

# %% [markdown] name="scratch-two-text"
# Now the cashier, on the smallest case: one output, two inputs that are *nearly always equal*, weights 0.4 and 0.4, and
# codes that are whole numbers. To nearest, both become 0 and the output is gone.
#
# GPTQ rounds the first to 0. The best that the second can then become, before it is rounded itself, makes up for the
# loss. **What does it become?**

# %% name="scratch-two-predict"
widgets.predict("07c-second", "Second weight before rounding: 0.4, and what the first lost?", "")

# %% name="scratch-two"
generator = torch.Generator().manual_seed(0)
one = torch.randn(1000, 1, generator=generator, dtype=torch.float64)
two = torch.cat((one, one + 0.05 * torch.randn(1000, 1, generator=generator, dtype=torch.float64)), 1)
w = torch.tensor([0.4, 0.4], dtype=torch.float64)
h_inverse = torch.linalg.inv(two.T @ two)
error = w[0] - w[0].round()  # what is lost of the first
moved = w[1] - error / h_inverse[0, 0] * h_inverse[0, 1]  # the closed form
by_least_squares = torch.linalg.lstsq(two[:, 1:], two @ w - two[:, :1] @ w[:1].round()).solution.item()
print(f"second weight: {moved:.3f}, and by least squares {by_least_squares:.3f}; rounded {moved.round():.0f}")
for name, v in (("to nearest", w.round()), ("GPTQ", torch.stack((w[0].round(), moved.round())))):
    print(f"{name}: weights {v.tolist()}, error of the output {off(two @ v, two @ w):.0f} %")
widgets.reveal("07c-second", float(moved))

# %% [markdown] name="scratch-two-reading"
# The second weight ends up *further* from what it was, and the output is nearer to right. The formula is all of GPTQ.
# When weight $i$ is rounded to $q_i$, each weight $j$ that is still free changes by
#
# $$-\frac{w_i - q_i}{[H^{-1}]_{ii}} \, [H^{-1}]_{ij}$$
#
# and column $i$ is then taken out of $H^{-1}$ by one step of Gaussian elimination. Where $[H^{-1}]_{ij}$ is 0, as it is for
# inputs whose products average to zero, nothing is carried over, and GPTQ is rounding to nearest. (That they are independent
# is not enough: two independent inputs that are both mostly positive have products that are, too.) All rows of a
# matrix have the same inputs, so they share $H^{-1}$ and go through the columns in one order. (*Damping*: a hundredth of the
# mean of $H$'s diagonal is added to it first, so that there is an inverse even where the calibration rows leave directions
# out.)


# %% name="scratch-gptq"
def gptq_by_hand(weight, gram, group_size, damping=0.01):
    """Codes [out, in] from -8 to 7, and what they stand for. One column after another, all rows at once."""
    w, out = weight.double().clone(), torch.empty_like(weight)
    largest = weight.unflatten(1, (-1, group_size)).abs().amax(-1)
    scales = (largest / 7.5).bfloat16().float()  # of the weight as it was: those of rounding to nearest (a_numbers)
    h = gram.double() + damping * gram.diagonal().mean() * torch.eye(len(gram))
    inverse = torch.linalg.inv(h)
    for i in range(len(gram)):
        scale = scales[:, i // group_size]
        out[:, i] = (w[:, i].float() / scale).round().clamp(-8, 7) * scale
        error = (w[:, i] - out[:, i]) / inverse[i, i]
        w -= torch.outer(error, inverse[i])  # columns before i have zeros in this row by now
        inverse -= torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]  # takes column i out
    return out


by_hand = gptq_by_hand(weight, gram, 128)
print(f"{float((engines == by_hand).float().mean()):.2%} of the weights are those of the engine")
assert abs(off(x @ by_hand.T, exact) - with_gptq) < 0.2

# %% [markdown] name="scratch-gptq-reading"
# Same bits, same scales. And the weights themselves? **By how much are they off, in units of their error with RTN?**

# %% name="scratch-weights-predict"
widgets.predict("07c-weights", "Error of the weights with GPTQ over that with RTN?", "times")

# %% name="scratch-weights"
ratio = float((weight - by_hand).norm() / (weight - nearest).norm())
share = float((by_hand != nearest).float().mean())
widgets.reveal("07c-weights", ratio)
print(f"weights: {ratio:.2f} times as far from the original as with RTN; {share:.0%} have another code")
assert ratio > 1 > with_gptq / rtn

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# `inferlab quantize --method gptq` does this, with a shortcut. The rows of $H^{-1}$ that the loop needs, one after the
# other, each divided by the root of its diagonal element, are the rows of its upper Cholesky factor, so they are computed
# once. (The code divides by that root in `error`, and the row is divided by it already: together that is the division by
# $[H^{-1}]_{ii}$ of the formula.) And columns far to the right are changed a block at a time, in one product. The inner
# loop:

# %% name="engine-source"
print(inspect.getsource(engine_gptq._round_block))

# %% [markdown] name="engine-order-text"
# The order of the columns is free. `act_order` takes the largest inputs first, while most other columns are still there
# to make up for them. **Which matrix gains most from it: gate and up, whose inputs come from a norm, or down, a few of
# whose inputs are far larger than the rest?**

# %% name="engine-order"
rows = []
for name in ("gate_up_proj", "down_proj"):
    seen, original = inputs_of(layer3, name, rows3), weight_of(layer3, name)
    line = [name, off(seen @ rounded(original, INT4).T, seen @ original.T)]
    for act_order in (False, True):
        found = gptq(original, seen.T @ seen, INT4, act_order=act_order)
        line.append(off(seen @ decode(found.codes, INT4, found.fitted).T, seen @ original.T))
    rows.append([line[0], *(f"{value:.2f} %" for value in line[1:])])
widgets.table(rows, ["error of the outputs", "RTN", "GPTQ", "GPTQ, large inputs first"])

# %% [markdown] name="awq-text"
# ### AWQ: which inputs matter
#
# Large models have a few input channels that are up to a hundred times as large as the rest, in every token. The course
# model has none after its norms. So three are **planted**, by a change that is exact: the norm's weight is multiplied by
# 10 in three channels, and the next matrix' columns are divided by 10 there. The function of the layer is the same, and
# so is the model; only what is multiplied by what has changed. <!-- source: SmoothQuant's paper, section 3 -->
# <!-- printed: awq-plant -->
#
# **What is planted in this chapter**, each time with the other side divided by as much, so that the layer computes what it
# did; only the explorer of 07d multiplies what it shows and nothing else:
#
# | in | planted | times | divided by as much |
# |---|---|---|---|
# | 07c, AWQ | three input channels of a layer's gate and up | 10 | their columns of the matrix |
# | 07c, the last table, and rotation in its second half; 07d, explorer | the same three | 30 | their columns (07d: nothing) |
# | 07e, and experiment 5 of 07g | four channels of each head's keys | 10 | the same channels of the queries |
# | 07f, pruning | every eighth input channel of a down projection | 30 | their columns of the matrix |
# <!-- stands: chapters/07_quantization/e_kv_cache.py -->
# <!-- stands: chapters/07_quantization/f_fewer_numbers.py -->
#
# Where nothing is said of planting, the model is as it was trained.

# %% name="awq-plant"
PLANTED = [7, 100, 201]


def planted_layer(times):
    layer = layers.layer(3)
    s = torch.ones(256)
    s[PLANTED] = 1 / times
    folds(layer)["gate_up_proj"].apply(s)  # x / s from the norm, and s times the matrix' columns
    return layer


before, after = (rows3.run(layer, 0) for layer in (layer3, planted_layer(10)))
print(f"the layer's outputs differ by {float((before - after).abs().max() / before.abs().max()):.0e} of the largest")
x10 = inputs_of(planted_layer(10), "gate_up_proj", rows3)
weight10 = weight_of(planted_layer(10), "gate_up_proj")
size = x10.square().mean(0).sqrt()
print(f"rms of the planted inputs: {size[PLANTED].tolist()}, median of all {float(size.median()):.2f}")

# %% [markdown] name="awq-keep-text"
# Keep the columns of three inputs in 16 bits and round the rest: 1.2 % of the matrix. **Which three? The ones whose
# weights are largest, or the ones whose inputs are?** <!-- printed: awq-keep -->

# %% name="awq-keep"
exact10 = x10 @ weight10.T
rows = []
for what, order in (("none", []), ("largest weights", weight10.norm(dim=0)), ("largest inputs", size)):
    kept = rounded(weight10, INT4)
    columns = order.argsort(descending=True)[:3] if len(order) else []
    kept[:, columns] = weight10[:, columns]
    rows.append([what, f"{len(columns) / 256:.1%}", f"{off(x10 @ kept.T, exact10):.1f} %"])
widgets.table(rows, ["kept in 16 bits", "of the matrix", "error of the outputs"])

# %% [markdown] name="awq-keep-reading"
# Weights are salient because of what they are multiplied *with*. But columns of another type in the middle of a matrix
# are awkward for a kernel. AWQ gets the same effect without: multiply these columns by $s > 1$ before rounding, and
# divide the inputs by it. As long as the group's largest weight stays, so does the step, and for the scaled column it is
# finer by $s$. Choose $s_j = (\text{mean} |x_j|)^r$ and try twenty $r$ from 0 (no scaling) to nearly 1:

# %% name="awq-search"
curves = {}
for name, (seen, original) in {"as trained": (x, weight), "with planted channels": (x10, weight10)}.items():
    h, mean_abs = seen.T @ seen, seen.abs().mean(0)
    whole = output_error(original, torch.zeros(()), h)
    curves[name] = [
        100 * (scaled_error(original, candidate(mean_abs, step / 20), h, INT4) / whole) ** 0.5 for step in range(20)
    ]
    s = search_scales([original], h, mean_abs, INT4)
    clipped = rounded(search_clipping(original * s, h / torch.outer(s, s), INT4), INT4) / s
    after_clipping = off(seen @ clipped.T, seen @ original.T)
    print(
        f"{name}: {curves[name][0]:.2f} % without, {min(curves[name]):.2f} % at best, s from {s.min():.2f} to "
        f"{s.max():.2f}; and clipped {after_clipping:.2f} %"
    )

# %% name="awq-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 2.6)
ax = fig.subplots()
for (name, curve), colour, marker in zip(curves.items(), (BLUE, ORANGE), ("o", "s"), strict=True):
    ax.plot([step / 20 for step in range(20)], curve, marker + "-", color=colour, markersize=4, label=name)
ax.set_ylim(0)
tidy(ax, "ratio r", "error of the outputs, %")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Error of the outputs over AWQ's ratio. As trained the curve is flat and rises: there is nothing to gain. With planted "
    "channels it falls by a fifth and has its minimum at a ratio of about 0.6.",
)

# %% [markdown] name="awq-reading"
# With planted channels the search undoes most of the harm. As trained it finds next to nothing, which is the honest
# answer for this model. Since $r = 0$ is among the candidates, it never loses *on the calibration rows*; on other
# text it may: section 5.
#
# AWQ has a second part, **clipping**: each group's extremes are cut to the share, from a half to all, that makes the error
# of the outputs least. What is cut is wrong, and the others have finer steps: the last figure of each line that the search
# printed. As trained it finds what scales alone do not. <!-- printed: awq-search -->
#
# `--method awq` does both parts (`--no-clip` leaves the second out), and the search with two things more. What begins a
# block (query, key and value; gate and up) is judged by the error of the *block's* output, as in the authors' code: how
# much an error of a query counts only shows behind the softmax. And half of the scales that are tried are divided by a mean
# of the weights' magnitudes to the power $1 - r$, as llm-compressor does with `duo_scaling="both"`. <!-- stands: reference_impl/models/quantization/awq.py -->
# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# One layer's error is not what a user sees. Now all eight layers, each calibrated on what arrives from the layers that
# were already rounded, and the whole model beside itself in 16 bits, on text it was not calibrated with: **KL** (how far
# the distribution of the next token moved, in nats) and **agreement** (how often both put the same token first). In layer 3
# RTN's outputs were 1.7 times as wrong as GPTQ's. GPTQ is given two amounts of calibration, 512 and 2,048 tokens.
# **With 512: how many times as large as GPTQ's is the KL of RTN?** <!-- printed: measure-ratio -->

# %% name="measure-predict"
widgets.predict("07c-kl", "KL of the whole model: RTN over GPTQ with 512 tokens?", "times")

# %% name="measure-models"
reference = LLM(FOLDER, dtype="float32", kv_cache_bytes=2**20).engine.model


def with_recipe(recipe, num_rows):
    """The engine's model, its linear layers as their codes stand for them."""
    model = LLM(FOLDER, dtype="float32", kv_cache_bytes=2**20).engine.model
    rows = rows_before(0, code_ids, num_rows) if recipe.calibrated else None
    for index in range(len(model.layers)):
        layer = layers.layer(index)
        quantize_layer(layer, rows, recipe)
        if rows is not None:
            rows.advance(layer)
        model.layers[index] = layer
    return model


CASES = {
    "RTN": (METHODS["rtn"], 0),
    "AWQ's scales, 512": (replace(METHODS["awq"], clip=False), 4),
    "AWQ, 512": (METHODS["awq"], 4),
    "GPTQ, 512": (METHODS["gptq"], 4),
    "GPTQ, 2,048": (METHODS["gptq"], 16),
    "INT8, RTN": (METHODS["int8"], 0),
}
models = {name: with_recipe(*case) for name, case in CASES.items()}

# %% name="measure-ratio"
windows = windows_of(held_out, 128, 8)
as_it_is = [logprobs(reference, window[:-1]) for window in windows]
kls, same = {}, {}  # of each window
for name, model in models.items():
    pairs = [(p, logprobs(model, window[:-1])) for p, window in zip(as_it_is, windows, strict=True)]
    kls[name] = torch.stack([(p.exp() * (p - q)).sum(-1).mean() for p, q in pairs])
    same[name] = torch.stack([(p.argmax(-1) == q.argmax(-1)).float().mean() for p, q in pairs])
more = kls["RTN"].mean()
widgets.reveal("07c-kl", float(more / kls["GPTQ, 512"].mean()))
print(f"layer 3: {rtn / with_gptq:.1f} times; KL with 2,048 tokens {more / kls['GPTQ, 2,048'].mean():.1f} times")
print(
    "KL of GPTQ minus that of AWQ, 512 tokens, window by window:", bootstrap(kls["GPTQ, 512"] - kls["AWQ, 512"]).shown()
)
rows = []
for name, kl in kls.items():
    over_rtn = "-" if name == "RTN" else bootstrap(kl - kls["RTN"]).shown()
    rows.append([name, bootstrap(kl).shown(), over_rtn, bootstrap(same[name]).shown(3)])
head = ["method, tokens", "KL, nats (95 %)", "minus RTN's, by window", "same first token (95 %)"]
widgets.table(rows, head)

# %% [markdown] name="measure-reading"
# Intervals come from drawing the eight windows anew. All methods saw the same windows, so compare window by window: the
# mean of the differences and *its* interval. Two separate intervals may overlap although one method is worse in nearly
# every window, since windows differ more than methods do.
#
# With 512 tokens GPTQ is worse than plain rounding, for all that its layers' errors *on these tokens* are far smaller. A
# down projection has 768 inputs: 512 tokens leave directions that were never seen, and GPTQ puts its errors there. AWQ
# is better than plain rounding with so few, and that is clipping's doing: its scales alone are worse, since this model has
# no inputs that stand out, and a ratio chosen for 512 tokens fits other text less. With 2,048 tokens GPTQ is well ahead.
# <!-- stands: datasets/course_model/target/config.json --> <!-- printed: measure-ratio -->
#
# ### How much calibration, and which?
#
# The same on one matrix, so that many cases are cheap. Three texts: the code that GPTQ is calibrated with, other code, and
# prose. **How many tokens does it need here to beat RTN on other code?**

# %% name="measure-calibration-predict"
widgets.predict("07c-tokens", "256 inputs: from how many tokens on is GPTQ better than RTN on other code?", "tokens")

# %% name="measure-calibration"
x_code = inputs_of(layer3, "gate_up_proj", rows_before(3, held_out, 4))
x_prose = inputs_of(layer3, "gate_up_proj", rows_before(3, prose_ids, 4))


def line(name, with_, stored, *texts):
    return [name, with_, *(f"{off(t @ stored.T, t @ weight.T):.1f} %" if t is not None else "-" for t in texts)]


rows, enough = [line("RTN", "-", nearest, None, x_code, x_prose)], []
for text, source, amounts in (("code", x, (64, 128, 256, 512, 1024)), ("prose", x_prose, (512,))):
    for tokens in amounts:
        seen = source[:tokens]
        found = gptq(weight, seen.T @ seen, INT4)
        stored = decode(found.codes, INT4, found.fitted)
        rows.append(line("GPTQ", f"{tokens} of {text}", stored, seen, x_code, x_prose))
        if off(x_code @ stored.T, x_code @ weight.T) < off(x_code @ nearest.T, x_code @ weight.T):
            enough.append(tokens)
widgets.reveal("07c-tokens", min(enough))
widgets.table(rows, ["", "calibrated with", "error there", "on other code", "on prose"])

# %% [markdown] name="measure-calibration-reading"
# Two things to see. The error on the calibration rows is too kind, most of all with few tokens: judge on other text. And
# a method that was calibrated on one kind of text is worse on another kind: calibrate on prompts like yours, with their
# length, language, tools and chat template.
# %% [markdown] name="explore-text"
# ## 6. Explore
#
# The planted layer's matrix as it is, and its columns times AWQ's scale: what is rounded in either case. *Is the scaled
# matrix itself rounded better, in INT4 with groups of 128? If it is not: why are the outputs nearer to right? Do smaller
# groups change your answer?*

# %% name="explore-widget"
s10 = search_scales([weight10], x10.T @ x10, x10.abs().mean(0), INT4)
widgets.rounding(
    {"as it is": weight10[:64].numpy(), "times AWQ's scale": (weight10 * s10)[:64].numpy()}, format_name="int4"
)

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"GPTQ works row by row."** (E07.5) Or: layer by layer, without saying what happens inside. A layer at a time, and in it
# a *column* at a time (an input, as torch stores a weight), in one order for all rows: that is what lets them share one
# inverse. Its ancestor OBQ had an order for each row, hence an inverse for each. Rows have no influence on each other:

# %% name="errata-rows"
some = gptq(weight[:5], gram, INT4)
whole = gptq(weight, gram, INT4)
assert torch.equal(some.codes, whole.codes[:5])
factor = inverse_factor(gram.clone(), 0.01)
print(
    f"five rows alone get the codes that they get among all {len(weight):,}; one factor {tuple(factor.shape)} for all rows"
)

# %% [markdown] name="errata-better-text"
# **"GPTQ is slightly more accurate than AWQ."** (E07.5) AWQ's paper reports the opposite; GPTQ's is older and does not
# compare. It depends on the model, the group size, the order and the calibration. In layer 3 of the course model GPTQ is
# ahead on its own calibration rows; in section 5, with 512 tokens, AWQ was the better of the two. They also combine: AWQ's scale first, then GPTQ's codes. **Channels
# planted 30 times: which of the four in the table has the least error?** <!-- stands: reference_impl/models/quantization/awq.py -->

# %% name="errata-better"
x30, w30 = inputs_of(planted_layer(30), "gate_up_proj", rows3), weight_of(planted_layer(30), "gate_up_proj")
rows = []
for name, (seen, original) in {
    "as trained": (x, weight),
    "planted 10 times": (x10, weight10),
    "planted 30 times": (x30, w30),
}.items():
    h, y = seen.T @ seen, seen @ original.T
    s = search_scales([original], h, seen.abs().mean(0), INT4)
    scaled, plain = (gptq(w, g, INT4) for w, g in ((original * s, h / torch.outer(s, s)), (original, h)))
    kinds = (
        rounded(original, INT4), rounded(original * s, INT4) / s, decode(plain.codes, INT4, plain.fitted),
        decode(scaled.codes, INT4, scaled.fitted) / s,
    )  # fmt: skip
    rows.append([name, *(f"{off(seen @ kind.T, y):.1f} %" for kind in kinds)])
widgets.table(rows, ["gate and up of layer 3", "RTN", "AWQ", "GPTQ", "AWQ's scale, then GPTQ"])

# %% [markdown] name="errata-both"
# **"PTQ needs about 512 samples."** (E07.10) That is one tool's default. GPTQ's paper used 128 sequences of 2,048 tokens;
# section 5 shows what more tokens bring. What counts is tokens against inputs: a Gram matrix of 256 inputs has 256
# directions to see. <!-- source: GPTQ paper, section 5; llm-compressor's examples -->

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026; look names up in the version you run.
#
# **GPTQ** (Frantar et al. 2022) quantized a 175B model in about four GPU hours, the first time that 3 and 4 bits worked at
# such a size. **AWQ** (Lin et al. 2023) needs less calibration and no inverse, and its scales survive a change of text
# better, since a mean of magnitudes says less about the text than a Gram matrix does.
# <!-- source: the two papers' abstracts and evaluations -->
# Both are a few minutes to hours on one GPU. **llm-compressor** (vLLM's) and **NVIDIA ModelOpt** write checkpoints with
# either; **SGLang** and **vLLM** read them.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Then search for a scale, fold it into a norm, and round a column yourself:
# [lab 07](../../labs/07_quantization/quantization.ipynb), parts 4 and 5.

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("07_quantization").draw(seed=1, tag="methods"))

# %% [markdown] name="card"
# ## 10. Card
#
# - A layer's error is $\operatorname{tr}(D H D^T)$ with $H = X^T X$: all that calibration has to keep.
# - GPTQ: columns in one order for all rows; the error of column $i$, over $[H^{-1}]_{ii}$, times row $i$ of $H^{-1}$ goes
#   to the columns not yet rounded. Weights move further, outputs less.
# - AWQ: scale columns by $(\text{mean}|x_j|)^r$, search $r$; fold the inverse into the norm; then cut each group's extremes. Salient is what meets large
#   *inputs*.
# - Judge on text that was not calibrated with, by KL and agreement, two methods by the interval of their difference on the
#   same windows; then on your own task.
