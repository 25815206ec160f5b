# Results built in place, a while loop in the kernel that moves pointers, einsum in place of broadcasting, float64
# wherever it is allowed.

# %% nbgrader={"grade_id": "quantize_groups"}
def rounded_to_steps(values, bits):
    """(codes, scales) along the last dimension, float64 inside."""
    reach = 2.0 ** (bits - 1) - 1
    largest = values.double().abs().amax(-1)
    scales = torch.where(largest > 0, largest / reach, torch.ones_like(largest))
    codes = (values.double() / scales.unsqueeze(-1)).round().clamp(-reach, reach)
    return codes.to(torch.int8), scales.float()


def quantize_groups(weight, group_size, bits):
    num_groups = (weight.shape[1] + group_size - 1) // group_size
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], num_groups)
    for g in range(num_groups):
        columns = slice(g * group_size, (g + 1) * group_size)
        codes[:, columns], scales[:, g] = rounded_to_steps(weight[:, columns], bits)
    return codes, scales


# %% nbgrader={"grade_id": "dequantize"}
def dequantize(codes, scales, group_size):
    pieces = codes.double().split(group_size, 1)
    return torch.cat([piece * scales[:, g : g + 1].double() for g, piece in enumerate(pieces)], 1).float()


# %% nbgrader={"grade_id": "pack_int4"}
def pack_int4(codes):
    rows, inputs = codes.shape
    out = torch.full((rows, (inputs + 1) // 2), 0x88, dtype=torch.uint8)
    out[:, :] = (codes[:, 0::2].short() + 8).to(torch.uint8) | 0x80
    odd = (codes[:, 1::2].short() + 8).to(torch.uint8)
    out[:, : odd.shape[1]] = (out[:, : odd.shape[1]] & 0x0F) | (odd << 4)
    return out


# %% nbgrader={"grade_id": "unpack_int4"}
def unpack_int4(packed, num_inputs):
    out = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.int8)
    out[:, 0::2] = (packed & 0x0F).to(torch.int8) - 8
    out[:, 1::2] = (packed >> 4).to(torch.int8) - 8
    return out[:, :num_inputs]


# %% nbgrader={"grade_id": "w4a16_kernel"}
@triton.jit
def w4a16_kernel(
    x, packed, scales, y,  # pointers
    M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, BLOCK_K // 2)
    groups = K // GROUP + (K % GROUP > 0)
    x_at = x + m[:, None] * K + 2 * byte[None, :]
    w_at = packed + n[None, :] * (K // 2) + byte[:, None]
    lows = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    highs = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    left, start = K // 2, 0
    while left > 0:
        here = byte < left
        scale = tl.load(scales + n * groups + start // GROUP, mask=n < N, other=0.0)[None, :]
        pair = tl.load(w_at, mask=here[:, None] & (n < N)[None, :], other=0)
        for odd in tl.static_range(2):
            tile = tl.load(x_at + odd, mask=(m < M)[:, None] & here[None, :], other=0.0)
            code = ((pair >> (4 * odd)) & 15).to(tl.float32) - 8.0
            product = tl.dot(tile, code.to(tile.dtype), input_precision="ieee") * scale
            if odd == 0:
                lows += product
            else:
                highs += product
        x_at += BLOCK_K
        w_at += BLOCK_K // 2
        left -= BLOCK_K // 2
        start += BLOCK_K
    tl.store(y + m[:, None] * N + n[None, :], lows + highs, mask=(m < M)[:, None] & (n < N)[None, :])


# %% nbgrader={"grade_id": "awq_scale"}
def awq_scale(weight, x, ratios, rounded):
    expected = torch.nn.functional.linear(x, weight)
    size = torch.maximum(x.abs().mean(dim=0), torch.tensor(1e-4, dtype=x.dtype))
    best = (math.inf, None)
    for ratio in ratios:
        s = size.pow(ratio)
        s = s / torch.sqrt(s.max() * s.min())
        seen = torch.nn.functional.linear(x / s, rounded(weight * s))
        error = torch.nn.functional.mse_loss(seen, expected).item()
        best = min(best, (error, s), key=lambda pair: pair[0])
    return best[1]


# %% nbgrader={"grade_id": "smooth_scale"}
def smooth_scale(reach, weights, alpha):
    most = torch.full_like(reach, 1e-5)
    for weight in weights:
        most = torch.maximum(most, weight.abs().amax(dim=0))
    return torch.pow(torch.clamp(reach, 1e-5), alpha).div(torch.pow(most, 1 - alpha))


# %% nbgrader={"grade_id": "fold"}
def fold(norm, weights, s):
    folded = []
    for weight in weights:
        folded.append(torch.einsum("oi,i->oi", weight, s))
    return torch.div(norm, s), folded


# %% nbgrader={"grade_id": "inverse_factor"}
def inverse_factor(gram, damping):
    damped = gram.clone()
    damped.diagonal().add_(gram.diagonal().mean(), alpha=damping)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped))).mT.contiguous()


# %% nbgrader={"grade_id": "gptq_step"}
def gptq_step(weight, factor, i, rounded):
    new = weight.clone()
    new[:, i] = rounded(weight[:, i], i)
    change = (new[:, i : i + 1] - weight[:, i : i + 1]) / factor[i, i]
    new[:, i + 1 :].addmm_(change, factor[i : i + 1, i + 1 :])
    return new


# %% nbgrader={"grade_id": "quantize_kv"}
def quantize_kv(k, v, bits):
    reach, out = 2.0 ** (bits - 1) - 1, []
    for values in (k.double(), v.double()):
        largest = values.abs().amax(-1)
        scales = torch.where(largest > 0, largest / reach, torch.ones_like(largest))
        out += [(values / scales.unsqueeze(-1)).round().to(torch.int8), scales.float()]
    return tuple(out)


# %% nbgrader={"grade_id": "attend_kv"}
def attend_kv(q, k_codes, k_scales, v_codes, v_scales):
    num_kv_heads, outputs = k_codes.shape[1], []
    for head, queries in enumerate(q.double().chunk(num_kv_heads)):
        scores = queries @ k_codes[:, head].double().T * k_scales[:, head].double() / q.shape[1] ** 0.5
        outputs.append((scores.softmax(-1) * v_scales[:, head].double()) @ v_codes[:, head].double())
    return torch.cat(outputs).float()
