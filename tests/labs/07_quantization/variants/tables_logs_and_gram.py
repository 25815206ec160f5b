# NumPy arrays in columns first, a table of bytes, logarithms, the gram, an online softmax, a kernel that joins nibbles.

# %% nbgrader={"grade_id": "quantize_groups"}
# numpy, reduceat over the groups' beginnings, arrays out, a list for a pair
import numpy as np


def quantize_groups(weight, group_size, bits):
    w = weight.to(torch.float32).numpy()
    starts = np.arange(0, w.shape[1], group_size)
    scales = np.maximum.reduceat(np.abs(w), starts, axis=1) / np.float32((1 << bits - 1) - 1)
    scales[scales == 0] = 1
    return [np.rint(w / scales[:, np.arange(w.shape[1]) // group_size]).astype(np.int8), scales]


# %% nbgrader={"grade_id": "dequantize"}
def dequantize(codes, scales, group_size):
    c, s = np.asarray(codes), np.asarray(scales)
    return c * s[:, np.arange(c.shape[1]) // group_size]


# %% nbgrader={"grade_id": "pack_int4"}
# two's complement nibbles in int8, flipped and seen as bytes; begins from the empty byte 0x88
def pack_int4(codes):
    out = torch.full((codes.shape[0], (codes.shape[1] + 1) // 2), -128, dtype=torch.int8)
    out |= codes[:, ::2] & 15 ^ 8
    high = codes[:, 1::2]
    out[:, : high.shape[1]] ^= high << 4
    return out.view(torch.uint8)


# %% nbgrader={"grade_id": "unpack_int4"}
# a table of the 256 bytes

_TABLE = np.array([[b % 16 - 8, b // 16 - 8] for b in range(256)], dtype=np.int8)


def unpack_int4(packed, num_inputs):
    return _TABLE[packed.numpy()].reshape(len(packed), -1)[:, :num_inputs]


# %% nbgrader={"grade_id": "w4a16_kernel"}
# whole tile of x, nibbles joined and reshaped, transposed; a helper; a scale is loaded once a group
@triton.jit
def _tile_of_codes(b, BN: tl.constexpr, BK: tl.constexpr):
    signed = b.to(tl.int16)
    return tl.reshape(tl.join((signed & 15) - 8, (signed >> 4) - 8), (BN, BK))


@triton.jit
def w4a16_kernel(
    x,
    packed,
    scales,
    y,  # pointers
    M,
    N,
    K,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    groups = tl.cdiv(K, GROUP)
    for g in range(0, groups):
        part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(g * GROUP, tl.minimum(K, g * GROUP + GROUP), BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)[None, :]
            tile = tl.load(x + m * K + k, mask=(m < M) & (k < K), other=0.0)
            j = start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
            b = tl.load(packed + n[:, None] * (K // 2) + j, mask=(n[:, None] < N) & (2 * j < K), other=136)
            w = _tile_of_codes(b, BLOCK_N, BLOCK_K).to(tile.dtype)
            part = tl.dot(tile, tl.trans(w), part, input_precision="ieee")
        total += part * tl.load(scales + n * groups + g, mask=n < N, other=0.0)[None, :]
    tl.store(y + m * N + n[None, :], total, mask=(m < M) & (n[None, :] < N))


# %% nbgrader={"grade_id": "awq_scale"}
# by the gram, logarithms, an array out
def awq_scale(weight, x, ratios, rounded):
    gram, logs = x.T @ x, x.abs().mean(0).clamp(min=1e-4).log()
    logs = logs - (logs.max() + logs.min()) / 2
    found = [(ratio * logs).exp() for ratio in ratios]

    def error(s):
        d = weight - rounded(weight * s) / s
        return torch.einsum("oi,ij,oj->", d, gram, d).item()

    return min(found, key=error).numpy()


# %% nbgrader={"grade_id": "smooth_scale"}
from functools import reduce


def smooth_scale(reach, weights, alpha):
    tops = (np.abs(w.numpy()).max(0) for w in weights)
    top = reduce(np.maximum, tops, np.full(len(reach), 1e-5))
    return np.exp(alpha * np.log(np.maximum(reach.numpy(), 1e-5)) - (1 - alpha) * np.log(top))


# %% nbgrader={"grade_id": "fold"}
def fold(norm, weights, s):
    return [np.divide(norm, s), tuple(np.einsum("oi,i->oi", w, s) for w in weights)]


# %% nbgrader={"grade_id": "inverse_factor"}
# the damped gram is R R^T with R upper; U is the inverse of R
def inverse_factor(gram, damping):
    damped = gram.clone()
    damped.diagonal().add_(damping * gram.trace() / len(gram))
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    return torch.linalg.solve_triangular(upper, torch.eye(len(gram), dtype=gram.dtype), upper=True)


# %% nbgrader={"grade_id": "gptq_step"}
# put together from three pieces
def gptq_step(weight, factor, i, rounded):
    left, column, right = weight[:, :i], weight[:, i].clone(), weight[:, i + 1 :]
    q = rounded(column, i)
    share = (factor[i] / factor[i, i])[i + 1 :]
    return torch.hstack((left, q[:, None], right - (column - q)[:, None] * share))


# %% nbgrader={"grade_id": "quantize_kv"}
# as matrices with one group a row, by part 1
def quantize_kv(k, v, bits):
    def one(t):
        codes, scales = quantize_groups(t.reshape(-1, t.shape[2]), t.shape[2], bits)
        return torch.as_tensor(codes).reshape(t.shape), torch.as_tensor(scales).reshape(t.shape[:2])

    return *one(k), *one(v)


# %% nbgrader={"grade_id": "attend_kv"}
# token by token: an online softmax, scales that wait
def attend_kv(q, k_codes, k_scales, v_codes, v_scales):
    kv_heads = k_codes.shape[1]
    q = q.float().view(kv_heads, -1, q.shape[1]) * q.shape[1] ** -0.5
    top = torch.full(q.shape[:2], -math.inf)
    total, o = torch.zeros_like(top), torch.zeros_like(q)
    for kc, ks, vc, vs in zip(k_codes, k_scales, v_codes, v_scales, strict=True):
        score = (q * kc.float()[:, None]).sum(2) * ks[:, None]
        new = torch.maximum(top, score)
        old, now = (top - new).exp(), (score - new).exp()
        total = total * old + now
        o = o * old[:, :, None] + (now * vs[:, None])[:, :, None] * vc.float()[:, None]
        top = new
    return (o / total[:, :, None]).flatten(0, 1)
