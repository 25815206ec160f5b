# Recursion over groups, generators, sign extension, eigenvalues and QR, a kernel that computes the transpose.

# %% nbgrader={"grade_id": "quantize_groups"}
# recursion over the row's groups; halves away from zero
def quantize_groups(weight, group_size, bits):
    head, tail = weight[:, :group_size].float(), weight[:, group_size:]
    top = torch.linalg.vector_norm(head, math.inf, dim=1, keepdim=True)
    step = top / (2 ** (bits - 1) - 1) + (top == 0)
    q = head / step
    mine = (q.sign() * (q.abs() + 0.5).floor()).char()
    if not tail.shape[1]:
        return mine, step
    codes, steps = quantize_groups(tail, group_size, bits)
    return torch.hstack((mine, codes)), torch.hstack((step, steps))


# %% nbgrader={"grade_id": "dequantize"}
# generator of columns
def dequantize(codes, scales, group_size):
    def columns():
        for j, column in enumerate(codes.T):
            yield column.mul(scales[:, j // group_size])

    return torch.stack(tuple(columns())).T


# %% nbgrader={"grade_id": "pack_int4"}
# numpy, a sum of products, transposed result
import numpy as np


def pack_int4(codes):
    n = np.pad(np.asarray(codes).astype(int), ((0, 0), (0, codes.shape[1] & 1))) + 8
    return (n.reshape(len(n), -1, 2) @ [1, 16]).astype(np.uint8)


# %% nbgrader={"grade_id": "unpack_int4"}
# sign extension by shifts of int8, column by column
def unpack_int4(packed, num_inputs):
    signed = (packed ^ 0x88).view(torch.int8)
    out = torch.empty(len(packed), num_inputs, dtype=torch.int8)
    for j in range(num_inputs):
        out[:, j] = (signed[:, j // 2] >> 4) if j & 1 else ((signed[:, j // 2] << 4) >> 4)
    return out


# %% nbgrader={"grade_id": "w4a16_kernel"}
# y transposed inside the kernel, moving pointers, while loop, x split into even and odd after one load
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
    HALF: tl.constexpr = BLOCK_K // 2
    half_k = K // 2
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, HALF)
    k = tl.arange(0, BLOCK_K)
    p_at = packed + outs[:, None] * half_k + j[None, :]
    x_at = x + rows[:, None] * K + k[None, :]
    s_at = scales + outs * ((K - 1) // GROUP + 1)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    left = K
    while left > 0:
        b = tl.load(p_at, mask=(outs < N)[:, None] & (j < left // 2)[None, :], other=0)
        t = tl.load(x_at, mask=(rows < M)[:, None] & (k < left)[None, :], other=0.0)
        even, odd = tl.split(tl.reshape(t, (BLOCK_M, HALF, 2)))
        s = tl.load(s_at + (K - left) // GROUP, mask=outs < N, other=0.0)
        low = (b & 15).to(tl.float32) - 8.0
        high = (b >> 4).to(tl.float32) - 8.0
        d = tl.dot(low.to(t.dtype), tl.trans(even), input_precision="ieee")
        d = tl.dot(high.to(t.dtype), tl.trans(odd), d, input_precision="ieee")
        acc = acc + s[:, None] * d
        p_at += HALF
        x_at += BLOCK_K
        left -= BLOCK_K
    tl.store(y + rows[None, :] * N + outs[:, None], acc, mask=(rows < M)[None, :] & (outs < N)[:, None])


# %% nbgrader={"grade_id": "awq_scale"}
# all candidates stacked, argmin
def awq_scale(weight, x, ratios, rounded):
    floor = torch.full_like(x[0], 1e-4)
    s = torch.maximum(x.abs().sum(0) / len(x), floor)[None] ** torch.tensor(ratios, dtype=x.dtype)[:, None]
    s = s / (s.amax(1) * s.amin(1)).sqrt()[:, None]
    back = torch.stack([rounded(weight * one) for one in s]) / s[:, None]
    y = torch.einsum("ti,coi->cto", x, weight - back)
    return s[torch.linalg.vector_norm(y, dim=(1, 2)).argmin()]


# %% nbgrader={"grade_id": "smooth_scale"}
# number by number
def smooth_scale(reach, weights, alpha):
    s = []
    for j, r in enumerate(reach.tolist()):
        w = max(abs(v) for weight in weights for v in weight[:, j].tolist())
        s.append(max(r, 1e-5) ** alpha * max(w, 1e-5) ** (alpha - 1))
    return torch.tensor(s, dtype=torch.float64)


# %% nbgrader={"grade_id": "fold"}
# as products with a diagonal matrix; one product for all matrices, split again
def fold(norm, weights, s):
    sizes = [len(w) for w in weights]
    return (torch.diag(1 / s) @ norm), list((torch.vstack(list(weights)) @ torch.diag(s)).split(sizes))


# %% nbgrader={"grade_id": "inverse_factor"}
# eigenvalues, QR with signs made positive
def inverse_factor(gram, damping):
    h = gram.numpy() + damping * np.trace(gram.numpy()) / len(gram) * np.eye(len(gram))
    values, vectors = np.linalg.eigh(h)
    u = np.linalg.qr((vectors / np.sqrt(values)).T, mode="r")
    return np.triu(u * np.sign(np.diag(u))[:, None])


# %% nbgrader={"grade_id": "gptq_step"}
# numpy, row by row, array out
def gptq_step(weight, factor, i, rounded):
    q = np.asarray(rounded(weight.T[i].contiguous(), i))
    w, u = weight.numpy().copy(), factor.numpy()
    for row, there in zip(w, q, strict=True):
        off, row[i] = row[i] - there, there
        for j in range(i + 1, len(row)):
            row[j] -= off * u[i, j] / u[i, i]
    return w


# %% nbgrader={"grade_id": "quantize_kv"}
# numpy, k and v at once, a list out
def quantize_kv(k, v, bits):
    both = np.stack([np.asarray(t.float()) for t in (k, v)])
    tops = np.maximum(both.max(-1), -both.min(-1))
    scales = np.divide(tops, np.float32(2**bits // 2 - 1), out=np.ones_like(tops), where=tops > 0)
    codes = np.rint(both / scales[..., None]).astype(np.int8)
    return [codes[0], scales[0], codes[1], scales[1]]


# %% nbgrader={"grade_id": "attend_kv"}
# numpy, head by head, float64 inside
def attend_kv(q, k_codes, k_scales, v_codes, v_scales):
    out = np.zeros(q.shape, dtype=np.float32)
    for h in range(len(q)):
        g = h * k_codes.shape[1] // len(q)
        score = (
            k_codes[:, g].numpy().astype(float)
            @ q[h].float().numpy().astype(float)
            * k_scales[:, g].numpy()
            / math.sqrt(q.shape[1])
        )
        w = np.exp(score - score.max())
        out[h] = (w / w.sum() * v_scales[:, g].numpy()) @ v_codes[:, g].numpy()
    return out
