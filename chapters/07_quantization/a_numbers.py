# %% [markdown] name="title"
# # 07a · Fewer bits for a number
#
# About 40 minutes. You need chapter 00 (the roofline). This notebook is about numbers: which values a format has, what a
# scale is, what rounding costs. The next one, `b_what_it_buys`, is about time and memory. The lab to notebooks a, b, c
# and e is [Quantize weights and cache](../../labs/07_quantization/quantization.ipynb).
#
# This is the longest chapter of the course. What may be left out, or left for later: `d_whole_models` (which layers get how
# many bits), `f_fewer_numbers` (pruning, low rank, distillation), and `g_workbench`, which is practice in all of the others.
# Neither the lab nor chapter 08 needs these three.

# %% name="setup"
import numpy as np
import torch
from safetensors.torch import load_file

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, ORANGE, RED, figure, show, tidy
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.kernels.reference import pack_int4, unpack_int4
from reference_impl.models.quantization.rounding import quantize_int4
from reference_impl.theory import kv_cache
from reference_impl.theory import quantization as theory
from reference_impl.theory.model_shapes import model as shape_of

torch.set_num_threads(1)
checkpoint = load_file(course_model("target") / "model.safetensors")
weight = checkpoint["model.layers.3.mlp.up_proj.weight"].float()  # [768, 256]
rng = np.random.default_rng(0)
normal = rng.standard_normal((64, 4096))


class Recording:
    """A LinearMethod that keeps what a layer is given, and leaves the rest to its own."""

    def __init__(self, method):
        self.method, self.seen = method, []

    def apply(self, params, x):
        self.seen.append(x.float())
        return self.method.apply(params, x)


def inputs_of(name, prompt):
    """What the linear layer `name` multiplies while the course model reads the prompt: [tokens, in_features]."""
    llm = LLM(course_model("target"), dtype="float32", kv_cache_bytes=2**20)
    [linear] = [found for found in llm.engine.model.linears() if found.name == name]
    linear.method = Recording(linear.method)
    llm.generate([prompt], SamplingParams(max_tokens=1))
    return torch.cat(linear.method.seen)


# %% [markdown] name="question"
# ## 1. A question with a number
#
# 4,096 weights are normally distributed, mean 0 and standard deviation 1. They are stored in 4 bits: integers from −7 to
# 7, times one scale for all, chosen so that the largest magnitude becomes 7. Now **one** of them is made 20 times the
# standard deviation. What share of the weights is still different from zero when they are read back?

# %% name="predict"
widgets.predict("07a-outlier", "Share of 4,096 weights that is not 0, with one outlier of 20?", "%")

# %% [markdown] name="idea"
# ## 2. The idea
#
# A builder measures rooms with a folding rule of sixteen marks. For a cupboard she folds it small: the marks are a
# centimetre apart. For a hall the marks have to be a metre apart, and every chair in the hall is then "zero or one metre"
# tall. The rule has the same sixteen marks each time. What it can tell apart is decided by **the largest thing that it
# has to reach**.
#
# - The marks are a **format**: a short list of values. Four bits make 16 of them.
# - Folding is the **scale**: a number that all marks are multiplied by. A weight is stored as a code, the number of the
#   nearest mark.
# - Using one rule for the furniture of each room, and not one for the whole house, is a **group size**. Each rule costs
#   a scale that has to be stored as well.
#
# All of quantization is about these three: where the marks are, what shares a scale, and how the code is
# chosen.

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.6, 2.6)
ax = fig.subplots()
names = ("int4", "e2m1", "nf4", "ternary")
for row, (name, colour) in enumerate(zip(names, (BLUE, GREEN, ORANGE, RED), strict=True)):
    values = theory.FORMATS[name].values
    ax.plot(values / theory.FORMATS[name].reach, [-row] * len(values), "|", color=colour, markersize=22, mew=2)
ax.set_yticks([-row for row in range(len(names))], names)
ax.set_ylim(-3.6, 0.6)
tidy(ax, "value, in units of the largest of its group", "")
show(
    fig,
    "Values of four formats between minus one and one. int4: 15 at equal distances. e2m1: 15, dense around zero and wide "
    "apart outside. nf4: 16, densest around zero, as the values of a normal distribution are. ternary: three.",
)

# %% [markdown] name="scratch-text"
# ## 3. From scratch
#
# Rounding to a list of values, with one scale for each group:


# %% name="scratch-round"
def store(x, values, group_size):
    """Codes and scales. x: its last dimension is cut into groups."""
    groups = x.reshape(-1, group_size)
    scales = np.abs(groups).max(1, keepdims=True) / max(values)  # the largest of a group becomes the largest value
    codes = np.abs(groups[..., None] / scales[..., None] - values).argmin(-1)  # the nearest value's number
    return codes.astype(np.uint8), scales


def read(codes, scales, values):
    return values[codes] * scales


int4 = np.arange(-7, 8.0)
few = np.array([0.31, -0.82, 0.05, 1.40])
codes, scales = store(few, int4, 4)
print("scale", scales.ravel(), "codes", codes.ravel(), "read back", read(codes, scales, int4).ravel().round(2))

# %% [markdown] name="scratch-round-reading"
# 1.40 is the largest: it sets the scale, 0.2, and is stored exactly. Each other value moves by at most half a scale.
# <!-- printed: scratch-round -->
#
# Now the question from above:

# %% name="scratch-outlier"
weights = normal[0].copy()  # 4,096 of them
for outlier in (None, 20.0):
    if outlier:
        weights[7] = outlier
    codes, scales = store(weights, int4, len(weights))
    back = read(codes, scales, int4).ravel()
    left = float(np.mean(back != 0))
    print(f"largest {abs(weights).max():.1f}: a scale of {scales.item():.2f}, {left:.0%} are not 0")
widgets.reveal("07a-outlier", 100 * left)

# %% [markdown] name="scratch-outlier-reading"
# Nothing was cut off: the outlier itself is stored exactly. It is *the others* that lost their digits, since everything
# within half a scale of zero becomes zero.
#
# So what shares a scale matters. Smaller groups keep an outlier's harm to its neighbours, and cost more scales. **With
# groups of 32 and a scale of 16 bits for each: how many bits per weight?**

# %% name="scratch-groups-predict"
widgets.predict("07a-bits", "Bits per weight: 4-bit codes, a 16-bit scale for every 32?", "bits")

# %% name="scratch-groups"
rows = []
for group_size in (4096, 128, 64, 32, 16):
    codes, scales = store(weights, int4, group_size)
    error = theory.relative_error(weights, read(codes, scales, int4).ravel())
    share = np.mean(read(codes, scales, int4) != 0)
    bits = 4 + 16 / group_size
    rows.append([group_size, f"{bits:.3f}", f"{share:.0%}", f"{error:.1%}"])
widgets.reveal("07a-bits", theory.stored_bits("int4", 32))
widgets.table(rows, ["group size", "bits a weight", "not 0", "error, % of the rms"])

# %% [markdown] name="scratch-float-text"
# The values need not be evenly spaced. A floating-point format is a sign, some exponent bits and some mantissa bits, and
# its values can be listed:


# %% name="scratch-float"
def values_of(exponent_bits, mantissa_bits, bias):
    """Every value that is not negative, if all codes are numbers."""
    found = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            if exponent == 0:  # subnormal: no leading 1, so that there is a zero
                found.append(fraction * 2.0 ** (1 - bias))
            else:
                found.append((1 + fraction) * 2.0 ** (exponent - bias))
    return found


print("E2M1:", values_of(2, 1, bias=1))
print("E4M3, the last eight:", values_of(4, 3, bias=7)[-8:])

# %% [markdown] name="scratch-float-reading"
# E2M1 is FP4, and that is all of it. In E4M3 the very last code, which would be 480, is taken for NaN, so its largest
# value is 448. <!-- printed: scratch-float -->
#
# Both are standards of the Open Compute Project (**OCP**), and so are its **MX** formats: 32 values share a scale that is
# a power of two (E8M0: eight exponent bits and nothing else). MXFP4 has E2M1 values, MXFP8 E4M3 or E5M2 (here: E4M3). The
# 6-bit floats (FP6) are of this family, too. All formats of this chapter, and those that they are compared with:

# %% name="scratch-formats"
FLOATS = {  # exponent bits, mantissa bits, and what is left of the largest exponent for numbers
    "FP32": (8, 23, "nothing"), "TF32": (8, 10, "nothing"), "BF16": (8, 7, "nothing"), "FP16": (5, 10, "nothing"),
    "E5M2": (5, 2, "nothing"), "E4M3": (4, 3, "all but one"), "FP6 E3M2": (3, 2, "all"), "FP6 E2M3": (2, 3, "all"),
    "E2M1": (2, 1, "all"),
}  # fmt: skip
rows, reach = [], {}
for name, (e, m, left) in FLOATS.items():
    bias = 2 ** (e - 1) - 1
    top = {"nothing": (2 - 2**-m) / 2, "all": 2 - 2**-m, "all but one": 2 - 2 * 2**-m}[left]
    reach[name] = top * 2.0 ** (bias + 1)
    rows.append([name, 1 + e + m, e, m, f"{reach[name]:,.4g}", f"{2.0 ** (1 - bias - m):.2g}", f"{2.0**-m:.2g}"])
for bits in (8, 4, 2):
    rows.append([f"INT{bits}", bits, "-", "-", 2 ** (bits - 1) - 1, 1, 1])
kinds = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16, "E5M2": torch.float8_e5m2}
assert all(reach[name] == torch.finfo(kind).max for name, kind in kinds.items())
assert reach["E4M3"] == 448
assert reach["E2M1"] == max(values_of(2, 1, bias=1))
widgets.table(rows, ["format", "bits", "exponent", "mantissa", "largest", "smallest above 0", "step above 1"])

# %% [markdown] name="scratch-formats-reading"
# Exponent bits are range, mantissa bits are digits. TF32 is how tensor cores read FP32: it has FP32's range and FP16's
# digits, and is stored in 32 bits.
#
# Four bits are half a byte, and memory has no half bytes. Two codes share one:

# %% name="scratch-pack"
pairs = np.array([[3, 15], [0, 9]], np.uint8)  # codes from 0 to 15
packed = pairs[:, 0] | pairs[:, 1] << 4
print("packed", packed, "unpacked", np.stack((packed & 15, packed >> 4), 1).tolist())
assert (np.stack((packed & 15, packed >> 4), 1) == pairs).all()

# %% [markdown] name="engine-text"
# ## 4. The same thing inside the engine
#
# `quantization="int4"` rounds each tensor when it arrives from the checkpoint: 4-bit codes from −8 to 7, a scale for each
# 128 inputs or less. With codes from −8 to 7 the scale is the largest magnitude / 7.5: the largest then lies half a scale
# beyond 7, or half-way between −8 and −7, and moves by half a scale at most, like any other. The function, on a layer of
# the course model: <!-- stands: reference_impl/models/quantization/rounding.py -->

# %% name="engine-int4"
codes, scales = quantize_int4(weight, 128, torch.float32)
packed = pack_int4(codes, 128)
assert torch.equal(unpack_int4(packed, 128), codes)
back = (codes.float() - 8) * scales.T.repeat_interleave(128, 1)
error = theory.relative_error(weight.numpy(), back.numpy())
print(f"codes {tuple(codes.shape)} in {packed.numel():,} bytes, scales {tuple(scales.shape)}; error {error:.1%}")
steps = (back - weight).abs() / scales.T.repeat_interleave(128, 1)
print(f"the most that a weight moved: {float(steps.max()):.2f} scales")

# %% [markdown] name="engine-conventions-text"
# You will meet three ways to make INT4 codes out of a group's largest value, and codes of one are nonsense to another.
# The engine's, above; the one that you write in lab 07, with codes from −7 to 7, so that the largest value lands on the
# largest code; and that of llama.cpp's Q4_0, which puts the largest value *with its sign* on −8. **Which of the three has
# the smallest error on this layer?**

# %% name="engine-conventions-predict"
widgets.predict("07a-conventions", "Error of codes from −7 to 7 over that of the engine's?", "times")

# %% name="engine-conventions"
groups = weight.reshape(-1, 128)
signed = groups.gather(1, groups.abs().argmax(1, keepdim=True))  # the largest of each group, with its sign
ways = {
    "lab 07: −7 to 7, largest / 7": (-7, signed.abs() / 7),
    "the engine: −8 to 7, largest / 7.5": (-8, signed.abs() / 7.5),
    "Q4_0: −8 to 7, largest with its sign / −8": (-8, signed / -8),
}
rows, errors = [], []
for name, (lowest, scale) in ways.items():
    code = (groups / scale).round().clamp(lowest, 7)
    errors.append(theory.relative_error(groups.numpy(), (code * scale).numpy()))
    largest = code.gather(1, groups.abs().argmax(1, keepdim=True))
    rows.append([name, code[0, :6].int().tolist(), sorted({int(c) for c in largest}), f"{errors[-1]:.2%}"])
widgets.reveal("07a-conventions", errors[0] / errors[1])
widgets.table(rows, ["convention", "the first six codes", "codes of the largest values", "error"])

# %% [markdown] name="engine-conventions-reading"
# A code more makes the steps smaller. What it costs: at the engine's scale the largest value itself is rounded, by up to
# half a step; with Q4_0's a value as large with the other sign would need 8 and is cut to 7. So codes travel with their
# convention: the scale alone does not say which it was.

# %% [markdown] name="engine-bytes-text"
# And the bytes of all linear layers as the engine holds them. (The embedding keeps its 16 bits: a step looks up single
# rows of it.) **By the formula INT4 in groups of 128 has 4 + 16 / 128 bits. Is that what you will see?**

# %% name="engine-bytes"
rows = []
for quantization in ("none", "int8", "int4"):
    llm = LLM(course_model("target"), dtype="bfloat16", quantization=quantization, kv_cache_bytes=2**20)
    linears = llm.engine.model.linears()
    held = sum(linear.weight_bytes() for linear in linears)
    weights_in = sum(linear.num_parameters() for linear in linears)
    rows.append([quantization, f"{weights_in:,}", f"{held:,}", f"{8 * held / weights_in:.3f}"])
widgets.table(rows, ["quantization", "weights in linear layers", "bytes", "bits a weight"])

# %% [markdown] name="engine-bytes-reading"
# A little more, on a CPU: the layout that torch multiplies there has a zero point of 16 bits beside each scale, whether
# one is needed or not, so 4 + 32 / 128. INT8 has one scale of 16 bits for each output.

# %% [markdown] name="measure-text"
# ## 5. Measure and explain
#
# Which format is best depends on how the values are distributed. Three tensors: normal numbers; a weight matrix of the
# course model; and what the down projection of its last layer is given (the product of gate and up), which is far from
# normal. Each token's or output's 256 or more values share a scale. **INT8 and E4M3 both have 8 bits. Which of the two
# has the smaller error on normal numbers, and by what factor?**

# %% name="measure-predict"
widgets.predict("07a-int8", "Normal numbers: error of E4M3 over error of INT8?", "times")

# %% name="measure-tensors"
prompt = (
    "def open_file(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef write_file(path, text):\n"
)
activations = inputs_of("model.layers.7.mlp.down_proj", prompt).numpy()
tensors = {"normal": normal[:, :768], "weights of a layer": weight.numpy(), "inputs of a down_proj": activations}
rows, ratio = [], {}
for name, x in tensors.items():
    errors = {f: theory.relative_error(x, theory.rounded(x, f, x.shape[1])) for f in ("int8", "e4m3", "e5m2")}
    ratio[name] = errors["e4m3"] / errors["int8"]
    largest = float(np.abs(x).max() / np.sqrt(np.mean(x**2)))
    rows.append([name, f"{largest:.0f}", *(f"{error:.2%}" for error in errors.values()), f"{ratio[name]:.1f}"])
widgets.reveal("07a-int8", ratio["normal"])
widgets.table(rows, ["tensor", "largest / rms", "INT8", "E4M3", "E5M2", "E4M3 over INT8"])

# %% [markdown] name="measure-reading"
# Equal steps are finer where the largest value is not far from the typical one. A float's *relative* step is the same at
# every size, so an outlier costs it little: its error hardly changes from row to row of the table. INT8's is four times
# as large for the inputs of the down projection as for normal numbers. E5M2 has a mantissa bit less, so twice the error,
# and more range than a scaled tensor can use.
#
# The same trade at 4 bits, with the scale's own format as a second choice: MXFP4 has a power of two (E8M0) for every 32
# values, NVFP4 an E4M3 number for every 16. **How many times as large is MXFP4's error on normal numbers as NVFP4's?**

# %% name="measure-four-predict"
widgets.predict("07a-mxfp4", "Error of MXFP4 over that of NVFP4, normal numbers?", "times")

# %% name="measure-four"
KINDS = {
    "INT4, groups of 128": ("int4", 128, "exact"),
    "INT4, groups of 32": ("int4", 32, "exact"),
    "NF4, groups of 64": ("nf4", 64, "exact"),
    "MXFP4": ("e2m1", 32, "e8m0"),
    "MXFP4 with NVFP4's scales": ("e2m1", 32, "e4m3"),
    "NVFP4": ("e2m1", 16, "e4m3"),
}
rows, by_kind = [], {}
for label, kind in KINDS.items():
    errors = [theory.relative_error(x, theory.rounded(x, *kind)) for x in tensors.values()]
    by_kind[label] = errors[0]
    rows.append([label, theory.stored_bits(*kind), *(f"{error:.1%}" for error in errors)])
widgets.reveal("07a-mxfp4", by_kind["MXFP4"] / by_kind["NVFP4"])
widgets.table(rows, ["format", "bits a value", *tensors])

# %% [markdown] name="measure-four-reading"
# A power of two is up to half as much again too large for its group, or up to a quarter too small, and then the group's
# largest value is cut off. On normal numbers that is most of the difference between the two, and the larger groups are
# the rest: the row between them has E4M3 scales for groups of 32. (NVFP4's E4M3 scales have a range of their own: one
# number for the tensor puts it where it is needed.) Bits and error together make the choice, and the plot shows it: lower
# left is better. With powers of two smaller groups do not help.

# %% name="measure-plot" jupyter={"source_hidden": true}
fig = figure(7.4, 3.2)
ax = fig.subplots()
shown = {}
for name, scale, colour, marker in (
    ("int4", "exact", BLUE, "o"),
    ("nf4", "exact", ORANGE, "s"),
    ("e2m1", "e4m3", GREEN, "^"),
    ("e2m1", "e8m0", RED, "v"),
):
    sizes = (256, 128, 64, 32, 16)
    bits = [theory.stored_bits(name, size, scale) for size in sizes]
    errors = [100 * theory.relative_error(normal, theory.rounded(normal, name, size, scale)) for size in sizes]
    ax.plot(bits, errors, marker + "-", color=colour, label=f"{name}, scales {scale}")
    shown[name, scale] = f"{errors[0]:.1f} % for groups of 256, {errors[-1]:.1f} % for groups of 16"
tidy(ax, "bits a value, scales included", "error, % of the rms")
ax.legend(fontsize=8, frameon=False)
show(
    fig,
    "Error over bits per value for groups of 256 down to 16 normal numbers. Smaller groups cost bits and lower the error, "
    f"but not with powers of two for scales: E2M1 with E8M0 has {shown['e2m1', 'e8m0']}, with E4M3 scales "
    f"{shown['e2m1', 'e4m3']}.",
)

# %% [markdown] name="explore"
# ## 6. Explore
#
# The same tensors, with an outlier if you like. *Make an outlier of 100 times the rms: which format loses least with one
# scale for the whole tensor, and which with groups of 32? Then leave the outlier in and move the last slider: a scale
# made for a tenth of the largest magnitude cuts the outlier off. Does the error fall?*

# %% name="explore-widget"
rows_of_128 = {name: x[:, : x.shape[1] // 128 * 128] for name, x in tensors.items()}
widgets.rounding(rows_of_128)

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"Naive quantization clips the outliers."** (E07.7) It clips nothing: the scale is made for the largest. Clipping is a
# cure for what that does to the rest, and has an error of its own. One outlier of 100 among 4,096 normal weights:

# %% name="errata-clip"
x, more = normal[:1].copy(), normal[:4].reshape(1, -1).copy()  # 4,096 and 16,384 weights
x[0, 7] = more[0, 7] = 100.0
rows = []
for clip in (1.0, 0.5, 0.1, 0.03):
    y, y_more = theory.rounded(x, "int4", clip=clip), theory.rounded(more, "int4", clip=clip)
    rest = np.delete(x, 7), np.delete(y, 7)
    squares = (f"{np.square(now - before).sum():,.0f}" for now, before in ((y, x), (y_more, more)))
    rows.append([f"{clip:.0%} of the largest", f"{y[0, 7]:.0f}", f"{theory.relative_error(*rest):.0%}", *squares])
assert float(rows[0][1]) == 100
print(f"the outlier's square: {100.0**2:,.0f}")
head = ["scale made for", "the outlier becomes", "error of the others"]
widgets.table(rows, [*head, "squares, 4,096", "squares, 16,384"])

# %% [markdown] name="errata-clip-reading"
# "Squares" are the squared errors of all 4,096 or 16,384 weights, summed. The others come back only when the outlier is
# gone. Losing an outlier of magnitude $m$ costs about $m^2$, losing $N$
# others of standard deviation 1 costs about $N$: here 10,000 against 4,096, so clipping does not pay. Among more than
# 10,000 such weights it does: the last column, and section 6. A group, a scale per channel, or taking the outlier out
# avoids the choice. That is what the methods of `c_methods` do.
#
# **"NVFP4 makes weights 3.5 times smaller, and a cache a quarter."** (E07.2) The same format has the same bits in both:
# $4 + 8/16 = 4.5$. The one 32-bit scale of the tensor does not count.

# %% name="errata-nvfp4"
bits = theory.stored_bits("e2m1", 16, "e4m3")
cache = kv_cache.bytes_per_token(shape_of("llama-3-8b"), bits / 8) / kv_cache.bytes_per_token(shape_of("llama-3-8b"))
print(f"{bits} bits: {16 / bits:.2f} times smaller than 16, {bits / 16:.3f} of it; of a cache's bytes {cache:.3f}")

# %% [markdown] name="errata-codebooks-text"
# **"E4M3 is for weights and E5M2 for gradients; FP8 is the same everywhere."** (E07.9) E4M3 serves weights, activations
# and caches alike in inference. And there are two E4M3s: AMD's CDNA 3 (MI300X) has another bias. **What is the largest
# value of AMD's?**

# %% name="errata-codebooks-predict"
widgets.predict("07a-fnuz", "Largest value of E4M3 as AMD's CDNA 3 has it (OCP's is 448)?", "")

# %% name="errata-codebooks"
rows = []
for name in ("e4m3", "e5m2", "e4m3fnuz"):
    values = theory.FORMATS[name].values
    positive = values[values > 0]
    rows.append([name, len(values), f"{positive[-1]:,.0f}", f"{positive[0]:.3g}", f"{positive[-1] / positive[0]:.2g}"])
widgets.reveal("07a-fnuz", theory.FORMATS["e4m3fnuz"].reach)
same_byte = torch.tensor([0x38], dtype=torch.uint8)
read_as = [float(same_byte.view(kind).float()) for kind in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)]
print(f"the byte 0x38 is {read_as[0]} in one and {read_as[1]} in the other")
widgets.table(rows, ["format", "finite values", "largest", "smallest above 0", "ratio"])

# %% [markdown] name="errata-codebooks-reading"
# The same byte is half as much on the other, so a checkpoint that is moved without conversion has every weight halved,
# and each minus zero becomes NaN. The cure is to write 0 for these bytes, and to double the scales.
#
# **"FP8 is preferred to INT8 because it needs no calibration."** (E07.6) Either takes its scale from the values at hand
# (dynamic), or from data seen before (static: calibrated). Scales that were made for other data cost both:

# %% name="errata-static"
today = normal[:8, :768]
heavy = today * np.exp(1.2 * rng.standard_normal(today.shape))  # the same rows, with heavy tails
rows = []
for name in ("int8", "e4m3"):
    reach = theory.FORMATS[name].reach
    scale = np.abs(today).max() / reach  # static: from the calibration data
    static = theory.nearest(heavy / scale, theory.FORMATS[name].values) * scale
    dynamic = theory.rounded(heavy, name, heavy.shape[1])
    rows.append([name, *(f"{theory.relative_error(heavy, y):.1%}" for y in (dynamic, static))])
widgets.table(rows, ["format", "scale from these values", "scale from other data, without the tails"])

# %% [markdown] name="errata-static-reading"
# What FP8 has is range: with a dynamic scale its error stays the same on heavy tails. A static scale that is too small
# cuts the same values off in both. (Training has a third kind, *delayed scaling*, as in NVIDIA's Transformer Engine: the
# scale comes from the largest magnitudes of the last steps. It saves a pass over the tensor, and cuts off what is larger
# than they were.)
#
# **"Ternary weights have 2 bits."** (E07.10) Three states carry $\log_2 3$ bits; two are what storing them one by one
# takes. Five of them fit a byte, since $3^5 = 243$:

# %% name="errata-ternary"
print(f"{np.log2(3):.3f} bits of information; five in a byte: {8 / 5} bits; one by one: 2 bits")
assert 3**5 <= 2**8

# %% [markdown] name="errata-nf4-text"
# **"NF4 is the information-optimal 4-bit format for normal weights."** (E07.12) It is meant as: every code is used
# equally often. That is not so once the largest of a block sets the scale, and it would not make the error least. Lloyd's
# method finds 16 values that no small change betters, for given samples: here for normal numbers, divided by the largest
# of their block. **At blocks of 64: how many percent more error has NF4 than the best 16 values?**

# %% name="errata-nf4-predict"
widgets.predict("07a-nf4", "Blocks of 64: error of NF4 above that of the best 16 values?", "%")

# %% name="errata-nf4"
rows, more = [], {}
for size in (32, 64, 256, 4096):
    blocks = normal.reshape(-1, size)
    scaled = blocks / np.abs(blocks).max(1, keepdims=True)
    best = theory.lloyd_max(scaled, 16)
    errors = [theory.relative_error(scaled, theory.nearest(scaled, v)) for v in (best, theory.nf4_values(), int4 / 7)]
    step = -np.take_along_axis(scaled, np.abs(scaled).argmax(1)[:, None], 1) / 8  # the largest, of its sign, becomes -8
    errors.append(theory.relative_error(scaled, np.clip(np.round(scaled / step), -8, 7) * step))
    more[size] = 100 * (errors[1] / errors[0] - 1)
    rows.append([size, *(f"{error:.2%}" for error in errors), f"{more[size]:.0f} %"])
assert min(more.values()) > 0
widgets.reveal("07a-nf4", more[64])
widgets.table(rows, ["block size", "best 16 values", "NF4", "−7 to 7", "−8 to 7", "NF4 above the best"])

# %% [markdown] name="errata-nf4-reading"
# The best values depend on the block size, and NF4 is one list for all. For normal weights it is better than equal steps
# from −7 to 7 at these block sizes; where the largest is put on −8, so that all 16 codes are used (llama.cpp's Q4_0), it is
# better from 64 on, and not at 32. It is not optimal (Yoshida 2023 made the argument). Whether it beats INT4 at equal
# bits, scales counted, is measured, as in the table of section 5.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026; look names up in the version you run.
#
# **Weights alone in 4 bits** are mostly INT4 in groups of 128 (the layouts of GPTQ and AWQ, and compressed-tensors'
# `pack-quantized`); **vLLM** and **SGLang** read them all. **FP8** checkpoints have E4M3 weights with a scale per tensor,
# per output or per block of 128 × 128 (DeepSeek-V3 was trained in the last). **MXFP4** came with gpt-oss: the experts in
# MXFP4, attention in 16 bits. **NVFP4** is what NVIDIA publishes for Blackwell. **NF4** is bitsandbytes', for fine-tuning
# (QLoRA). **llama.cpp** has formats of its own: Q4_0 is INT4 in groups of 32 with a 16-bit scale, Q4_K has groups of 32
# in blocks of 256 whose scales are in 6 bits.
#
# BF16 has the exponents of FP32 and 8 significant bits, FP16 has 11 and ends at 65,504: models trained in BF16 can
# overflow when they are run in FP16.

# %% name="production-half"
for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
    info = torch.finfo(kind)
    print(
        f"{name}: largest {info.max:.3g}, step above 1: {info.eps:.2g}, 70000 becomes {torch.tensor(7e4, dtype=kind)}"
    )

# %% [markdown] name="quiz-text"
# ## 9. Quiz
#
# Then write codes and scales yourself, and put two codes in a byte: [lab 07](../../labs/07_quantization/quantization.ipynb), parts 1
# and 2. Part 3, a kernel that multiplies them, needs `b_what_it_buys` and notebook 05b, too.

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("07_quantization").draw(seed=1, tag="numbers"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Stored: codes and scales. w ≈ value[code] × scale. Bits a weight = bits of the code + bits of the scale / group size:
#   INT4 at 128 has 4.125, NVFP4 4.5, MXFP4 4.25.
#   <!-- tested: tests/theory/test_quantization.py::test_stored_bits_count_the_scales -->
# - The largest magnitude of a group sets its scale; nothing is clipped, the rest loses digits. Smaller groups confine it.
# - Integers have equal steps: better where largest / rms is small. Floats have equal *relative* steps: better with heavy
#   tails. E4M3 ends at 448, E5M2 at 57,344, AMD's E4M3 FNUZ at 240. E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
#   <!-- tested: tests/theory/test_quantization.py::test_the_other_formats_are_those_of_their_papers -->
# - Scales: 16 bits, E4M3 (NVFP4, 16 values), a power of two (MX, 32 values). A power of two costs error.
# - Dynamic scales need no calibration in either INT8 or FP8, static ones need it in both.
# - BF16: range of FP32, 8 significant bits. FP16: 11, up to 65,504.
#   <!-- tested: tests/theory/test_quantization.py::test_the_other_formats_are_those_of_their_papers -->
