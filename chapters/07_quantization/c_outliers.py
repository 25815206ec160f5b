# %% [markdown] name="title"
# # 07c, second half · Activations, too: SmoothQuant and rotation
#
# About 30 minutes. You need `c_methods`. There only weights were rounded. If activations are, too, a few inputs far larger
# than the rest set the step for all of a token. Two methods take such inputs away before anything is rounded, and training
# is what is left where that is not enough.

# %% name="setup"
import argparse
import inspect
import json

import torch

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, ORANGE, RED, figure, show, tidy
from reference_impl import course_model
from reference_impl.core.prompts import PromptEncoder
from reference_impl.models.quantization.awq import rounded
from reference_impl.models.quantization.by_layer import Layers
from reference_impl.models.quantization.calibration import Statistics, calibration_tokens
from reference_impl.models.quantization.folding import folds, matrix
from reference_impl.models.quantization.gptq import gptq
from reference_impl.models.quantization.hadamard import incoherence, random_rotation
from reference_impl.models.quantization.scheme import Activations, Scheme, decode
from reference_impl.models.quantization.smoothquant import smoothing, weight_reach
from reference_impl.models.quantization.stored import round_activations

torch.set_num_threads(1)
FOLDER = course_model("target")
encode_text = PromptEncoder(FOLDER).tokens_of
code_ids = encode_text(inspect.getsource(argparse))
held_out = encode_text(inspect.getsource(json.decoder))
layers = Layers(FOLDER)
INT4, INT8, TOKENS = Scheme("int4", "group", 128), Scheme("int8", "channel"), Activations("int8")


def rows_before(index, ids, rows=8):
    return layers.rows_before(index, calibration_tokens(ids, rows, 128))


def inputs_of(layer, name, rows):  # what the layer's matrix `name` multiplies, [tokens, in]
    return rows.inputs(layer, folds(layer)[name].linear).float()


def weight_of(layer, name):
    return matrix(folds(layer)[name].linear).contiguous().clone()  # [out, in]


def off(y, exact):
    """The relative error of a product, in percent."""
    return 100 * float((y - exact).norm() / exact.norm())


def planted_layer(times):
    """Layer 3 with three inputs of gate and up so many times as large, their columns divided by as much (c_methods)."""
    layer = layers.layer(3)
    s = torch.ones(256)
    s[[7, 100, 201]] = 1 / times
    folds(layer)["gate_up_proj"].apply(s)
    return layer


rows2 = rows_before(2, code_ids, rows=4)
x2, w2 = inputs_of(layers.layer(2), "down_proj", rows2), weight_of(layers.layer(2), "down_proj")
y2 = x2 @ w2.T

# %% [markdown] name="question"
# ## 1. A question with a number
#
# **W8A8**: the weights are INT8 with a scale for each output, and the activations, too, with a scale for each token. The
# down projection of layer 2 of the course model has real outliers among its inputs: <!-- printed: question-outlier -->

# %% name="question-outlier"
print(
    f"{len(x2)} tokens of {x2.shape[1]} inputs: the largest is {float(x2.abs().max() / x2.square().mean().sqrt()):.0f} times the rms of all"
)

# %% [markdown] name="question-text"
# Round only the weight, and the outputs are off by a certain share. Round both sides: by how many times as much?

# %% name="predict"
widgets.predict("07c-both", "Error of the outputs, both sides in INT8, over that with the weight alone?", "times")

# %% name="answer"
x8, w8 = round_activations(x2, TOKENS), rounded(w2, INT8)
alone, both = off(x2 @ w8.T, y2), off(x8 @ w8.T, y2)
print(f"outputs: {alone:.2f} % with the weight alone in INT8, {both:.2f} % with both sides")
widgets.reveal("07c-both", both / alone)

# %% [markdown] name="idea"
# ## 2. The idea
#
# A token's inputs share one step, and the largest of them sets it. One large input makes it coarse for all the others. But
# what is rounded may be chosen, as long as the product stays: an invertible matrix $M$ on one side, its inverse on the other,
# $x W^T = (x M)(W M^{-T})^T$.
#
# - **SmoothQuant** takes a diagonal $M$: each channel is divided by a factor, and its column of the weight multiplied by it.
#   That moves the difficulty from one side of the product to the other.
# - **Rotation** takes an orthogonal $M$: it mixes the channels, so that none is large.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 2.6)
ax = fig.subplots()
s2 = smoothing(x2.abs().amax(0), weight_reach(w2), 0.5)
shown = {"inputs of a down_proj": x2, "smoothed": x2 / s2, "rotated": x2 @ random_rotation(768).float()}
for (name, inputs), colour, style in zip(shown.items(), (BLUE, ORANGE, GREEN), ("-", "--", "-."), strict=True):
    over_rms = inputs.abs().amax(0).sort(descending=True).values / inputs.square().mean().sqrt()
    ax.plot(range(1, 1 + len(over_rms)), over_rms, style, color=colour, label=name)
ax.set_xscale("log")
ax.set_yscale("log")
tidy(ax, "channels, the largest first", "largest / rms of all")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "The largest magnitude of each channel of layer 2's down projection's inputs, over the rms of all, the largest channel "
    "first, both axes logarithmic; as they are, smoothed with an alpha of 0.5, and rotated.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# SmoothQuant divides input $j$ by
#
# $$s_j = \frac{\max|x_j|^\alpha}{\max|W_j|^{1-\alpha}}$$
#
# and multiplies column $j$ of the weight by it; the maxima of $x$ come from calibration rows. With α = 0.5 both sides of a channel then have the same reach, the root of
# the product of their largest values:

# %% name="scratch-smooth"
alpha = 0.5
s = x2.abs().amax(0) ** alpha / w2.abs().amax(0) ** (1 - alpha)  # [in]
smoothed, scaled = x2 / s, w2 * s
assert torch.allclose(smoothed.abs().amax(0), scaled.abs().amax(0), rtol=1e-4)
assert torch.allclose(s, smoothing(x2.abs().amax(0), weight_reach(w2), alpha), rtol=1e-4)
print(
    f"the product is off by {off(smoothed @ scaled.T, y2):.0e} %; with both sides in INT8 by "
    f"{off(round_activations(smoothed, TOKENS) @ rounded(scaled, INT8).T, y2):.2f} %"
)

# %% [markdown] name="scratch-rotation-text"
# A Hadamard matrix has entries $\pm 1/\sqrt n$ and is orthogonal: an outlier of size $m$ in one channel becomes
# $m / \sqrt n$ in each of $n$. Sylvester's construction doubles one:

# %% name="scratch-rotation"
q = torch.ones(1, 1)
while len(q) < 256:
    q = torch.cat((torch.cat((q, q), 1), torch.cat((q, -q), 1))) / 2**0.5
outlier = torch.zeros(256)
outlier[7] = 64.0
assert torch.allclose(q @ q.T, torch.eye(256), atol=1e-5)
print(
    f"an outlier of 64 in one of 256 channels: {(outlier @ q).abs().min():.2f} to {(outlier @ q).abs().max():.2f} in each"
)

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# The division is **folded** into what computes $x$, here into the rows of
# the up projection; so while the model runs there is nothing to do. (`--method smoothquant`, like the paper,
# smooths only what follows a norm. Here it is a down projection, because that is where this model has outliers.)
# Is the function really unchanged?

# %% name="smooth-fold"
layers64 = Layers(FOLDER, torch.float64)
layer2 = layers64.layer(2)
rows2 = rows_before(2, code_ids, rows=4)
rows2.x = rows2.x.double()
rows2.ropes = [(cos.double(), sin.double()) for cos, sin in rows2.ropes]
before = rows2.run(layer2, 0)
fold, seen = folds(layer2)["down_proj"], Statistics()
rows2.watch(layer2, fold.linear, seen)
fold.apply(smoothing(seen.max_abs, weight_reach(matrix(fold.linear)), 0.5))
change = float((rows2.run(layer2, 0) - before).abs().max() / before.abs().max())
print(f"float64: the layer's outputs change by {change:.0e} of the largest")
assert change < 1e-12

# %% [markdown] name="engine-rotate-text"
# `--method rotate` rotates the residual stream of the whole model; that can be done offline since
# an RMSNorm without a weight commutes with a rotation (its weight goes into the next matrix first; a LayerNorm also takes
# the mean off, which a rotation does not keep, so that has to go into the matrix before it). The input of a down
# projection has no such place: there QuaRot multiplies by a Hadamard matrix while the model runs.

# %% [markdown] name="smooth-predict-text"
# ## 5. Measure and explain
#
# Both sides in INT8 again, over α. **At α = 0.5: is the *weight* rounded better, as well, or worse than without
# smoothing?** Give the ratio of its error (RMS over the weight's own) with and without.

# %% name="smooth-predict"
widgets.predict("07c-smooth", "Weight's own error with α = 0.5 over that without smoothing?", "times")

# %% name="smooth-alpha"
sides = {}
for alpha in (None, 0.0, 0.25, 0.5, 0.75, 1.0):
    s = torch.ones(x2.shape[1]) if alpha is None else smoothing(x2.abs().amax(0), weight_reach(w2), alpha)
    left, right = x2 / s, w2 * s
    left8, right8 = round_activations(left, TOKENS), rounded(right, INT8)
    products = (left8 @ right.T, left @ right8.T, left8 @ right8.T)
    sides[alpha] = [off(right8, right), *(off(product, y2) for product in products)]
widgets.reveal("07c-smooth", sides[0.5][0] / sides[None][0])
rows = [["no smoothing" if a is None else a, *(f"{value:.2f} %" for value in line)] for a, line in sides.items()]
widgets.table(rows, ["alpha", "weight itself", "output, x rounded", "output, W rounded", "output, both rounded"])

# %% name="smooth-figure" jupyter={"source_hidden": true}
fig = figure(7.2, 2.6)
ax = fig.subplots()
alphas = [alpha for alpha in sides if alpha is not None]
for place, (name, colour, style) in enumerate(
    (("x rounded", BLUE, "o-"), ("W rounded", ORANGE, "s--"), ("both", GREEN, "^-.")), 1
):
    ax.plot(alphas, [sides[a][place] for a in alphas], style, color=colour, label=name)
ax.axhline(sides[None][3], color=RED, linestyle=":", label="both, without smoothing")
ax.set_ylim(0)
tidy(ax, "alpha", "error of the outputs, %")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Error of the outputs of layer 2's down projection in INT8 over alpha. What rounding the activations costs falls up to "
    "an alpha of 0.75 and is higher again at 1, what rounding the weights costs rises; both together are least at 0.5.",
)

# %% [markdown] name="smooth-reading"
# Up to α = 0.75 one side falls while the other rises: difficulty is **moved**, and α says how far. At 1 both rise: all
# input channels are as large as each other by then, and their rounding errors meet columns that were multiplied up. 8 bits
# for the weight leave room to move; 4 bits mostly do not, so SmoothQuant goes with W8A8.
#
# ### Rotation: no channel at all
#
# Layer 3 with three channels planted 30 times as large (`c_methods`, section 4), smoothed, and with a random rotation of the
# engine's. **Which of the two leaves the smaller error?**

# %% name="rotate"
rows3 = rows_before(3, code_ids)
x30, w30 = inputs_of(planted_layer(30), "gate_up_proj", rows3), weight_of(planted_layer(30), "gate_up_proj")
q, y30 = random_rotation(256).float(), x30 @ w30.T
s = smoothing(x30.abs().amax(0), weight_reach(w30), 0.5)
rows = []
for name, left, right in (("as it is", x30, w30), ("smoothed", x30 / s, w30 * s), ("rotated", x30 @ q, w30 @ q)):
    y = round_activations(left, TOKENS) @ rounded(right, INT8).T
    rows.append([name, f"{incoherence(left):.1f}", f"{incoherence(right):.1f}", f"{off(y, y30):.2f} %"])
widgets.table(rows, ["W8A8, planted 30 times", "largest / rms of x", "of W", "error of the outputs"])

# %% [markdown] name="rotate-reading"
# Rotating needs no calibration, and flattens whatever is there. It mends less here than smoothing, whose factors are
# made for exactly these channels.
#
# ### During training instead
#
# All this is **post-training** quantization (PTQ). **Quantization-aware training** (QAT) rounds in the forward pass while
# the weights are still being trained, and passes the gradient through the rounding as if it were not there (the
# *straight-through estimator*). One layer, 60 steps, trained to reproduce its own outputs:

# %% name="qat"
x = inputs_of(layers.layer(3), "gate_up_proj", rows3)
x_code = inputs_of(layers.layer(3), "gate_up_proj", rows_before(3, held_out, 4))
weight, generator = weight_of(layers.layer(3), "gate_up_proj"), torch.Generator().manual_seed(0)
trained = weight.clone().requires_grad_()
optimizer = torch.optim.Adam([trained], lr=1e-4)
slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, 60)
for _ in range(60):
    batch = x[torch.randperm(len(x), generator=generator)[:256]]
    through = trained + (rounded(trained.detach(), INT4) - trained).detach()  # forward: rounded; backward: identity
    loss = (batch @ through.T - batch @ weight.T).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    slower.step()
found = gptq(weight, x.T @ x, INT4)
kinds = (rounded(weight, INT4), decode(found.codes, INT4, found.fitted), rounded(trained.detach(), INT4))
stored = dict(zip(("RTN", "GPTQ", "QAT, 60 steps"), kinds, strict=True))
rows = [[name, *(f"{off(t @ v.T, t @ weight.T):.1f} %" for t in (x, x_code))] for name, v in stored.items()]
widgets.table(rows, ["", "error, calibration rows", "other code"])

# %% [markdown] name="qat-reading"
# Sixty steps do not reach the closed form here. What training has over it is the whole model in view, where layers learn
# to make up for each other, and a loss on text. It costs gradients, optimizer state and a training run, so it is used
# where 4 bits or fewer are wanted from the start.
#
# ## 6. Explore
#
# The inputs of layer 2's down projection as they are, smoothed and rotated. *With one scale for the whole tensor: which
# formats gain from rotation, and which do not care? What is left of the difference in small groups? And do the floats
# gain from smoothing?*

# %% name="explore-widget"
widgets.rounding({name: tensor[:64].numpy() for name, tensor in shown.items()}, format_name="int8")

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"SmoothQuant makes both sides easier."** (E07.3) The table of section 5 says otherwise: the product is unchanged, the
# activations get easier and the weights harder than they were. The paper says that both become easy *enough*.

# %% name="errata-both"
for what, weight_now, x_now in (("as they are", w2, x2), ("smoothed, α = 0.5", w2 * s2, x2 / s2)):
    own = off(rounded(weight_now, INT8), weight_now), off(round_activations(x_now, TOKENS), x_now)
    print(f"{what}: the weight's own error in INT8 {own[0]:.2f} %, the activations' {own[1]:.2f} %")

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026; look names up in the version you run.
#
# **llm-compressor** and **NVIDIA ModelOpt** write W8A8 checkpoints with SmoothQuant; **vLLM** and **SGLang** read them. For
# FP8 most use no method at all: with a scale per output and per token, rounding to nearest is enough. **SpinQuant** and
# **QuaRot** rotate for 4-bit activations.

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Then find a factor, smooth, and fold it into a norm yourself:
# [lab 07](../../labs/07_quantization/quantization.ipynb), parts 4 and 5.

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("07_quantization").draw(seed=1, tag="activations"))

# %% [markdown] name="card"
# ## 10. Card
#
# - SmoothQuant: $s_j = \max|x_j|^\alpha / \max|W_j|^{1-\alpha}$; the product is unchanged, difficulty moves to the
#   weights. For W8A8.
# - Rotation: $m$ in one channel becomes $m/\sqrt n$ in all. No calibration.
# - QAT: round in the forward pass, identity in the backward one; the whole model in view, at the price of a training run.
