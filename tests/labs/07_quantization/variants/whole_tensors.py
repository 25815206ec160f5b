# Groups as a dimension of a padded tensor; bytes as sums; a kernel that interleaves its nibbles; the error of AWQ from
# the Gram matrix; the factor from a flipped Cholesky factor; keys and values multiplied out before attention.

# %% nbgrader={"grade_id": "quantize_groups"}
def quantize_groups(weight, group_size, bits):
    rows, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.to(torch.float32), (0, -inputs % group_size)).view(rows, -1, group_size)
    scales = torch.linalg.vector_norm(padded, math.inf, dim=2) / (2 ** (bits - 1) - 1)
    scales = scales.masked_fill(scales == 0, 1)
    codes = torch.round(padded / scales.unsqueeze(2)).view(rows, -1)[:, :inputs]
    return codes.to(torch.int8).contiguous(), scales


# %% nbgrader={"grade_id": "dequantize"}
def dequantize(codes, scales, group_size):
    return torch.repeat_interleave(scales, group_size, dim=1)[:, : codes.shape[1]].mul(codes)


# %% nbgrader={"grade_id": "pack_int4"}
def pack_int4(codes):
    wide = torch.full((codes.shape[0], codes.shape[1] + codes.shape[1] % 2), 8, dtype=torch.int32)
    wide[:, : codes.shape[1]] += codes
    return (wide.unflatten(1, (-1, 2)) * torch.tensor([1, 16])).sum(2).to(torch.uint8)


# %% nbgrader={"grade_id": "unpack_int4"}
def unpack_int4(packed, num_inputs):
    shifts = torch.tensor([0, 4])
    return (((packed.long().unsqueeze(2) >> shifts) & 15) - 8).flatten(1).narrow(1, 0, num_inputs).to(torch.int8)


# %% nbgrader={"grade_id": "w4a16_kernel"}
@triton.jit
def two_codes(byte):
    low = (byte & 15).to(tl.int32) - 8
    high = (byte >> 4).to(tl.int32) - 8
    return tl.interleave(low, high)  # [N, inputs]


@triton.jit
def w4a16_kernel(
    x, packed, scales, y,  # pointers
    M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    i, b = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 2)
    groups = tl.where(K % GROUP == 0, K // GROUP, K // GROUP + 1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, (K + BLOCK_K - 1) // BLOCK_K):
        start = step * BLOCK_K
        tile = tl.load(
            x + (m * K)[:, None] + (start + i)[None, :], mask=(m < M)[:, None] & (start + i < K)[None, :], other=0.0
        )
        where = (n * (K // 2))[:, None] + (start // 2 + b)[None, :]
        byte = tl.load(packed + where, mask=(n < N)[:, None] & (start // 2 + b < K // 2)[None, :], other=0)
        scale = tl.load(scales + n * groups + start // GROUP, mask=n < N, other=1.0)
        acc = acc + scale[None, :] * tl.dot(tile, tl.trans(two_codes(byte).to(tile.dtype)), input_precision="ieee")
    tl.store(y + (m * N)[:, None] + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


# %% nbgrader={"grade_id": "awq_scale"}
def awq_scale(weight, x, ratios, rounded):
    gram, mean = x.T @ x, x.abs().sum(0).div(len(x)).clamp_min(1e-4).log()
    errors, candidates = [], []
    for ratio in ratios:
        power = ratio * mean
        s = (power - (power.max() + power.min()) / 2).exp()
        off = weight - rounded(weight * s) / s
        errors.append(torch.trace(off @ gram @ off.T))
        candidates.append(s)
    return candidates[int(torch.stack(errors).argmin())]


# %% nbgrader={"grade_id": "smooth_scale"}
def smooth_scale(reach, weights, alpha):
    most = torch.stack([weight.abs().max(0).values for weight in weights]).max(0).values
    return torch.exp(alpha * torch.log(reach.clamp_min(1e-5)) - (1 - alpha) * torch.log(most.clamp_min(1e-5)))


# %% nbgrader={"grade_id": "fold"}
def fold(norm, weights, s):
    sizes = [len(weight) for weight in weights]
    return [norm * s.reciprocal(), list((torch.cat(list(weights)) @ torch.diag(s)).split(sizes))]


# %% nbgrader={"grade_id": "inverse_factor"}
def inverse_factor(gram, damping):
    damped = gram + torch.diag(torch.full((len(gram),), float(gram.trace()) / len(gram) * damping, dtype=gram.dtype))
    # H = R R^T with R upper: the Cholesky factor of the flipped matrix, flipped back. Then H^-1 = R^-T R^-1.
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    return torch.linalg.solve_triangular(upper, torch.eye(len(gram), dtype=gram.dtype), upper=True)


# %% nbgrader={"grade_id": "gptq_step"}
def gptq_step(weight, factor, i, rounded):
    error = weight[:, i] - rounded(weight[:, i], i)
    row = torch.where(torch.arange(len(factor)) >= i, factor[i], torch.zeros_like(factor[i])) / factor[i, i]
    return weight - error[:, None] * row[None, :]


# %% nbgrader={"grade_id": "quantize_kv"}
def quantize_kv(k, v, bits):
    both = torch.stack((k, v)).to(torch.float32)
    scales = both.abs().max(3).values.div(2 ** (bits - 1) - 1)
    scales = scales + (scales == 0)
    codes = torch.round(both / scales[..., None]).to(torch.int8)
    return [codes[0], scales[0], codes[1], scales[1]]


# %% nbgrader={"grade_id": "attend_kv"}
def attend_kv(q, k_codes, k_scales, v_codes, v_scales):
    group = len(q) // k_codes.shape[1]
    keys, values = (
        (codes.double() * scales.double()[:, :, None]).repeat_interleave(group, 1).transpose(0, 1)
        for codes, scales in ((k_codes, k_scales), (v_codes, v_scales))
    )
    o = torch.nn.functional.scaled_dot_product_attention(q.double()[:, None], keys, values)
    return o[:, 0].float()
