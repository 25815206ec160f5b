# Row by row, group by group and column by column, with Python's numbers; a kernel with a loop over groups around one
# over steps; attention token by token with an online softmax.

# %% nbgrader={"grade_id": "quantize_groups"}
def quantize_groups(weight, group_size, bits):
    largest_code = (1 << (bits - 1)) - 1
    num_rows, num_inputs = weight.shape
    codes = torch.zeros(num_rows, num_inputs, dtype=torch.int8)
    scales = torch.ones(num_rows, math.ceil(num_inputs / group_size))
    for row in range(num_rows):
        for number, start in enumerate(range(0, num_inputs, group_size)):
            group = weight[row, start : start + group_size].tolist()
            largest = max(abs(value) for value in group)
            if largest > 0:
                scale = largest / largest_code
                scales[row, number] = scale
                for j, value in enumerate(group):
                    codes[row, start + j] = math.floor(value / scale + 0.5)
    return codes, scales


# %% nbgrader={"grade_id": "dequantize"}
def dequantize(codes, scales, group_size):
    out = torch.empty(codes.shape)
    for j in range(codes.shape[1]):
        out[:, j] = codes[:, j] * scales[:, j // group_size]
    return out


# %% nbgrader={"grade_id": "pack_int4"}
def pack_int4(codes):
    rows = []
    for row in codes.tolist():
        row = [*row, 0] if len(row) % 2 else row
        rows.append([(row[j] + 8) + 16 * (row[j + 1] + 8) for j in range(0, len(row), 2)])
    return torch.tensor(rows, dtype=torch.uint8)


# %% nbgrader={"grade_id": "unpack_int4"}
def unpack_int4(packed, num_inputs):
    rows = [[nibble - 8 for byte in row for nibble in (byte % 16, byte // 16)] for row in packed.tolist()]
    return torch.tensor([row[:num_inputs] for row in rows], dtype=torch.int8)


# %% nbgrader={"grade_id": "w4a16_kernel"}
@triton.jit
def w4a16_kernel(
    x, packed, scales, y,  # pointers
    M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    half: tl.constexpr = BLOCK_K // 2
    num_groups = (K - 1) // GROUP + 1
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(0, num_groups):
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(group * GROUP, tl.minimum(K, group * GROUP + GROUP), BLOCK_K):
            b = tl.arange(0, half) + start // 2
            x_there = (rows[:, None] < M) & (2 * b[None, :] < K)
            first = tl.load(x + rows[:, None] * K + 2 * b[None, :], mask=x_there, other=0.0)
            second = tl.load(x + rows[:, None] * K + 2 * b[None, :] + 1, mask=x_there, other=0.0)
            w_there = (outputs[:, None] < N) & (2 * b[None, :] < K)
            byte = tl.load(packed + outputs[:, None] * (K // 2) + b[None, :], mask=w_there, other=136).to(tl.int32)
            part = tl.dot(first, tl.trans((byte % 16 - 8).to(x.dtype.element_ty)), part, input_precision="ieee")
            part = tl.dot(second, tl.trans((byte // 16 - 8).to(x.dtype.element_ty)), part, input_precision="ieee")
        acc += part * tl.load(scales + outputs * num_groups + group, mask=outputs < N, other=0.0)[None, :]
    tl.store(y + rows[:, None] * N + outputs[None, :], acc, mask=(rows[:, None] < M) & (outputs[None, :] < N))


# %% nbgrader={"grade_id": "awq_scale"}
def awq_scale(weight, x, ratios, rounded):
    means = [max(sum(abs(value) for value in column) / len(x), 1e-4) for column in x.T.tolist()]

    def candidate(ratio):
        powers = [mean**ratio for mean in means]
        middle = math.sqrt(max(powers) * min(powers))
        return torch.tensor([power / middle for power in powers], dtype=weight.dtype)

    def error(s):
        return float(torch.linalg.norm(x @ (weight - rounded(weight * s) / s).T))

    return min((candidate(ratio) for ratio in ratios), key=error)


# %% nbgrader={"grade_id": "smooth_scale"}
def smooth_scale(reach, weights, alpha):
    out = torch.empty_like(reach)
    for j in range(len(reach)):
        most = 1e-5
        for weight in weights:
            for value in weight[:, j].tolist():
                most = max(most, abs(value))
        out[j] = max(float(reach[j]), 1e-5) ** alpha / most ** (1 - alpha)
    return out


# %% nbgrader={"grade_id": "fold"}
def fold(norm, weights, s):
    new = []
    for weight in weights:
        weight = weight.clone()
        for j in range(len(s)):
            weight[:, j] *= s[j]
        new.append(weight)
    return torch.stack([norm[j] / s[j] for j in range(len(s))]), tuple(new)


# %% nbgrader={"grade_id": "inverse_factor"}
def inverse_factor(gram, damping):
    n = len(gram)
    damped = gram.clone()
    mean = sum(float(gram[j, j]) for j in range(n)) / n
    for j in range(n):
        damped[j, j] += damping * mean
    inverse = torch.linalg.solve(damped, torch.eye(n, dtype=gram.dtype))
    upper = torch.zeros_like(gram)
    for i in range(n):  # elimination: what is left of the inverse loses one row and column in each turn
        upper[i, i:] = inverse[i, i:] / inverse[i, i].sqrt()
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return upper


# %% nbgrader={"grade_id": "gptq_step"}
def gptq_step(weight, factor, i, rounded):
    columns = [column.clone() for column in weight.T]
    q = rounded(columns[i], i)
    for j in range(i + 1, len(columns)):
        columns[j] = columns[j] - (columns[i] - q) * (factor[i, j] / factor[i, i])
    columns[i] = q
    return torch.stack(columns, 1)


# %% nbgrader={"grade_id": "quantize_kv"}
def quantize_kv(k, v, bits):
    largest_code = (1 << (bits - 1)) - 1
    found = []
    for one in (k, v):
        codes, scales = torch.zeros(one.shape, dtype=torch.int8), torch.ones(one.shape[:2])
        for token in range(one.shape[0]):
            for head in range(one.shape[1]):
                numbers = one[token, head].double()
                largest = float(numbers.abs().max())
                if largest:
                    scales[token, head] = largest / largest_code
                    codes[token, head] = torch.floor(numbers * (largest_code / largest) + 0.5).to(torch.int8)
        found.extend((codes, scales))
    return tuple(found)


# %% nbgrader={"grade_id": "attend_kv"}
def attend_kv(q, k_codes, k_scales, v_codes, v_scales):
    num_heads, head_dim = q.shape
    group = num_heads // k_codes.shape[1]
    out = torch.zeros(num_heads, head_dim)
    for h in range(num_heads):
        kv, largest, total, acc = h // group, -math.inf, 0.0, torch.zeros(head_dim, dtype=torch.float64)
        for token in range(len(k_codes)):
            score = float(q[h].double() @ k_codes[token, kv].double()) * float(k_scales[token, kv]) / head_dim**0.5
            new = max(largest, score)
            shrink, weight = math.exp(largest - new), math.exp(score - new)
            total = total * shrink + weight
            acc = acc * shrink + weight * float(v_scales[token, kv]) * v_codes[token, kv].double()
            largest = new
        out[h] = acc / total
    return out
