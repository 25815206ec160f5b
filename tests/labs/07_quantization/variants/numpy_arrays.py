# NumPy arrays in and out, reduceat for groups, divmod for nibbles; the reference's kernel.

# %% nbgrader={"grade_id": "quantize_groups"}
import numpy as np


def quantize_groups(weight, group_size, bits):
    values = weight.float().numpy()
    starts = np.arange(0, values.shape[1], group_size)
    scales = np.maximum.reduceat(np.abs(values), starts, axis=1) / np.float32(2 ** (bits - 1) - 1)
    scales[scales == 0] = 1
    each = np.repeat(scales, np.diff([*starts, values.shape[1]]), axis=1)
    return np.rint(values / each).astype(np.int8), scales


# %% nbgrader={"grade_id": "dequantize"}
def dequantize(codes, scales, group_size):
    group = np.arange(codes.shape[1]) // group_size
    return np.take(scales.numpy(), group, axis=1) * codes.numpy().astype(np.float32)


# %% nbgrader={"grade_id": "pack_int4"}
def pack_int4(codes):
    values = np.pad(codes.numpy().astype(np.int32), ((0, 0), (0, codes.shape[1] & 1))) + 8
    return (values[:, 0::2] + (values[:, 1::2] << 4)).astype(np.uint8)


# %% nbgrader={"grade_id": "unpack_int4"}
def unpack_int4(packed, num_inputs):
    low, high = np.divmod(packed.numpy().astype(np.int32), 16)[::-1]
    out = np.empty((len(packed), 2 * packed.shape[1]), np.int8)
    out[:, ::2], out[:, 1::2] = low - 8, high - 8
    return out[:, :num_inputs].copy()


# %% nbgrader={"grade_id": "awq_scale"}
def awq_scale(weight, x, ratios, rounded):
    w, inputs = weight.numpy(), x.numpy()
    mean = np.maximum(np.abs(inputs).mean(0), 1e-4)
    found = []
    for ratio in ratios:
        s = mean**ratio
        s = s / np.sqrt(s.max() * s.min())
        back = np.asarray(rounded(torch.from_numpy(w * s))) / s
        found.append((np.linalg.norm(inputs @ (w - back).T), s))
    return found[int(np.argmin([error for error, _ in found]))][1]


# %% nbgrader={"grade_id": "smooth_scale"}
def smooth_scale(reach, weights, alpha):
    most = np.max([np.abs(weight.numpy()).max(axis=0) for weight in weights], axis=0)
    return np.power(np.maximum(reach.numpy(), 1e-5), alpha) * np.power(np.maximum(most, 1e-5), alpha - 1)


# %% nbgrader={"grade_id": "fold"}
def fold(norm, weights, s):
    return norm.numpy() / s.numpy(), [weight.numpy() * s.numpy()[None, :] for weight in weights]


# %% nbgrader={"grade_id": "inverse_factor"}
def inverse_factor(gram, damping):
    damped = gram.numpy() + np.diag(np.full(len(gram), damping * np.trace(gram.numpy()) / len(gram)))
    return np.linalg.cholesky(np.linalg.inv(damped)).T.copy()


# %% nbgrader={"grade_id": "gptq_step"}
def gptq_step(weight, factor, i, rounded):
    w, u = weight.numpy().copy(), factor.numpy()
    q = np.asarray(rounded(torch.from_numpy(w[:, i].copy()), i))
    error = (w[:, i] - q) / u[i, i]
    w[:, i:] -= np.outer(error, u[i, i:])  # column i becomes q but for rounding
    return w


# %% nbgrader={"grade_id": "quantize_kv"}
def quantize_kv(k, v, bits):
    def one(x):
        values = x.float().numpy()
        scales = np.abs(values).max(-1) / np.float32(2 ** (bits - 1) - 1)
        scales = np.where(scales == 0, np.float32(1), scales)
        return np.rint(values / scales[..., None]).astype(np.int8), scales

    return (*one(k), *one(v))


# %% nbgrader={"grade_id": "attend_kv"}
def attend_kv(q, k_codes, k_scales, v_codes, v_scales):
    (num_heads, head_dim), out = q.shape, []
    for h, query in enumerate(q.float().numpy()):
        head = h * k_codes.shape[1] // num_heads
        scores = k_codes.numpy()[:, head].astype(np.float32) @ query * k_scales.numpy()[:, head] / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() * v_scales.numpy()[:, head] @ v_codes.numpy()[:, head].astype(np.float32))
    return np.stack(out).astype(np.float32)
