# %% [markdown] nbgrader={"grade_id": "intro"}
# # Lab 07: quantization
#
# A matrix of 4,096 × 4,096 weights in float16 is stored in 4 bits instead, with a float16 scale for each group of 128
# weights. How many times as small is it? And a request keeps 4,096 tokens in a KV cache with heads of 128 in float16:
# how many times as small is that with 4-bit codes and a float32 scale for each token and head? Write both numbers down;
# a cell below computes them.
#
# You build, in this order: codes and scales, two codes in a byte, the product as a Triton kernel, three methods that
# round with the activations in mind (AWQ, SmoothQuant, GPTQ), and a quantized KV cache. At the end your functions
# quantize a model of the course, your kernel multiplies in it, and its distance from the original is measured.
#
# - Parts 1 and 2 need notebook 07a, part 3 notebooks 05b and 07b. Parts 4 to 6 explain what they need; notebooks
#   07c and 07e say more about it.
# - Each part has a text, a cell for your code, and checks. Run a check as often as you like.
# - Grading draws other inputs of the same kinds, and hidden checks test the same properties once more. A check that
#   passes here for the right reason passes there.
# - Use `torch`, `triton`, `numpy` and the standard library: nothing else is available when your cells are graded. Neither
#   are the functions of the given cells.
# - Arguments belong to the caller: do not modify them. Where a tensor is asked for, a NumPy array will do.
# - Give helpers of your own names that no given cell has: here in the notebook, a function of yours takes the place of a
#   given one of the same name, and the checks call yours.
# - Triton's *interpreter* runs your kernel on the CPU. Triton is available on Linux only; elsewhere do part 3 on Colab or
#   in a container.
#
# | name | what it is | shape |
# |---|---|---|
# | weight | of a layer that computes x Wᵀ: a row for each output | `[out, in]` |
# | group | `group_size` inputs of a row, one after another; the last group of a row may be shorter | |
# | codes | small integers, one for each weight | `[out, in]`, int8 |
# | scales | what a code is multiplied by to give its weight, one for each group | `[out, num_groups]`, float32 |
#
# 20 points.

# %% nbgrader={"grade_id": "imports"} inferlab={"where": "both"}
import math

import torch

# %% nbgrader={"grade_id": "interpreter"} inferlab={"where": "learner"}
import importlib.util
import os
import sys

# Triton reads this at import and then runs kernels on the CPU.
if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("Triton was imported before this cell. Restart the kernel, then run this cell first.")
os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

# %% nbgrader={"grade_id": "tools"}
# Given: helpers of the checks. You may read them, but do not change them.
import numpy as np

from grader.checks import compiled, launch, rng, unchanging
from reference_impl.models.quantization.packing import pack_nibbles


def groups_for(num_inputs, group_size):
    return -(-num_inputs // group_size)  # rounded up


def random_int(low, high, generator):
    """An integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def random_codes(rows, columns, generator, reach=7):
    return torch.randint(-reach, reach + 1, (rows, columns), generator=generator).to(torch.int8)


def random_steps(rows, num_groups, generator):
    return 0.01 + torch.rand(rows, num_groups, generator=generator)


def random_matrices(outs, columns, generator):
    """Weights that read the same x, float64."""
    return [torch.randn(out, columns, generator=generator).double() for out in outs]


def random_gram(tokens, columns, generator):
    """xᵀx of random inputs, float64."""
    x = torch.randn(tokens, columns, generator=generator).double()
    x += 0.5 * x.roll(1, 1)  # inputs go together
    return x.T @ x


def from_yours(scales, shape):
    """What your functions call scales, as what a code is multiplied by, [out, num_groups]."""
    assert list(scales.shape) == list(shape), f"scales: expected shape {list(shape)}, saw {list(scales.shape)}"
    return scales


def to_yours(steps):
    """The other way round."""
    return steps.clone()


def packed_of(codes):
    """What pack_int4 gives, by the engine's own function; codes from -7 to 7."""
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return pack_nibbles(padded + 8)


def stands_for(codes, steps, group_size):
    """The weights [out, in], float64."""
    return codes.double() * steps.double().repeat_interleave(group_size, 1)[:, : codes.shape[1]]


def tensor_of(what, seen, shape):
    """A tensor of this shape, also from a NumPy array."""
    seen = torch.from_numpy(seen) if isinstance(seen, np.ndarray) else seen
    assert isinstance(seen, torch.Tensor), f"{what}: expected a tensor, saw {seen!r:.100}"
    assert list(seen.shape) == list(shape), f"{what}: expected shape {list(shape)}, saw {list(seen.shape)}"
    return seen


def whole_codes(what, seen, shape, reach):
    """Whole numbers from -reach to reach, int8, from a tensor or array of any type."""
    values = tensor_of(what, seen, shape).double()
    assert bool((values == values.round()).all()), f"{what}: expected whole numbers, saw {seen.flatten()[:8].tolist()}"
    low, high = (int(values.min()), int(values.max())) if values.numel() else (0, 0)
    within = -reach <= low and high <= reach
    assert within, f"{what}: expected -{reach} to {reach}, saw {low} to {high}"
    return values.to(torch.int8)


def tuple_of(what, seen, names):
    right = isinstance(seen, tuple | list) and len(seen) == len(names)
    assert right, f"{what}: expected ({', '.join(names)}), saw {seen!r:.150}"
    return seen


def kept(*tensors):
    """A function that fails if one of the tensors has changed since."""
    before = [tensor.clone() for tensor in tensors]

    def look(what):
        same = all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
        assert same, f"{what} changed an argument, which belongs to the caller"

    return look


def off_by(seen, expected):
    """The largest difference, in shares of the largest expected magnitude; infinite where there is NaN."""
    seen, expected = seen.double(), expected.double()
    size = float(expected.abs().max()) if expected.numel() else 0.0
    return float(((seen - expected).abs() / (size or 1.0)).nan_to_num(nan=math.inf).max()) if seen.numel() else 0.0


def apart(seen, expected):
    """A number beside the expected one, in as many digits as tell them apart."""
    digits = next((n for n in range(5, 17) if f"{seen:.{n}g}" != f"{expected:.{n}g}"), 17)
    return f"expected {expected:.{digits}g}, saw {seen:.{digits}g}"


def with_last_row_changed(tensor):
    """The same numbers but for the last row: whoever keeps results from call to call by the first ones is wrong."""
    changed = tensor.clone()
    changed[-1] = -(changed[-1] // 2 if changed.dtype == torch.int8 else changed[-1] / 4)
    return changed


def check_close(what, seen, expected, limit, names=("row", "column")):
    seen = tensor_of(what, seen, expected.shape)
    off = off_by(seen, expected)
    print(f"{what}: off by {off:.1e}")
    if off >= limit:
        worst = (seen.double() - expected.double()).abs().nan_to_num(nan=math.inf)
        at = np.unravel_index(int(worst.argmax()), tuple(worst.shape))  # the one of torch imports its compiler first
        place = ", ".join(f"{name} {int(i)}" for name, i in zip(names, at, strict=False))
        raise AssertionError(
            f"{what}: off by {off:.2g} of the largest number, most at {place}: "
            f"{apart(float(seen[at]), float(expected[at]))}"
        )


# %% [markdown] nbgrader={"grade_id": "text_groups"}
# ## 1. Codes and scales
#
# *Absmax* quantization: the weight with the largest magnitude of a group gets the largest code, and all others are rounded
# to whole multiples of the same step. With `bits` bits, 2 to 8, the largest code is 2^(bits − 1) − 1, here called the
# *reach*: 7 for 4 bits, 127 for 8. Codes go from −reach to reach. The one code more that two's complement has is not used,
# so that both signs have as many.
#
# **Build** `quantize_groups(weight, group_size, bits)`: a pair, codes `[out, in]` int8 and scales `[out, num_groups]`
# float32.
#
# - The scale of a group is its largest magnitude, divided by the reach. A code is its weight divided by the scale, rounded
#   to the nearest whole number (halves either way).
# - `in` need not be a multiple of `group_size`: the last group of a row has what is left. `group_size` may exceed `in`.
# - A group of zeros has codes 0 and the scale 1.
# - `weight` is float32, float16 or bfloat16. Compute in float32 in any case.
#
# **Build** `dequantize(codes, scales, group_size)`: the weights `[out, in]` that these stand for, float32.
#
# **Hint:** `weight.split(group_size, 1)` cuts rows into groups, the last one shorter.
#
# **Trap (magnitude):** the largest weight of −5, 1, 2 is 2; the largest magnitude is 5.
#
# **Trap (zeros):** 0 / 0 is NaN, and NaN as an int8 is anything.
#
# **Trap (half):** in float16 the scale 0.1 is off by 2 parts in 10,000, and every weight of the group with it.


# %% nbgrader={"grade_id": "quantize_groups", "solution": true}
def quantize_groups(weight, group_size, bits):
    """(codes [out, in] int8, scales [out, num_groups] float32): weight is about code x scale."""
    ### BEGIN SOLUTION
    reach = 2 ** (bits - 1) - 1
    codes, scales = [], []
    for group in weight.float().split(group_size, 1):
        scale = group.abs().amax(1, keepdim=True) / reach
        scale = torch.where(scale == 0, 1.0, scale)
        codes.append((group / scale).round().to(torch.int8))
        scales.append(scale)
    return torch.cat(codes, 1), torch.cat(scales, 1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "dequantize", "solution": true}
def dequantize(codes, scales, group_size):
    """The weights [out, in], float32, that codes [out, in] and scales [out, num_groups] stand for."""
    ### BEGIN SOLUTION
    group = torch.arange(codes.shape[1]) // group_size
    return codes.float() * scales[:, group]
    ### END SOLUTION


# %% nbgrader={"grade_id": "group_checks"}
# Given: how this part's checks test your codes.


def check_quantized(weight, group_size, bits, seen=None):
    """The codes and steps of your quantize_groups, after a comparison with the weight."""
    what, reach = f"{list(weight.shape)}, groups of {group_size}, {bits} bits", 2 ** (bits - 1) - 1
    look = kept(weight)
    if seen is None:
        seen = unchanging(quantize_groups)(weight, group_size, bits)
    look("quantize_groups")
    codes, scales = tuple_of(f"quantize_groups, {what}", seen, ("codes", "scales"))
    codes = whole_codes(f"codes, {what}", codes, weight.shape, reach)
    num_groups = groups_for(weight.shape[1], group_size)
    scales = torch.from_numpy(scales) if isinstance(scales, np.ndarray) else scales
    assert isinstance(scales, torch.Tensor), f"scales, {what}: expected a tensor, saw {scales!r:.100}"
    steps = from_yours(scales, (len(weight), num_groups)).double()
    for number, group in enumerate(weight.double().split(group_size, 1)):
        largest = group.abs().amax(1)
        expected = torch.where(largest == 0, 1.0, largest / reach)
        off = ((steps[:, number] - expected).abs() / expected).nan_to_num(nan=math.inf)
        row = int(off.argmax())
        assert float(off[row]) < 1e-6, (
            f"{what}: group {number} of row {row} has the largest magnitude {float(largest[row]):.6g}, and a code is worth "
            f"that / {reach} ({'of zeros: 1' if largest[row] == 0 else 'in float32'}): "
            f"{apart(float(steps[row, number]), float(expected[row]))}"
        )
    quotients = weight.double() / steps.repeat_interleave(group_size, 1)[:, : weight.shape[1]]
    off = (quotients - codes).abs()
    row, column = divmod(int(off.argmax()), off.shape[1])
    print(f"{what}: codes are within {float(off.max()):.4f} of the quotients")
    assert float(off[row, column]) < 0.5001, (
        f"{what}: the weight in row {row}, column {column} is {float(quotients[row, column]):.4f} steps; saw code "
        f"{int(codes[row, column])}"
    )
    return codes, steps.float()


# %% nbgrader={"grade_id": "check_groups", "grade": true, "points": 1}
# property: the scale is the group's largest magnitude over the reach, and a code is the nearest whole number of steps.
# question: Which weight of a group has the code 7 or -7, and what is its neighbour divided by the same scale?
# hint: scale = largest magnitude / 7; code = round(weight / scale). Nothing is left to clamp.
# explanation: Weights -5, 1, 2 with 4 bits: the scale is 5 / 7 = 0.714, the codes are -7, 1.4 -> 1 and 2.8 -> 3. They
#   stand for -5, 0.714 and 2.143. No weight is off by more than half a step.
codes, _ = check_quantized(torch.tensor([[-5.0, 1.0, 2.0]]), 3, 4)
assert codes.tolist() == [[-7, 1, 3]], f"-5, 1, 2: expected the codes -7, 1, 3, saw {codes[0].tolist()}"
check_quantized(torch.randn(5, 32, generator=rng("groups")), 8, 4)
check_quantized(torch.randn(5, 32, generator=rng("groups")), 16, 8)
draw = rng("check_groups")  # from here on: what grading draws with another seed
for bits in (4, 8, 3):
    size, groups = random_int(2, 9, draw), random_int(2, 5, draw)
    check_quantized(torch.randn(random_int(2, 6, draw), size * groups, generator=draw), size, bits)
    check_quantized(-torch.rand(3, 24, generator=draw) - 0.1, 4, bits)  # all negative
    check_quantized(torch.rand(3, 24, generator=draw) + 0.1, 4, bits)
for bits in (2, 5, 6, 7):
    check_quantized(torch.randn(3, 12, generator=draw), 6, bits)
check_quantized(torch.full((2, 8), -1.7), 4, 4)  # equal weights
outliers = torch.randn(4, 64, generator=draw)
outliers[torch.arange(4), torch.randint(64, (4,), generator=draw)] = torch.tensor([-50.0, 50.0, -30.0, 20.0])
check_quantized(outliers, 16, 4)  # one group of a row has an outlier, the others must not have its scale
weight = torch.randn(3, 40, generator=draw)
for again in (weight, with_last_row_changed(weight), weight):  # what an earlier call was given does not count
    check_quantized(again, 4, 4)


# %% nbgrader={"grade_id": "check_ragged_groups", "grade": true, "points": 1}
# property: the last group of a row may be shorter, one group may hold the whole row, and a row may have one weight.
# question: 10 inputs in groups of 4: how many scales has a row, and which inputs does the last one have?
# hint: round the number of groups up; a group ends at the end of its row, never in the next row.
# explanation: 10 inputs in groups of 4 make groups of 4, 4 and 2: three scales. With zeros filled in, the largest magnitude
#   of the last group stays the same. A reshape to [-1, 4] over all rows would mix weights of two outputs.
check_quantized(torch.randn(3, 10, generator=rng("ragged")), 4, 4)
check_quantized(torch.randn(3, 5, generator=rng("ragged")), 8, 4)  # a group larger than the row
check_quantized(torch.randn(2, 9, generator=rng("ragged")), 8, 8)  # one weight in the last group
draw = rng("check_ragged_groups")
for bits in (4, 8):
    size = random_int(3, 9, draw)
    check_quantized(torch.randn(4, 3 * size + random_int(1, size - 1, draw), generator=draw), size, bits)
    check_quantized(torch.randn(4, size + 1, generator=draw), size, bits)
    check_quantized(torch.randn(4, size - 1, generator=draw), size, bits)
    check_quantized(torch.randn(3, 1, generator=draw), 4, bits)
    check_quantized(torch.randn(3, 7, generator=draw), 1, bits)
small_last = torch.cat([10 * torch.randn(4, 8, generator=draw), 0.1 * torch.randn(4, 3, generator=draw)], 1)
check_quantized(small_last, 8, 4)


# %% nbgrader={"grade_id": "check_edge_groups", "grade": true, "points": 1}
# property: a group of zeros has codes 0 and the scale 1; weights in half precision are divided in float32.
# question: What is 0 / 0, and what is 0.1 in float16?
# hint: weight.float() first; then 1 in place of each scale that is 0.
# explanation: A group of zeros has the largest magnitude 0, so its scale would be 0 and each code 0 / 0. Any other scale
#   gives the codes 0. In float16 a scale has 11 bits: 1/7 becomes 0.14282, which is off by more than the 1e-6 allowed.
zeros = torch.randn(3, 12, generator=rng("edges"))
zeros[1, 4:8] = 0
check_quantized(zeros, 4, 4)
check_quantized(torch.zeros(2, 6), 4, 4)
check_quantized(torch.randn(4, 24, generator=rng("edges")).half(), 8, 4)
check_quantized(torch.randn(4, 24, generator=rng("edges")).bfloat16(), 8, 8)
draw = rng("check_edge_groups")
check_quantized(torch.zeros(3, 9), random_int(2, 9, draw), 8)
for dtype in (torch.float16, torch.bfloat16):
    for bits in (4, 8):
        check_quantized(torch.randn(4, 29, generator=draw).to(dtype), random_int(2, 8, draw), bits)
        with_zeros = torch.randn(4, 16, generator=draw).to(dtype)
        with_zeros[1:3, 8:] = 0
        check_quantized(with_zeros, 8, bits)
mixed = torch.randn(4, 16, generator=draw)
mixed[2:, 8:] = 0
mixed[0, 1:] = 0
check_quantized(mixed, 4, 4)
for small in (1e-6, 1e-15, 1e-34):  # small is not zero
    check_quantized(small * torch.randn(3, 16, generator=draw), 8, 4)
check_quantized(random_codes(3, 16, draw, 3).half() * 2**-24, 8, 8)  # float16's smallest: a scale is less than that
check_quantized(6e4 * torch.rand(3, 16, generator=draw).half(), 8, 4)


# %% nbgrader={"grade_id": "check_dequantize", "grade": true, "points": 1}
# property: each weight is its code times the scale of its own row and group, float32, also in a shorter last group.
# question: Which group does column 9 belong to, in groups of 4?
# hint: column j has the scale of group j // group_size.
# explanation: Groups of 4, column 9: group 2. Code -3 and scale 0.5 in that group stand for -1.5. The scales of a row, each
#   repeated group_size times and cut off at `in`, are those of its columns.
def check_weights(codes, steps, group_size):
    what = f"dequantize, {list(codes.shape)}, groups of {group_size}"
    scales = to_yours(steps)
    look = kept(codes, scales)
    seen = unchanging(dequantize)(codes, scales, group_size)
    look("dequantize")
    check_close(what, seen, stands_for(codes, steps, group_size), 1e-6)


draw = rng("dequantize")
check_weights(torch.tensor([[7, -7, 0, 1], [2, -3, 4, -5]]).to(torch.int8), torch.tensor([[1.0, 2.0], [4.0, 0.5]]), 2)
check_weights(random_codes(3, 12, draw), random_steps(3, 3, draw), 4)
check_weights(random_codes(3, 10, draw), random_steps(3, 3, draw), 4)
check_weights(random_codes(3, 8, draw, 127), random_steps(3, 1, draw), 8)
draw = rng("check_dequantize")
for _ in range(3):
    size, columns = random_int(2, 9, draw), random_int(10, 40, draw)
    check_weights(random_codes(4, columns, draw, 127), random_steps(4, groups_for(columns, size), draw), size)
check_weights(random_codes(5, 3, draw), random_steps(5, 1, draw), 8)
check_weights(random_codes(1, 9, draw), random_steps(1, 9, draw), 1)
check_weights(random_codes(2, 9, draw), random_steps(2, 2, draw), 8)
check_weights(random_codes(4, 16, draw, 127), 1e-4 * random_steps(4, 2, draw), 8)  # nothing in half precision
codes, steps = random_codes(3, 45, draw, 127), random_steps(3, 23, draw)
for again in (steps, with_last_row_changed(steps).abs()):
    check_weights(codes, again, 2)
check_weights(with_last_row_changed(codes), steps, 2)

# %% [markdown] nbgrader={"grade_id": "text_pack"}
# ## 2. Two codes in a byte
#
# No GPU loads 4 bits: two codes share a byte. A code from −7 to 7 is stored as the number code + 8, from 1 to 15, in four
# bits (a *nibble*).
#
# **Build** `pack_int4(codes)`: codes `[out, in]` int8 become bytes `[out, ceil(in / 2)]` uint8. Byte j of a row holds
# code 2j in its low four bits and code 2j + 1 in its high four bits. If `in` is odd, the last byte of a row holds a
# code 0 (so the number 8) in its high bits.
#
# **Build** `unpack_int4(packed, num_inputs)`: the codes `[out, num_inputs]` int8 again.
#
# **Hint:** `codes[:, ::2]`, `|`, `<<`, `>>` and `& 15`.
#
# **Trap (unsigned):** in uint8, 3 − 8 is 251. Change the type before you subtract.


# %% nbgrader={"grade_id": "pack_int4", "solution": true}
def pack_int4(codes):
    """Two codes in a byte: [out, in] int8, -7 to 7 -> [out, ceil(in / 2)] uint8."""
    ### BEGIN SOLUTION
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    nibbles = (padded.to(torch.int16) + 8).to(torch.uint8)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4
    ### END SOLUTION


# %% nbgrader={"grade_id": "unpack_int4", "solution": true}
def unpack_int4(packed, num_inputs):
    """The codes [out, num_inputs] int8 in packed [out, ceil(num_inputs / 2)] uint8."""
    ### BEGIN SOLUTION
    pair = packed.to(torch.int16)
    nibbles = torch.stack((pair & 15, pair >> 4), 2).flatten(1)
    return (nibbles[:, :num_inputs] - 8).to(torch.int8)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_pack", "grade": true, "points": 1}
# property: byte j holds code 2j in its low bits and code 2j + 1 in its high bits, each plus 8; a missing last code is 0.
# question: The codes -7 and 7: which two numbers are stored, and which byte are they together?
# hint: nibble = code + 8; byte = low nibble + 16 * high nibble; fill an odd row up with a code 0 first.
# explanation: Codes -7 and 7 become 1 and 15, and the byte is 1 + 16 * 15 = 241. An odd row ends with a high nibble of 8:
#   the code 3 alone becomes 11 + 16 * 8 = 139.
def check_packed(codes):
    look, expected = kept(codes), packed_of(codes)
    seen = tensor_of(f"pack_int4, {list(codes.shape)}", unchanging(pack_int4)(codes), expected.shape)
    look("pack_int4")
    assert seen.dtype == torch.uint8, f"pack_int4: expected bytes, torch.uint8, saw {seen.dtype}"
    print(f"codes {codes[0, :8].tolist()}: bytes {seen[0, :4].tolist()}")
    if not torch.equal(seen, expected):
        row, byte = (int(i) for i in (seen != expected).nonzero()[0])
        raise AssertionError(
            f"{list(codes.shape)} codes: byte {byte} of row {row} holds the codes {codes[row, 2 * byte : 2 * byte + 2].tolist()}"
            f": expected {int(expected[row, byte])}, saw {int(seen[row, byte])}"
        )


check_packed(torch.tensor([[-7, 7, 0, 1]]).to(torch.int8))
check_packed(random_codes(3, 8, rng("pack")))
check_packed(torch.tensor([[3], [-2]]).to(torch.int8))  # odd
check_packed(random_codes(2, 7, rng("pack")))
draw = rng("check_pack")
check_packed(torch.arange(-7, 8).to(torch.int8)[None])  # every code, and an odd number of them
check_packed(torch.arange(7, -8, -1).to(torch.int8)[None])
for odd in (0, 1):
    check_packed(random_codes(random_int(1, 5, draw), 2 * random_int(3, 12, draw) + odd, draw))
check_packed(random_codes(4, 9, draw)[:, 1:])  # a part of a larger matrix
check_packed(random_codes(40, 1, draw))
check_packed(random_codes(20, 2, draw))
codes = random_codes(3, 1030, draw)
for again in (codes, with_last_row_changed(codes)):
    check_packed(again)


# %% nbgrader={"grade_id": "check_unpack", "grade": true, "points": 1}
# property: unpacking gives back every code, in order, with its sign, and num_inputs of them.
# question: The byte 241: which two numbers does it hold, and what is the first of them minus 8?
# hint: packed & 15 and packed >> 4 in a signed type, minus 8, one after the other, cut off at num_inputs.
# explanation: 241 is 15 * 16 + 1: the low nibble is 1, the high one 15, and the codes are -7 and 7. In uint8, 1 - 8 is
#   249. With 7 inputs the last byte's high nibble is not a code.
def check_unpacked(codes):
    packed = packed_of(codes)
    look = kept(packed)
    seen = whole_codes("unpack_int4", unchanging(unpack_int4)(packed, codes.shape[1]), codes.shape, 127)
    look("unpack_int4")
    print(f"bytes {packed[0, :4].tolist()}: codes {seen[0, :8].tolist()}")
    if not torch.equal(seen, codes):
        row, column = (int(i) for i in (seen != codes).nonzero()[0])
        raise AssertionError(
            f"{list(packed.shape)} bytes, {codes.shape[1]} inputs: code {column} of row {row} is in the byte "
            f"{int(packed[row, column // 2])}: expected {int(codes[row, column])}, saw {int(seen[row, column])}"
        )


check_unpacked(torch.tensor([[-7, 7, 0, 1]]).to(torch.int8))
check_unpacked(random_codes(3, 8, rng("unpack")))
check_unpacked(random_codes(3, 5, rng("unpack")))
draw = rng("check_unpack")
check_unpacked(torch.arange(-7, 8).to(torch.int8)[None])
check_unpacked(torch.arange(7, -8, -1).to(torch.int8)[None])
for odd in (0, 1):
    check_unpacked(random_codes(random_int(1, 5, draw), 2 * random_int(3, 12, draw) + odd, draw))
check_unpacked(random_codes(40, 1, draw))
check_unpacked(random_codes(20, 2, draw))
codes = random_codes(3, 1030, draw)
for again in (codes, with_last_row_changed(codes)):
    check_unpacked(again)

# %% [markdown] nbgrader={"grade_id": "text_sizes"}
# Nothing here is graded: the two numbers from the start of this lab.

# %% nbgrader={"grade_id": "sizes"} inferlab={"where": "notebook"}
rounded_codes, its_scales = quantize_groups(torch.randn(64, 4096), 128, 4)
in_bytes = pack_int4(rounded_codes).nbytes + its_scales.half().nbytes
print(
    f"weights, groups of 128: {64 * 4096 * 2 / in_bytes:.2f} times as small, {8 * in_bytes / 64 / 4096} bits a weight"
)
print(f"KV, heads of 128, a float32 scale: {128 * 2 / (128 / 2 + 4):.2f} times as small")

# %% [markdown] nbgrader={"grade_id": "text_kernel"}
# ## 3. The product
#
# W4A16: weights in 4 bits, activations in 16. Decoding reads every weight once for each token, so a kernel that loads 4
# bits and makes numbers of them on the chip loads about a quarter of the bytes.
#
# **Build** `w4a16_kernel`: y = x Wᵀ. Program (i, j) computes BLOCK_M rows of y from i × BLOCK_M on, and BLOCK_N columns
# from j × BLOCK_N on, in a loop over `in` in steps of BLOCK_K. The given function `matmul_w4a16` launches it:
#
# - `x` `[M, K]` float32 or float16, `packed` `[N, K / 2]` uint8 as in part 2, `scales` `[N, num_groups]` float32: what a
#   code is multiplied by. `y` `[M, N]` float32. All are contiguous. K is even.
# - GROUP is a multiple of BLOCK_K, so that all inputs of a step belong to one group. BLOCK_K is a power of 2, at least
#   32, BLOCK_M and BLOCK_N at least 16. Neither M, N nor K need be a multiple of its block, nor K of GROUP.
# - Codes go into `tl.dot` in the dtype of x, where they are exact: on a GPU, tensor cores then multiply float16. Float32 is
#   not rounded: `input_precision="ieee"`. The result of `tl.dot` is float32; scale it, and add it up, in float32.
# - No program loads a number of x or a byte of packed twice, nor a scale more than once in a step. Each number of y is
#   stored once, by one program.
#
# As in lab 05, a kernel may use `tl`, arithmetic, `if`, loops, numbers that you define beside it, and other functions of
# yours under `@triton.jit`. The checks launch it, with the blocks that they choose, so its parameters stay as they are.
# Here you need `tl.program_id`, `tl.arange`, `tl.load`, `tl.dot`, `tl.zeros`, `tl.store` and `tile.to(dtype)`;
# `x.dtype.element_ty` is the dtype of x. The interpreter multiplies exactly whatever you say; the last check compiles your
# kernel, and looks at the instructions.
#
# **Hint:** a byte holds an even input and the odd one after it. Two products of BLOCK_K / 2 inputs each, x's even columns
# with the low nibbles and its odd columns with the high ones, need no rearrangement.
#
# **Trap (mask of x):** a byte that the mask filled with 0 is a code of −8, not of 0. What it is multiplied by must be 0.
#
# **Trap (which group):** the scale of a step is that of group start // GROUP, which is not the number of the step.
#
# **Trap (before scaling):** float16 ends at 65,504: 100 × 7 summed over 100 inputs exceeds it, however small the scale is.


# %% nbgrader={"grade_id": "w4a16_kernel", "solution": true}
@triton.jit
def w4a16_kernel(
    x, packed, scales, y,  # pointers
    M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of y = x W^T, with W in 4 bits: program (tile of rows, tile of columns)."""
    ### BEGIN SOLUTION
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    num_bytes, num_groups = K // 2, (K + GROUP - 1) // GROUP
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)
        at_x = m[:, None] * K + 2 * byte[None, :]
        in_x = (m < M)[:, None] & (byte < num_bytes)[None, :]
        even = tl.load(x + at_x, mask=in_x, other=0.0)
        odd = tl.load(x + at_x + 1, mask=in_x, other=0.0)
        in_w = (byte < num_bytes)[:, None] & (n < N)[None, :]
        pair = tl.load(packed + n[None, :] * num_bytes + byte[:, None], mask=in_w, other=0).to(tl.int32)
        low = ((pair & 15) - 8).to(even.dtype)
        high = ((pair >> 4) - 8).to(even.dtype)
        part = tl.dot(even, low, input_precision="ieee") + tl.dot(odd, high, input_precision="ieee")
        scale = tl.load(scales + n * num_groups + start // GROUP, mask=n < N, other=0.0)
        acc += part * scale[None, :]
    tl.store(y + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])
    ### END SOLUTION


# %% nbgrader={"grade_id": "matmul_w4a16"}
# Given: what launches your kernel, and how this part's checks test it.


def matmul_w4a16(x, packed, scales, group_size, block_m=16, block_n=32, block_k=32, traffic=None):
    """y [M, N] float32 = x [M, K] times the matrix of packed [N, K / 2] and scales [N, num_groups], by your kernel.

    traffic: a list, to which what the launch loaded and stored is added.
    """
    (num_rows, num_inputs), num_outputs = x.shape, len(packed)
    y = torch.full((num_rows, num_outputs), math.nan)
    constants = {"GROUP": group_size, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    grid = groups_for(num_rows, block_m), groups_for(num_outputs, block_n)
    counted = launch(w4a16_kernel, grid, constants, x=x, packed=packed, scales=scales, y=y, M=num_rows, N=num_outputs,
                     K=num_inputs)  # fmt: skip
    if traffic is not None:
        traffic.append(counted)
    return y


def check_product(x, num_outputs, group_size, generator, blocks=(16, 32, 32), factor=1.0, limit=1e-5, codes=None):
    """factor: of the scales. Returns what was loaded and stored."""
    traffic, num_inputs = [], x.shape[1]
    codes = random_codes(num_outputs, num_inputs, generator) if codes is None else codes
    steps = factor * random_steps(num_outputs, groups_for(num_inputs, group_size), generator)
    expected = x.double() @ stands_for(codes, steps, group_size).T
    seen = matmul_w4a16(x.clone(), packed_of(codes).contiguous(), steps.contiguous(), group_size, *blocks, traffic)
    kind = str(x.dtype).removeprefix("torch.")
    what = f"{len(x)} rows of {num_inputs} inputs in {kind}, {num_outputs} outputs, groups of {group_size}, blocks {blocks}"
    check_close(what, seen, expected, limit, ("row", "output"))
    stores = traffic[0].most_stores["y"]
    assert stores <= 1, f"{what}: each number of y is stored once, saw one stored {stores} times"
    return traffic[0], what


def random_x(rows, columns, generator, dtype=torch.float32):
    return torch.randn(rows, columns, generator=generator).to(dtype)


# %% nbgrader={"grade_id": "check_kernel", "grade": true, "points": 1}
# property: y = x W^T for whole blocks and groups, each code with its sign and the scale of its own output and group.
# question: Which input does the low nibble of byte 5 belong to, and which group is it in?
# hint: byte b holds inputs 2b and 2b + 1; nibble - 8 is the code; the group of a step is start // GROUP.
# explanation: K = 64 in steps of 32 with GROUP = 32: step 0 has bytes 0 to 15, inputs 0 to 31 and scale 0 of each output,
#   step 1 bytes 16 to 31 and scale 1. With GROUP = 64 both steps have scale 0.
check_product(random_x(16, 64, rng("kernel")), 32, 32, rng("kernel"))  # two groups of a step each
check_product(random_x(16, 128, rng("kernel")), 32, 64, rng("kernel"))  # two groups of two steps each
check_product(random_x(32, 32, rng("kernel")), 64, 32, rng("kernel"))  # four programs
draw = rng("check_kernel")
check_product(random_x(80, 320, draw), 16, 32, draw, (16, 16, 32))  # five tiles of rows, ten groups
check_product(random_x(32, 256, draw), 16, 128, draw, (32, 16, 64))
check_product(random_x(64, 64, draw), 64, 32, draw, (32, 16, 32))  # tiles of outputs, each with two groups
check_product(random_x(16, 32, draw), 16 * random_int(5, 7, draw), 32, draw, (16, 16, 32))  # more tiles of outputs


# %% nbgrader={"grade_id": "check_ragged", "grade": true, "points": 1}
# property: M, N, K and the last group may end anywhere; what lies beyond the end is neither read nor written.
# question: K is 40 and BLOCK_K 32: which bytes exist in the second step, and what is x where none does?
# hint: three masks, rows < M, outputs < N, bytes < K // 2; x has the other=0.0. The number of groups is rounded up.
# explanation: One row of 40 inputs in groups of 32: bytes 16 to 19 exist in the second step, and the scale is that of group
#   1, of two. Bytes from 20 on belong to the next output. Where x is masked to 0, any code adds nothing.
check_product(random_x(1, 40, rng("ends")), 5, 32, rng("ends"))
check_product(random_x(17, 32, rng("ends")), 33, 32, rng("ends"))
check_product(random_x(3, 2, rng("ends")), 1, 32, rng("ends"))
draw = rng("check_ragged")
check_product(random_x(random_int(1, 15, draw), 2 * random_int(17, 31, draw), draw), random_int(1, 31, draw), 64, draw)
check_product(random_x(7, 2 * random_int(49, 63, draw), draw), 19, 96, draw)
check_product(random_x(1, 34, draw), 20, 32, draw, (16, 16, 32))
check_product(
    random_x(random_int(33, 60, draw), 128, draw), 20, 96, draw, (32, 16, 32)
)  # K ends with a step, not a group


# %% nbgrader={"grade_id": "check_half", "grade": true, "points": 1}
# property: with x in float16, products are added up and scaled in float32: nothing overflows, no scale is rounded.
# question: 100 times 7, summed over 256 inputs: what is that in float16, before the scale?
# hint: acc is tl.float32 and so is the scale; only the codes become float16, to be multiplied.
# explanation: 256 inputs of 100 times the code 7 are 179,200, and float16 ends at 65,504. Times a scale of 0.001 the result
#   is an ordinary 179. Scales as float16 would be off by up to 5 in 10,000; the check allows 1 in 100,000.
check_product(random_x(16, 64, rng("half"), torch.float16), 32, 32, rng("half"))
sevens = torch.full((16, 256), 7).to(torch.int8)
check_product(torch.full((2, 256), 100.0).half(), 16, 128, rng("half"), (16, 16, 128), factor=1e-3, codes=sevens)
draw = rng("check_half")
check_product(random_x(5, 72, draw, torch.float16), 20, 64, draw)
check_product(random_x(3, 64, draw, torch.float16), 20, 32, draw, factor=1e-5)
large = torch.full((2, 192), float(random_int(100, 200, draw))).half()
check_product(large, 16, 192, draw, (16, 16, 64), factor=1e-3, codes=torch.full((16, 192), -7).to(torch.int8))
threes = torch.full((16, 512), 3).to(torch.int8)
check_product(1 + random_x(3, 512, draw, torch.float16), 16, 256, draw, (16, 16, 256), codes=threes)


# %% nbgrader={"grade_id": "check_loads", "grade": true, "points": 1}
# property: a program loads each number of x and each byte of packed at most once, and each scale at most once a step.
# question: How many codes does one byte hold, and how often do you load it?
# hint: load a byte once and take both nibbles of it; one scale for each output in a step, not for each input.
# explanation: 64 inputs of one output are 32 bytes. A kernel that computes an address for each input, input // 2, loads each
#   byte twice: then 4-bit weights move as many bytes as 8-bit ones. A scale for each input would be float32, eight times
#   the size of the code.
def check_traffic(rows, num_inputs, num_outputs, group_size, generator, blocks=(16, 32, 32)):
    counted, what = check_product(random_x(rows, num_inputs, generator), num_outputs, group_size, generator, blocks)
    print(
        f"{counted.loads['packed']} bytes of packed loaded, {counted.loads['scales']} scales, {counted.loads['x']} of x"
    )
    for name in ("x", "packed"):
        times = counted.most_loads[name]
        assert times <= 1, f"{what}: a program loaded the same number of {name} {times} times, expected once"
    steps = groups_for(num_inputs, blocks[2])
    allowed = num_outputs * steps * groups_for(rows, blocks[0])
    seen = counted.loads["scales"]
    assert seen <= allowed, f"{what}: {seen} scales were loaded, expected at most {allowed}, one an output and step"


check_traffic(5, 72, 20, 64, rng("loads"))
draw = rng("check_loads")
check_traffic(random_int(1, 16, draw), 64, random_int(33, 60, draw), 64, draw)
check_traffic(17, 100, 16, 64, draw, (16, 16, 64))


# %% nbgrader={"grade_id": "check_compiles", "grade": true, "points": 1}
# property: compiled for an A100, which need not be here, a right kernel multiplies float16 in its tensor cores, and float32
#   without rounding it.
# question: What does the compiler say, and in which line? Which dtype do both sides of tl.dot have?
# hint: the interpreter accepts more than the compiler does. A value that a loop changes keeps its type and shape: begin
#   with tl.zeros([BLOCK_M, BLOCK_N], tl.float32). Both sides of tl.dot have the dtype of x; input_precision="ieee".
# explanation: `acc = 0.0` before a loop is a Python number, and a tile after its first turn: the compiler needs one type
#   for both, the interpreter does not. Tensor cores multiply float16 as it is. Of float32 they round both factors to 11
#   bits (TF32), unless "ieee" keeps the product out of them; float16 that is widened first does without them, too.
def check_compiled(dtype, tensor_cores):
    kind = {"fp16": torch.float16, "fp32": torch.float32}[dtype]
    check_product(random_x(16, 32, rng("compiles"), kind), 16, 32, rng("compiles"), (16, 16, 32), limit=0.05)
    types = {"x": f"*{dtype}", "packed": "*u8", "scales": "*fp32", "y": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
    constants = {"GROUP": 128, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}
    found = compiled(w4a16_kernel, types, constants, capability=80)
    assert not found.error, f"x in {dtype}: it does not compile for an A100. {found.error}"
    seen = " and ".join(found.tensor_cores) or "nothing"
    print(f"x in {dtype}: {found.registers} registers per thread, {found.spilled} bytes spilled, "
          f"{found.shared / 1024:.0f} KiB of shared memory; tensor cores multiply {seen}")  # fmt: skip
    if dtype == "fp16":
        assert "f32" not in found.factors, (
            "x in fp16: a factor of a tl.dot is float32, and tensor cores do not multiply it"
        )
    assert list(found.tensor_cores) == tensor_cores, (
        f"x in {dtype}, compiled for an A100: expected tensor cores to multiply {' and '.join(tensor_cores) or 'nothing'}, "
        f"saw {seen}. "
        + (
            "Do both sides of each tl.dot have the dtype of x?"
            if dtype == "fp16"
            else 'Is there an input_precision="ieee"?'
        )
    )


check_compiled("fp16", ["f16 into f32"])
check_compiled("fp32", [])

# %% [markdown] nbgrader={"grade_id": "text_awq"}
# ## 4. Scales that know the activations: AWQ and SmoothQuant
#
# y = x Wᵀ = (x / s) (W s)ᵀ for any positive s `[in]`: each input j is divided by s_j, and column j of W is multiplied by
# it. Both methods choose such an s, for two reasons. All tensors of parts 4 and 5 are float64; compute in float64.
#
# *AWQ* rounds weights only. A column that is multiplied by s > 1 before rounding is rounded more finely, by s, while its
# group's largest magnitude stays. So columns whose inputs are large, and whose errors count most, should get a large s.
#
# **Build** `awq_scale(weight, x, ratios, rounded)`: the s `[in]` of the best of some candidates. `weight` is `[out, in]`,
# `x` `[tokens, in]`; `rounded(matrix)` is given, and returns what stands for a matrix `[out, in]` once it is rounded.
#
# - The candidate for a ratio, a number from 0 to 1: s_j = (mean of |x_j| over the tokens) ^ ratio, where a mean below
#   1e-4 counts as 1e-4. Then all of s is divided by sqrt(largest s × smallest s), so that it neither grows nor shrinks
#   the matrix as a whole.
# - Its error is that of the output: the sum of squares of x (W − rounded(W s) / s)ᵀ. The candidate with the least error
#   is the best. The ratio 0 is plain rounding.
#
# **Trap (what is compared):** the weights' own error says nothing about which inputs are large.
#
# *SmoothQuant* rounds activations, too. A few inputs are 100 times as large as all others, and a token's scale follows the
# largest. Its s moves a part of that into the weights.
#
# **Build** `smooth_scale(reach, weights, alpha)`: s_j = reach_j ^ alpha / (largest magnitude in column j of all the
# weights) ^ (1 − alpha). `reach` `[in]` is the largest |x_j| seen; `weights` is a list of matrices `[out, in]` that read
# the same x (of q, k and v, say; `out` may differ). Each of the two magnitudes counts as 1e-5 if it is below.
#
# **Build** `fold(norm, weights, s)`: a pair, the new `norm` `[in]` and the list of new weights. x is what a norm gives, h
# times `norm`, with `norm` its weight `[in]`; so its division by s costs nothing while the model runs. All matrices that
# read x have to be multiplied, and the function of norm and matrices stays the same.
#
# **Trap (one norm):** q, k and v read the same x, so they need the same s.
#
# **Trap (which side):** s is large where activations are large. They are divided, and the weights multiplied.


# %% nbgrader={"grade_id": "awq_scale", "solution": true}
def awq_scale(weight, x, ratios, rounded):
    """s [in], of the ratio whose rounded weights have the least error of the output over x [tokens, in]."""
    ### BEGIN SOLUTION
    size = x.abs().mean(0).clamp(min=1e-4)
    best, least = None, math.inf
    for ratio in ratios:
        s = size**ratio
        s = s / (s.max() * s.min()).sqrt()
        difference = weight - rounded(weight * s) / s
        error = float((x @ difference.T).square().sum())
        if error < least:
            best, least = s, error
    return best
    ### END SOLUTION


# %% nbgrader={"grade_id": "smooth_scale", "solution": true}
def smooth_scale(reach, weights, alpha):
    """s [in] from the largest |x_j| and the largest magnitude in column j of all matrices."""
    ### BEGIN SOLUTION
    columns = torch.cat(weights).abs().amax(0)
    return reach.clamp(min=1e-5) ** alpha / columns.clamp(min=1e-5) ** (1 - alpha)
    ### END SOLUTION


# %% nbgrader={"grade_id": "fold", "solution": true}
def fold(norm, weights, s):
    """(the norm's weight [in], the matrices [out, in] behind it), with x / s and W s in place of x and W."""
    ### BEGIN SOLUTION
    return norm / s, [weight * s for weight in weights]
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_awq", "grade": true, "points": 1}
# property: s is the candidate, of the given ratios, whose rounded weights give the least error of the output.
# question: Which number do you compare: the error of the weights, or that of what x makes of them?
# hint: for each ratio: s from the mean magnitudes, normalized, rounded(W * s) / s, then the squares of x times the
#   difference.
# explanation: Inputs with means 1 and 16, ratio 0.5: 1 and 4, divided by sqrt(4 * 1) = 2: s = [0.5, 2]. Weights are
#   multiplied by s, rounded, divided by s again and compared with what they were, through x. An input that is always 0
#   has the mean 1e-4, and nothing becomes infinite.
def rounded_in_groups(group_size, reach):
    """A function that rounds a matrix to `reach` steps a group, and counts its calls."""

    def rounded(matrix):
        rounded.calls += 1
        pieces = []
        for group in matrix.double().split(group_size, 1):
            step = (group.abs().amax(1, keepdim=True) / reach).clamp(min=1e-30)
            pieces.append((group / step).round() * step)
        return torch.cat(pieces, 1)

    rounded.calls = 0
    return rounded


def check_scale_search(weight, x, ratios, group_size, reach=7):
    shown = ratios if len(ratios) < 6 else f"{len(ratios)} from {ratios[0]:g} to {ratios[-1]:g}"
    what = f"awq_scale, {list(weight.shape)}, {len(x)} tokens, ratios {shown}"
    rounded, look = rounded_in_groups(group_size, reach), kept(weight, x)
    seen = tensor_of(what, unchanging(awq_scale)(weight, x, list(ratios), rounded), (weight.shape[1],)).double()
    look("awq_scale")
    mean, found = x.abs().mean(0).clamp(min=1e-4), {}
    for ratio in ratios:
        s = mean**ratio / ((mean**ratio).max() * (mean**ratio).min()).sqrt()
        found[ratio] = s, float((x @ (weight - rounded(weight * s) / s).T).square().sum())
    near = [ratio for ratio, (s, _) in found.items() if off_by(seen, s) < 1e-4]
    assert near, f"{what}: expected the s of one of the ratios{no_candidate(seen, mean, found)}"
    best = min(found, key=lambda ratio: found[ratio][1])
    yours, least = min(found[ratio][1] for ratio in near), found[best][1]
    print(f"{what}: the least error is {least:.4g}; yours, of ratio {near[0]:g}, has {yours:.4g}")
    assert yours <= 1.001 * least + 1e-12, (
        f"{what}: the s of ratio {best:g} has the least error of the output, {least:.4g}; saw the s of ratio "
        f"{near[0]:g}, whose error is {yours:.4g}"
    )


def no_candidate(seen, mean, found):
    """What an s has that is no candidate's, in words."""
    if not bool((seen > 0).all()):
        return f", saw the number {float(seen.min()):.4g} in it"
    for ratio, (s, _) in found.items():
        times = seen / s
        if bool((times / times[0] - 1).abs().max() < 1e-4):
            return f": yours is that of ratio {ratio:g} times {float(times[0]):.4g}. Is it divided by sqrt(largest × smallest)?"
    ratio, (s, _) = min(found.items(), key=lambda one: float((seen / one[1][0]).log().abs().max()))
    j = int((seen / s).log().abs().argmax())
    return (
        f": nearest is ratio {ratio:g}, whose s of input {j}, with the mean magnitude {float(mean[j]):.4g}, is off: "
        + (apart(float(seen[j]), float(s[j])))
    )


def outlier_inputs(tokens, columns, generator, size=30.0):
    """Activations in which a few inputs are large, float64."""
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
    x[:, torch.randperm(columns, generator=generator)[: max(1, columns // 8)]] *= size
    return x


RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
draw = rng("awq")
check_scale_search(torch.randn(6, 16, generator=draw).double(), outlier_inputs(20, 16, draw), RATIOS, 8)
check_scale_search(torch.randn(6, 16, generator=draw).double(), outlier_inputs(20, 16, draw), (0.5,), 8)
check_scale_search(torch.randn(6, 16, generator=draw).double(), outlier_inputs(20, 16, draw), (1.0, 0.6, 0.0), 8)
draw = rng("check_awq")
for size in (1.0, 5.0, 20.0, 100.0, 400.0):  # where the best ratio is another one
    columns = 4 * random_int(3, 8, draw)
    weight, x = torch.randn(6, columns, generator=draw).double(), outlier_inputs(24, columns, draw, size)
    check_scale_search(weight, x, tuple(i / 10 for i in range(11)), random_int(4, 9, draw))
    weight = weight * (1 + x.abs().mean(0))  # large columns with large inputs
    check_scale_search(weight, x, (1.0, 0.5, 0.0), 8)
    check_scale_search(weight, x, (1.0, 0.9), 8)  # plain rounding would be better, and is no candidate
weight, x = torch.randn(5, 12, generator=draw).double(), outlier_inputs(16, 12, draw)
x[:, 3] = 0
check_scale_search(weight, x, (0.2, 0.4), 6)
check_scale_search(weight, x, (0.5,), 6)
for ratio in (0.0, 1.0):
    check_scale_search(weight, x, (ratio,), 6)
many = tuple(i / 20 for i in range(21))
for ratios in (many, many[::-1]):  # the best is not among the first ten of both
    check_scale_search(torch.randn(5, 12, generator=draw).double(), outlier_inputs(300, 12, draw), ratios, 6)
signs = x * torch.where(torch.rand(16, 12, generator=draw) < 0.5, -1, 1)  # a mean of magnitudes, not of numbers
check_scale_search(weight, signs - signs.mean(0), (0.7,), 6)
check_scale_search(weight, torch.cat([torch.zeros(15, 12), x[:1]]).double(), (0.6,), 6)  # a mean, not a largest
x[:, 5] *= 1e-7 / x[:, 5].abs().mean()  # not zero, and counts as 1e-4
check_scale_search(weight, x, (0.5,), 6)
for _ in range(30):  # inputs that go together, and few tokens: other measures of the error choose another ratio
    weight, x = torch.randn(4, 8, generator=draw).double(), outlier_inputs(4, 8, draw, 10.0)
    check_scale_search(weight, x + x.roll(1, 1), tuple(i / 10 for i in range(11)), 4)
for _ in range(3):  # errors far below 1
    check_scale_search(
        1e-3 * torch.randn(6, 16, generator=draw).double(), outlier_inputs(20, 16, draw), (0.0, 0.5, 1.0), 8
    )


# %% nbgrader={"grade_id": "check_smooth", "grade": true, "points": 1}
# property: s = reach^alpha / (largest magnitude in the column, over all matrices)^(1 - alpha), magnitudes 1e-5 at least.
# question: What is s at alpha = 1, and what at alpha = 0?
# hint: one maximum over the rows of all matrices together, [in]; then two powers and a quotient.
# explanation: reach 100, and weights up to 0.5 in q and up to 1 in k: at alpha 0.5 s = 10 / 1 = 10. The activation becomes
#   at most 10, and so does the largest weight: both have the same reach. At alpha 1 the activation has a reach of 1.
def check_smoothing(reach, weights, alpha):
    what = f"smooth_scale, {len(weights)} matrices, {len(reach)} inputs, alpha {alpha:g}"
    look = kept(reach, *weights)
    seen = tensor_of(what, unchanging(smooth_scale)(reach, list(weights), alpha), reach.shape)
    look("smooth_scale")
    expected = []
    for j in range(len(reach)):
        largest = max(float(weight[:, j].abs().max()) for weight in weights)
        expected.append(max(float(reach[j]), 1e-5) ** alpha / max(largest, 1e-5) ** (1 - alpha))
    relative = seen.double() / torch.tensor(expected, dtype=torch.float64)
    off = (relative - 1).abs().nan_to_num(nan=math.inf)
    j, worst = int(off.argmax()), float(off.max())
    print(f"{what}: off by {worst:.1e}")
    assert worst < 1e-9, (
        f"{what}: s of input {j}, with reach {float(reach[j]):.4g} and weights up to "
        f"{max(float(weight[:, j].abs().max()) for weight in weights):.4g}: {apart(float(seen[j]), expected[j])}"
    )


draw = rng("smooth")
pair = [torch.tensor([[0.5, 0.2]]).double(), torch.tensor([[-1.0, 0.1]]).double()]
check_smoothing(torch.tensor([100.0, 1.0]).double(), pair, 0.5)
for alpha in (0.0, 0.5, 1.0):
    check_smoothing(10 * torch.rand(6, generator=draw).double(), random_matrices((4, 3), 6, draw), alpha)
draw = rng("check_smooth")
for alpha in (0.0, 0.25, 0.8, 1.0):
    outs, columns = [random_int(1, 6, draw) for _ in range(random_int(2, 4, draw))], random_int(3, 12, draw)
    check_smoothing(50 * torch.rand(columns, generator=draw).double(), random_matrices(outs, columns, draw), alpha)
zeros = random_matrices((3, 3), 5, draw)
for weight in zeros:
    weight[:, 2] = 0
    weight[:, 3] *= 1e-7  # not zero, and counts as 1e-5
reach = torch.rand(5, generator=draw).double()
reach[4], reach[1] = 0, 1e-7
for alpha in (0.3, 1.0, 0.0):
    check_smoothing(reach, zeros, alpha)
check_smoothing(reach + 1, random_matrices((7,), 5, draw), 0.6)
seven = random_matrices((2, 3, 1, 4, 2, 2, 3), 7, draw)
for j, weight in enumerate(seven):
    weight[:, j] *= 1e6  # each matrix has the largest weight of a column
check_smoothing(torch.rand(7, generator=draw).double(), seven, 0.1)
check_smoothing(torch.rand(7, generator=draw).double(), [with_last_row_changed(weight) for weight in seven], 0.9)


# %% nbgrader={"grade_id": "check_fold", "grade": true, "points": 1}
# property: the norm divided by s and every matrix multiplied: x is x / s, and the outputs are the same in float64.
# question: Which side of the product gets smaller where s is large, and how many matrices read it?
# hint: norm / s, and weight * s for each of the list; s is along the inputs, which are the columns.
# explanation: h = 3, norm 2, weight 5: the output is 30. With s = 4 the norm is 0.5 and the weight 20: 3 * 0.5 * 20 = 30.
#   In float64 both outputs agree to about 1e-16 of their size. If v is left as it is, its output is wrong by s.
def check_folded(h, norm, weights, s):
    what = f"fold, {len(weights)} matrices, {len(s)} inputs"
    look = kept(norm, s, *weights)
    new_norm, new_weights = tuple_of(what, unchanging(fold)(norm, list(weights), s), ("norm", "weights"))
    look("fold")
    names = [f"matrix {i}" for i in range(len(weights))]
    new_weights = tuple_of(f"{what}, the weights", new_weights, names)
    new_norm = tensor_of(f"{what}, norm", new_norm, norm.shape)
    off = off_by(h * new_norm, h * norm / s)
    assert off < 1e-12, f"{what}: x is not x / s, it is off by {off:.2g} of its largest number"
    for name, old, new in zip(names, weights, new_weights, strict=True):
        new = tensor_of(f"{what}, {name}", new, old.shape)
        before, after = (h * norm) @ old.T, (h * new_norm.double()) @ new.double().T
        off = off_by(after, before)
        print(f"{what}: the output of {name} differs by {off:.1e}")
        assert off < 1e-12, f"{what}: the output of {name} has changed by {off:.2g} of its largest number"


def check_random_fold(outs, columns, generator):
    h = torch.randn(4, columns, generator=generator).double()
    norm = 0.1 + torch.rand(columns, generator=generator).double()
    s = (2 * torch.randn(columns, generator=generator).double()).exp()
    check_folded(h, norm, random_matrices(outs, columns, generator), s)


check_random_fold((5, 3, 3), 6, rng("fold"))
check_random_fold((6,), 6, rng("fold"))  # as many outputs as inputs
draw = rng("check_fold")
for number in (1, 2, 6):
    columns = random_int(2, 10, draw)
    check_random_fold([columns, *(random_int(1, 7, draw) for _ in range(number))], columns, draw)
h, norm, wide = torch.randn(4, 3, generator=draw).double(), [-1.5, 0.0, 2.0], [1e-7, 1.0, 1e6]
check_folded(h, torch.tensor(norm).double(), random_matrices((2, 3), 3, draw), torch.tensor(wide).double())

# %% [markdown] nbgrader={"grade_id": "text_gptq"}
# ## 5. Errors that are made up for: GPTQ
#
# Columns are rounded one after the other. When column i is rounded, its error is known, and the columns that are not yet
# rounded change so that they make up for it, as far as the calibration inputs allow.
#
# With D = W − Q the error of the output over inputs x is |x Dᵀ|² = tr(D H Dᵀ), H = xᵀx `[in, in]`. If column i is off by
# e = w_i − q_i, the others do best when each column j > i changes by −e × U[i, j] / U[i, i]. U is upper triangular with
# UᵀU = H⁻¹: one Cholesky factor serves all columns.
#
# **Build** `inverse_factor(gram, damping)`: U `[in, in]`, upper triangular with a positive diagonal. `gram` is xᵀx; it may
# have no inverse, so `damping` × the mean of its diagonal is added to the diagonal first.
#
# **Build** `gptq_step(weight, factor, i, rounded)`: the weight `[out, in]` after column i. `factor` is U;
# `rounded(column, i)` is given, and returns what stands for a column `[out]` in place i.
#
# - Columns before i stay. Column i becomes `rounded(w_i, i)`. Column j > i becomes w_j − (w_i − q_i) / U[i, i] × U[i, j].
# - Leave `weight` as it is. Call `rounded` once.
#
# **Hint:** `torch.linalg.cholesky(matrix, upper=True)` and `torch.outer`.
#
# **Trap (lower):** without `upper=True` the function gives the lower factor L of L Lᵀ = H⁻¹. L Lᵀ = UᵀU means L = Uᵀ: what
# the step needs, row i of U, is column i of L and not its row i.


# %% nbgrader={"grade_id": "inverse_factor", "solution": true}
def inverse_factor(gram, damping):
    """U [in, in], upper triangular, U^T U = (gram + damping x mean of the diagonal)^-1."""
    ### BEGIN SOLUTION
    damped = gram + damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    ### END SOLUTION


# %% nbgrader={"grade_id": "gptq_step", "solution": true}
def gptq_step(weight, factor, i, rounded):
    """weight [out, in] with column i rounded, and its error made up for by the columns behind it."""
    ### BEGIN SOLUTION
    column = rounded(weight[:, i].clone(), i)
    error = (weight[:, i] - column) / factor[i, i]
    out = weight.clone()
    out[:, i] = column
    out[:, i + 1 :] -= torch.outer(error, factor[i, i + 1 :])
    return out
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_factor", "grade": true, "points": 1}
# property: U is upper triangular with a positive diagonal, and U^T U is the inverse of the damped gram.
# question: What is added to which elements of gram, and of what is U the factor: of gram, or of its inverse?
# hint: the mean of the diagonal, times damping, on the diagonal; then invert; then the upper Cholesky factor.
# explanation: gram = [[4, 2], [2, 4]], damping 0.25: 1 is added on the diagonal, [[5, 2], [2, 5]]. With four tokens and
#   eight inputs gram has no inverse; damped it has one.
def check_inverse_factor(gram, damping):
    what = f"inverse_factor, {len(gram)} inputs, damping {damping:g}"
    look = kept(gram)
    seen = tensor_of(what, unchanging(inverse_factor)(gram, damping), gram.shape).double()
    look("inverse_factor")
    below = float(seen.tril(-1).abs().max()) if len(gram) > 1 else 0.0
    assert below < 1e-9 * float(seen.abs().max()), f"{what}: expected zeros below the diagonal, saw up to {below:.2g}"
    assert float(seen.diagonal().min()) > 0, f"{what}: expected a positive diagonal, saw {seen.diagonal()[:5].tolist()}"
    damped = gram.clone()
    damped.diagonal().add_(damping * float(gram.diagonal().sum()) / len(gram))
    off = from_identity(seen.T @ seen @ damped)
    print(f"{what}: U^T U times the damped gram is the identity but for {off:.1e}")
    assert off < 1e-6, f"{what}: U^T U is not the inverse of the damped gram{what_of_it(seen, gram, damped)}"


def from_identity(matrix):
    return float((matrix - torch.eye(len(matrix), dtype=torch.float64)).abs().nan_to_num(nan=math.inf).max())


def what_of_it(seen, gram, damped):
    """Whose factor it is in place of the inverse of the damped gram, in words."""
    if from_identity(seen @ seen.T @ damped) < 1e-6:
        return ": U U^T is. Which of the two triangles is transposed?"
    if off_by(seen.T @ seen, damped) < 1e-6:
        return ": it is the damped gram itself. Invert it first"
    added = (torch.linalg.inv(seen.T @ seen) - gram).diagonal()
    expected = (damped - gram).diagonal()
    j = int((added - expected).abs().nan_to_num(nan=math.inf).argmax())
    return f". To the diagonal of gram, damping adds {float(expected[j]):.6g}; in yours element {j} has {float(added[j]):.6g} more"


check_inverse_factor(torch.tensor([[4.0, 2.0], [2.0, 4.0]]).double(), 0.25)
check_inverse_factor(random_gram(30, 8, rng("factor")), 0.01)
check_inverse_factor(random_gram(4, 8, rng("factor")), 0.01)  # fewer tokens than inputs
draw = rng("check_factor")
for damping in (0.01, 0.1, 1.0):
    check_inverse_factor(random_gram(random_int(3, 40, draw), random_int(5, 12, draw), draw), damping)
check_inverse_factor(random_gram(40, 6, draw), 0.0)
scaled = random_gram(40, 6, draw)
sizes = torch.tensor([1.0, 1.0, 10.0, 1.0, 1.0, 1.0]).double()
scaled = scaled * sizes * sizes[:, None]  # a diagonal whose mean is not its middle
check_inverse_factor(scaled, 0.05)
check_inverse_factor(random_gram(5, 1, draw), 0.5)
check_inverse_factor(1e-7 * random_gram(30, 6, draw), 0.01)
dead = random_gram(30, 6, draw)
dead[2], dead[:, 2] = 0, 0  # an input that is always 0
check_inverse_factor(dead, 0.1)
gram = random_gram(30, 6, draw)
for times in (1.0, 4.0):  # another one of the same size
    check_inverse_factor(gram * times, 0.01)


# %% nbgrader={"grade_id": "check_gptq", "grade": true, "points": 1}
# property: column i is rounded, columns before it stay, and those behind it change to what makes the output's error least.
# question: Which columns may still change when column i is rounded, and by which row of U?
# hint: error = (w_i - q_i) / U[i, i]; w_j -= error * U[i, j] for j > i; w_i = q_i.
# explanation: The check computes the best change without U: for D_i = e, the D_j that make tr(D H D^T) least are
#   -e H[i, j>i] H[j>i, j>i]^-1, and D_j is what is subtracted from w_j. U gives the same with one factor for all columns.
def check_step(weight, gram, i, step=0.3):
    what = f"gptq_step, {list(weight.shape)}, column {i}"
    factor, calls = torch.linalg.cholesky(torch.linalg.inv(gram), upper=True), []

    def rounded(column, place):
        calls.append((column.detach().clone(), int(place)))
        return (column / (step * (1 + int(place)))).round() * (step * (1 + int(place)))

    look = kept(weight, factor)
    seen = tensor_of(what, unchanging(gptq_step)(weight, factor, i, rounded), weight.shape).double()
    look("gptq_step")
    assert len(calls) == 1, f"{what}: expected one call of rounded, saw {len(calls)}"
    assert calls[0][1] == i, f"{what}: expected rounded(column, {i}), saw {calls[0][1]} for the column's place"
    q = rounded(weight[:, i], i)
    assert torch.equal(seen[:, :i], weight[:, :i]), f"{what}: a column before it has changed"
    assert off_by(seen[:, i], q) < 1e-9, (
        f"{what}: expected column {i} to be what rounded gives, saw {seen[:4, i].tolist()}"
    )
    expected = weight.clone()
    expected[:, i] = q
    if i + 1 < weight.shape[1]:
        best = torch.linalg.solve(gram[i + 1 :, i + 1 :], gram[i + 1 :, i])
        expected[:, i + 1 :] += torch.outer(weight[:, i] - q, best)
        times = times_as_much(seen[:, i + 1 :] - weight[:, i + 1 :], expected[:, i + 1 :] - weight[:, i + 1 :])
        assert times is None or abs(times - 1) < 1e-5, (
            f"{what}: the columns behind it change by {times:.4g} times what makes the error least; U[i, i] is "
            f"{float(factor[i, i]):.4g}"
        )
    check_close(what, seen, expected, 1e-11)
    return seen


def times_as_much(change, expected):
    """By which number the expected change was multiplied; None if by none."""
    size = float(expected.square().sum())
    times = float((change * expected).sum()) / size if size else 0.0
    return times if size and off_by(change, times * expected) < 1e-6 else None


def check_columns(weight, gram):
    """Step after step, each with your own weights of the one before; then the error of the output."""
    now = weight
    for i in range(weight.shape[1]):
        now = check_step(now, gram, i)
    plain = torch.stack([(c / (0.3 * (1 + i))).round() * (0.3 * (1 + i)) for i, c in enumerate(weight.T)], 1)
    errors = [float((((weight - one) @ gram) * (weight - one)).sum()) for one in (plain, now)]
    print(f"error of the output: rounded to nearest {errors[0]:.4g}, with your steps {errors[1]:.4g}")


draw = rng("gptq")
check_columns(torch.randn(4, 5, generator=draw).double(), random_gram(40, 5, draw))
draw = rng("check_gptq")
columns = random_int(6, 9, draw)
check_columns(torch.randn(3, columns, generator=draw).double(), random_gram(50, columns, draw))
for _ in range(3):
    columns = random_int(4, 9, draw)
    gram = random_gram(60, columns, draw)
    check_step(torch.randn(columns, columns, generator=draw).double(), gram, random_int(1, columns - 2, draw))
check_step(torch.randn(3, 1, generator=draw).double(), random_gram(9, 1, draw), 0)
check_step(torch.zeros(2, 3).double(), random_gram(9, 3, draw), 0)  # nothing to round
check_step(torch.randn(2, 140, generator=draw).double(), random_gram(420, 140, draw), random_int(1, 9, draw))
check_step(torch.randn(3, 6, generator=draw).double(), 1e6 * random_gram(50, 6, draw), 2)  # small numbers in U

# %% [markdown] nbgrader={"grade_id": "text_kv"}
# ## 6. A quantized KV cache
#
# Keys and values arrive a token at a time, so their scales have to be known at once: one for each token and head.
#
# **Build** `quantize_kv(k, v, bits)`: k and v `[num_tokens, num_kv_heads, head_dim]`, float32 or half precision. Return
# `(k_codes, k_scales, v_codes, v_scales)`: codes int8 of the same shape, scales `[num_tokens, num_kv_heads]` float32. A
# scale is the largest magnitude of this token's head over the reach, as in part 1; where that is 0, it is 1.
#
# **Build** `attend_kv(q, k_codes, k_scales, v_codes, v_scales)`: attention of one new query over all tokens of the
# cache, o `[num_heads, head_dim]` float32. q `[num_heads, head_dim]`, float32 or half precision: compute in float32.
# Query head h reads KV head h // (num_heads // num_kv_heads); a score is q·k / sqrt(head_dim). At least one token.
#
# A scale is the same for all of a token's head, so it can wait: multiply q by the codes, then the score by the key's scale;
# multiply the weight by the value's scale, then the codes. A kernel that does so writes nothing as large as the cache in
# float32. (Your function may: PyTorch has no product of float32 and int8.)
#
# **Trap (after the softmax):** the scale of a key belongs to the score, before the softmax; that of a value to the weight,
# after it.


# %% nbgrader={"grade_id": "quantize_kv", "solution": true}
def quantize_kv(k, v, bits):
    """(k_codes, k_scales, v_codes, v_scales), a scale for each token and head of k and v."""
    ### BEGIN SOLUTION
    reach, found = 2 ** (bits - 1) - 1, []
    for one in (k.float(), v.float()):
        scale = one.abs().amax(2) / reach
        scale = torch.where(scale == 0, 1.0, scale)
        found += [(one / scale[:, :, None]).round().to(torch.int8), scale]
    k_codes, k_scales, v_codes, v_scales = found
    return k_codes, k_scales, v_codes, v_scales
    ### END SOLUTION


# %% nbgrader={"grade_id": "attend_kv", "solution": true}
def attend_kv(q, k_codes, k_scales, v_codes, v_scales):
    """o [num_heads, head_dim] of q [num_heads, head_dim] over quantized keys and values."""
    ### BEGIN SOLUTION
    group = q.shape[0] // k_codes.shape[1]
    queries = q.float().unflatten(0, (-1, group))  # [num_kv_heads, group, head_dim]
    scores = torch.einsum("hgd,nhd->hgn", queries, k_codes.float()) / math.sqrt(q.shape[1])
    weights = (scores * k_scales.T[:, None, :]).softmax(2)
    return torch.einsum("hgn,nhd->hgd", weights * v_scales.T[:, None, :], v_codes.float()).flatten(0, 1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "kv_checks"}
# Given: how this part's checks test your functions.


def cache_of(what, seen, shape, reach):
    """(k_codes, k_steps, v_codes, v_steps) as your quantize_kv returns them."""
    names = ("k_codes", "k_scales", "v_codes", "v_scales")
    found = dict(zip(names, tuple_of(what, seen, names), strict=True))
    for name in ("k_codes", "v_codes"):
        found[name] = whole_codes(f"{what}, {name}", found[name], shape, reach)
    for name in ("k_scales", "v_scales"):
        found[name] = tensor_of(f"{what}, {name}", found[name], shape[:2]).float()
    return [found[name] for name in names]


def your_cache(k_codes, k_steps, v_codes, v_steps):
    """The arguments of your attend_kv after q."""
    return k_codes, k_steps, v_codes, v_steps


def whole(q, keys, values):
    """Attention of one query per head over all keys, float64; q [num_heads, head_dim]."""
    group = len(q) // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    weights = (torch.einsum("hd,nhd->hn", q.double(), keys) / math.sqrt(q.shape[1])).softmax(1)
    return torch.einsum("hn,nhd->hd", weights, values)


# %% nbgrader={"grade_id": "check_kv", "grade": true, "points": 1}
# property: keys and values have a scale of their own for each token and head, the largest magnitude over the reach.
# question: How many scales have three tokens with two heads, keys and values together?
# hint: the largest magnitude over head_dim alone, so that scales are [num_tokens, num_kv_heads]; 1 where it is 0.
# explanation: Three tokens, two heads: six scales of keys and six of values. Were a scale shared by all tokens, a token that
#   arrives later, with larger numbers, would change the codes of all before it.
def check_cached(k, v, bits):
    what, reach = f"quantize_kv, {list(k.shape)}, {bits} bits", 2 ** (bits - 1) - 1
    look = kept(k, v)
    k_codes, k_steps, v_codes, v_steps = cache_of(what, unchanging(quantize_kv)(k, v, bits), k.shape, reach)
    look("quantize_kv")
    for name, one, codes, steps in (("k", k, k_codes, k_steps), ("v", v, v_codes, v_steps)):
        largest = one.double().abs().amax(2)
        expected = torch.where(largest == 0, 1.0, largest / reach)
        off = ((steps.double() - expected).abs() / expected).nan_to_num(nan=math.inf)
        token, head = divmod(int(off.argmax()), off.shape[1])
        print(f"{what}: scales of {name} are off by {float(off.max()):.1e}")
        assert float(off.max()) < 1e-6, (
            f"{what}: {name} of token {token}, head {head} has the largest magnitude {float(largest[token, head]):.6g}, its "
            f"scale is that / {reach}, or 1: {apart(float(steps[token, head]), float(expected[token, head]))}"
        )
        wrong = float((one.double() / expected[:, :, None] - codes).abs().max())
        assert wrong < 0.5001, f"{what}: a code of {name} is {wrong:.4f} steps from its number"


def random_kv(tokens, heads, head_dim, generator, dtype=torch.float32):
    size = torch.randn(2, tokens, heads, 1, generator=generator).exp()
    k, v = size * torch.randn(2, tokens, heads, head_dim, generator=generator)
    return k.to(dtype), 3 * v.to(dtype)


check_cached(*random_kv(3, 2, 8, rng("kv")), 8)
check_cached(*random_kv(5, 3, 4, rng("kv")), 4)
check_cached(*(torch.zeros(2, 2, 4) for _ in range(2)), 8)
draw = rng("check_kv")
for bits in (4, 8):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        k, v = random_kv(random_int(2, 9, draw), random_int(2, 4, draw), random_int(5, 16, draw), draw, dtype)
        check_cached(k, v, bits)
        k[1, 1], v[0, 0] = 0, 0
        check_cached(k, v, bits)
    for small in (1e-12, 1e-34):  # small is not zero
        check_cached(*(small * one for one in random_kv(3, 2, 8, draw)), bits)
    smallest = [random_codes(6, 8, draw, 3).view(3, 2, 8).half() * 2**-24 for _ in range(2)]  # of float16
    check_cached(*smallest, bits)
    check_cached(*random_kv(1, 1, 16, draw), bits)
    check_cached(*(-one.abs() for one in random_kv(4, 2, 8, draw)), bits)
for bits in (2, 3, 5, 6, 7):
    check_cached(*random_kv(3, 2, 8, draw), bits)
k, v = random_kv(4, 2, 8, draw)
for again in (k, with_last_row_changed(k)):  # what an earlier call was given does not count
    check_cached(again, with_last_row_changed(v), 8)


# %% nbgrader={"grade_id": "check_attend", "grade": true, "points": 1}
# property: attention over codes is that over the keys and values they stand for, for all head counts and lengths.
# question: Which of the two scales may be multiplied in after the softmax?
# hint: scores [num_heads, num_tokens] times k_scales, softmax, times v_scales, times the codes of the values.
# explanation: q·(code × scale) = (q·code) × scale, so a key's scale multiplies its score. The output sums weight × (code ×
#   scale), which is (weight × scale) × code. The weights themselves add up to 1 before the values' scales come in.
def check_attended(tokens, num_heads, num_kv_heads, head_dim, generator, dtype=torch.float32, factor=1.0):
    shape = tokens, num_kv_heads, head_dim
    codes = [torch.randint(-127, 128, shape, generator=generator).to(torch.int8) for _ in range(2)]
    steps = [(0.002 + 0.02 * torch.rand(tokens, num_kv_heads, generator=generator)) for _ in range(2)]
    steps = [steps[0] * factor, steps[1] * 10]
    check_answer(torch.randn(num_heads, head_dim, generator=generator).to(dtype), codes, steps)


def check_answer(q, codes, steps):
    """codes, steps: of the keys, and of the values."""
    look = kept(q, *codes, *steps)
    what = f"attend_kv, {len(codes[0])} tokens, {len(q)}/{codes[0].shape[1]} heads of {q.shape[1]}"
    expected = whole(q, *(c.double() * s.double()[:, :, None] for c, s in zip(codes, steps, strict=True)))
    seen = unchanging(attend_kv)(q, *your_cache(codes[0], steps[0], codes[1], steps[1]))
    look("attend_kv")
    check_close(what, seen, expected, 2e-5, ("head", "column"))


draw = rng("attend")
check_attended(1, 1, 1, 4, draw)
check_attended(7, 2, 2, 8, draw)
check_attended(5, 4, 2, 8, draw)
check_attended(9, 3, 1, 16, draw)
draw = rng("check_attend")
for num_heads, num_kv_heads in ((1, 1), (12, 2), (6, 3), (4, 4), (8, 1), (10, 5)):
    check_attended(random_int(2, 30, draw), num_heads, num_kv_heads, random_int(3, 20, draw), draw)
    check_attended(num_kv_heads, num_heads, num_kv_heads, num_kv_heads, draw)  # nothing can be told by its size
check_attended(20, 4, 2, 8, draw, torch.float16)
check_attended(20, 4, 2, 8, draw, torch.float16, factor=5.0)
check_attended(20, 4, 2, 8, draw, torch.bfloat16)
check_attended(64, 2, 1, 64, draw, factor=0.5)
check_attended(1000 + random_int(30, 60, draw), 2, 1, 4, draw, factor=0.1)  # many tokens, and each counts
keys, ones = torch.arange(-40, 41).to(torch.int8)[:, None, None].repeat(1, 1, 4), torch.ones(81, 1)
values, q = random_codes(81, 4, draw, 127).view(81, 1, 4), torch.tensor([[0.05] * 4, [-0.05] * 4])
check_answer(q, (keys, values), (ones, ones.clone()))  # scores from -4 to 4 that rise, and that fall, with the token
for again in (keys, with_last_row_changed(keys)):  # what an earlier call was given does not count
    check_answer(q, (again, with_last_row_changed(values)), (ones, ones.clone()))
keys = torch.tensor([[[100, 0, 99, 0]], [[100, 1, 99, 0]], [[-100, 0, 99, 0]], [[90, 0, 99, 0]]]).to(torch.int8)
values, ones = random_codes(4, 4, draw, 127).view(4, 1, 4), torch.ones(4, 1)
q = torch.tensor([[4.0, 2.0, 0.0, 0.0], [0.0, 2.0, -4.0, 0.0]])  # scores of 200, 201, -200, 180; -198, -197, -198, -198
check_answer(q, (keys, values), (ones, ones.clone()))

# %% [markdown] nbgrader={"grade_id": "text_engine"}
# ## 7. Inside the engine
#
# Your functions quantize all matrices of the smaller course model: rounded, packed, unpacked and multiplied out. One of
# its layers is multiplied by your kernel in each step, straight from your bytes. The distance from the original is
# measured on a text: the Kullback-Leibler divergence (KL, in nats) of the next-token distributions, and how often both
# models have the same first token.
#
# Then the engine decodes from a quantized KV cache: your `quantize_kv` and `attend_kv` answer each query behind the
# prompt.
#
# Every answer is compared, and the message names the function that gave the first wrong one.


# %% nbgrader={"grade_id": "engine_parts"}
import inspect
import textwrap

from reference_impl.assembly.lab_parts import AttentionByRequest, LabEngine, course_llm
from reference_impl.assembly.lab_parts.quantized import matrices_of, multiplied_by, with_matrices, with_model
from reference_impl.bench.quality import compare, windows_of

GROUP = 96  # a row has 128 or 256 inputs: its last group is shorter
BY_KERNEL = "model.layers.1.self_attn.o_proj"  # 128 inputs, 128 outputs


def your_matrix(name, weight, group_size, bits=4):
    """(what your functions make of a matrix, [out, in]; your bytes, if bits are 4; its steps), compared on the way."""
    codes, steps = check_quantized(weight, group_size, bits)
    packed = None
    if bits == 4:
        packed, expected = pack_int4(codes.clone()), packed_of(codes)  # yours are copies: a call may change them
        same = torch.equal(tensor_of(f"{name}: pack_int4", packed, expected.shape).double(), expected.double())
        assert same, f"{name}: pack_int4 gives other bytes than part 2 says"
        back = whole_codes(f"{name}: unpack_int4", unpack_int4(expected.clone(), codes.shape[1]), codes.shape, 127)
        assert torch.equal(back, codes), f"{name}: unpack_int4 gives other codes than were packed"
        packed = expected.contiguous()
    seen = dequantize(codes.clone(), to_yours(steps.clone()), group_size)
    expected = stands_for(codes, steps, group_size)
    check_close(f"{name}: dequantize", seen, expected, 1e-6)
    return expected.float(), packed, steps.contiguous()  # the kernel goes by addresses


def quality(model, num_windows=3):
    """{measure: value} of a course model beside the original, on a text: kl in nats, agreement, from 0 to 1."""
    ids = course_llm("draft").encode(inspect.getsource(textwrap)[:6000])
    found = compare(model, course_llm("draft").engine.model, windows_of(ids, 96, num_windows))
    return {name: found[name].value for name in ("kl", "agreement")}


def quantized_model(group_size, bits=4):
    """(the smaller course model with your weights, {name: (bytes, steps)})."""
    llm, found, stored = course_llm("draft"), {}, {}
    for name, weight in matrices_of(llm.engine.model).items():
        found[name], *stored[name] = your_matrix(name, weight, group_size, bits)
    return with_matrices(llm.engine.model, found), stored


def by_your_kernel(stored, group_size):
    """What multiplied_by takes: your kernel's product, compared with that of the weights your codes stand for."""

    def product(asked):
        packed, steps = stored[asked.name]
        seen = matmul_w4a16(asked.x.clone(), packed.clone(), steps.clone(), group_size, 16, 128)
        check_close(f"{asked.name}, {len(asked.x)} rows: your kernel", seen, asked.expected, 2e-5)
        return seen

    return product


def serve(model, prompts, num_tokens, attention=None):
    """The tokens that a model generates, by request."""
    engine = LabEngine(with_model(course_llm("draft"), model), {"num_blocks": 32, "block_size": 4}, attention=attention)
    for prompt in prompts:
        engine.add(prompt, num_tokens)
    return list(engine.run(max_steps=60).values())


class YourCache:
    """Attention behind the prompt from your quantized keys and values."""

    def __init__(self, bits):
        self.bits, self.num_calls = bits, 0

    def __call__(self, asked):
        if len(asked.q) > 1:
            return asked.expected  # the prompt itself is attended to before it is rounded
        self.num_calls += 1
        what, reach = f"layer {asked.layer}, {asked.num_tokens} tokens, {self.bits} bits", 2 ** (self.bits - 1) - 1
        keys, values = asked.keys.contiguous(), asked.values.contiguous()
        found = cache_of(
            f"{what}: quantize_kv", quantize_kv(keys.clone(), values.clone(), self.bits), keys.shape, reach
        )
        k, v = (codes.double() * steps.double()[:, :, None] for codes, steps in (found[:2], found[2:]))
        for name, one, rounded, steps in (("k", keys, k, found[1]), ("v", values, v, found[3])):
            off = float(((one.double() - rounded).abs() / steps.double()[:, :, None]).max())
            assert off < 0.5001, (
                f"{what}: quantize_kv: a number of {name} is off by {off:.2f} steps, expected a half at most"
            )
            largest = one.double().abs().amax(2)
            wide = float((steps.double() * reach / largest.clamp(min=1e-30) - 1).abs().max())
            assert wide < 1e-5, f"{what}: quantize_kv: a scale of {name} is off by {wide:.2g}"
        expected = whole(asked.q[0], k, v)
        seen = attend_kv(asked.q[0].clone(), *your_cache(*(t.clone() for t in found)))
        check_close(f"{what}: attend_kv", seen, expected, 1e-4, ("head", "column"))
        return expected.float()[None]


# %% nbgrader={"grade_id": "check_engine_weights", "grade": true, "points": 1}
# property: in the course model, each matrix is what your codes, bytes and scales say, and one layer's product is your
#   kernel's, so that the model writes what these weights say.
# question: Which function does the message name, and in which layer?
# hint: the message names the function that gave the first wrong answer; make that part's own checks pass first.
# explanation: Each matrix goes through your functions in turn: codes and scales, bytes, codes again, weights. 96 inputs a
#   group leave a shorter last one in each row. The kernel multiplies the layer's activations as they come: a prompt of
#   some tokens, then single ones.
def check_written(prompts, num_tokens, group_size):
    model, stored = quantized_model(group_size)
    expected = serve(model, prompts, num_tokens)
    seen = serve(multiplied_by(model, BY_KERNEL, by_your_kernel(stored, group_size)), prompts, num_tokens)
    assert seen == expected, f"these weights write {expected}; with your kernel in {BY_KERNEL}: {seen}"
    return model, seen


encode = course_llm("draft").encode
model, written = check_written([encode("def add(a, b):\n    return"), encode("import")], 2, GROUP)
for tokens in written:
    print(repr(course_llm("draft").tokenizer.decode(tokens)))
measured = quality(model)
print(f"4 bits, groups of {GROUP}: KL {measured['kl']:.4f} nats, same first token {measured['agreement']:.1%}")
### BEGIN HIDDEN TESTS
draw = rng("check_engine_weights")
prompts = [torch.randint(100, 4000, (n,), generator=draw).tolist() for n in (random_int(5, 9, draw), 2)]
check_written(prompts, 2, (32, 64, 160)[random_int(0, 2, draw)])
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_engine_kv", "grade": true, "points": 1}
# property: decoding from your quantized cache gives what the rounded keys and values say, in every layer and step.
# question: Which function does the message name, and how many tokens were in the cache?
# hint: the message names the function that gave the first wrong answer; make that part's own checks pass first.
# explanation: Two query heads of the course model share one KV head. The cache grows by a token a step, and what was in it
#   before has the same codes as before, since each token has scales of its own.
def check_decoded(prompts, num_tokens, bits):
    llm, cache = course_llm("draft"), YourCache(bits)
    seen = serve(llm.engine.model, prompts, num_tokens, AttentionByRequest(llm.engine.attention, cache))
    plain = serve(llm.engine.model, prompts, num_tokens)
    pairs = [(a, b) for one, other in zip(seen, plain, strict=True) for a, b in zip(one, other, strict=True)]
    same = sum(a == b for a, b in pairs)
    print(f"KV in {bits} bits: {cache.num_calls} calls; {same} of {len(pairs)} tokens as without rounding")
    assert cache.num_calls, "your cache was not asked"


encode = course_llm("draft").encode
check_decoded([encode("def area(a, b):\n    return a *"), encode("import")], 4, 8)
check_decoded([encode("def area(a, b):\n    return a *")], 3, 4)
### BEGIN HIDDEN TESTS
draw = rng("check_engine_kv")
prompts = [torch.randint(100, 4000, (n,), generator=draw).tolist() for n in (random_int(5, 9, draw), 2)]
check_decoded(prompts, 3, 4)
check_decoded(prompts, 2, 8)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_measure"}
# ## 8. What each method is worth
#
# Nothing here is graded. Your functions quantize the smaller course model in four ways, and each is compared with the
# original on the same windows of a text. For GPTQ the inputs of every layer are recorded once, from other text.

# %% nbgrader={"grade_id": "measure"} inferlab={"where": "notebook"}
from reference_impl.assembly.lab_parts.quantized import inputs_of


def by_gptq(weight, x, group_size):
    """The matrix after your gptq_step over all columns; scales are those of rounding to nearest."""
    _, scales = quantize_groups(weight, group_size, 4)
    steps = from_yours(scales, (len(weight), groups_for(weight.shape[1], group_size))).double()
    factor, now = inverse_factor(x.double().T @ x.double(), 0.01), weight.double()
    for i in range(weight.shape[1]):
        step = steps[:, i // group_size]
        now = gptq_step(now, factor, i, lambda column, i, step=step: (column / step).round().clamp(-7, 7) * step)
    return now.float()


original = course_llm("draft").engine.model
ids = course_llm("draft").encode(inspect.getsource(inspect)[:9000])
seen_inputs = inputs_of(original, windows_of(ids, 128, 4))
plain = {
    f"{bits} bits, groups of {size}": quantized_model(size, bits)[0] for bits, size in ((8, 128), (4, 128), (4, 32))
}
plain["4 bits, groups of 128, GPTQ"] = with_matrices(
    original, {name: by_gptq(weight, seen_inputs[name], 128) for name, weight in matrices_of(original).items()}
)
for name, model in plain.items():
    measured = quality(model, 8)
    print(f"{name:<28} KL {measured['kl']:.5f} nats, same first token {measured['agreement']:.1%}")

# %% [markdown] nbgrader={"grade_id": "text_milestone"}
# ## 9. Your 4-bit model serves a text
#
# All weights are rounded by your functions, and your kernel multiplies one of the layers from your bytes. With all checks
# passed, `inferlab lab check` shows this, too.

# %% nbgrader={"grade_id": "milestone"} inferlab={"where": "milestone"}
from reference_impl.assembly.lab_parts import show_served

model, stored = quantized_model(GROUP)
served = with_model(course_llm("draft"), multiplied_by(model, BY_KERNEL, by_your_kernel(stored, GROUP)))
engine = LabEngine(served, {"num_blocks": 32, "block_size": 4})
engine.add(course_llm("draft").encode("def add(a, b):\n    return"), 8)
engine.run()
show_served("Your 4-bit weights and your kernel just served this text", engine, course_llm("draft"))

# %% [markdown] nbgrader={"grade_id": "extensions"}
# ## Further (not graded)
#
# Add cells below and try one.
#
# - **Zero points.** Codes from 0 to 15 with a zero beside each scale. For which weights does that help?
# - **AWQ in the model.** Fold your `awq_scale` into the norms of the course model with `fold`, before you round. Its
#   activations have few outliers: where does it still help?
# - **Keys per channel.** KIVI gives a key's channels a scale each, over a block of tokens, and leaves the last, partial
#   block in 16 bits. Compare the error of q·k with that of a scale per token.
# - **A real kernel.** `reference_impl/kernels/` has the engine's own W4A16. What does it do that yours does not?
