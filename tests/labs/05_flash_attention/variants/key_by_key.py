# Key by key in plain Python; merging two splits at a time by their logarithms; small kernels that multiply and sum
# without tl.dot; a kernel with tiles of its own.

# %% nbgrader={"grade_id": "online_softmax"}
def online_softmax(stream):
    top, weight, mean = float("-inf"), 0.0, None
    for scores, values in stream:
        mean = [0.0] * values.shape[1] if mean is None else mean
        for score, value in zip(scores.tolist(), values.tolist(), strict=True):
            if score == float("-inf"):
                continue
            old = weight * math.exp(top - score) if score > top else weight
            new = 1.0 if score > top else math.exp(score - top)
            top, weight = max(top, score), old + new
            mean = [m + (x - m) * new / weight for m, x in zip(mean, value, strict=True)]  # a running mean
    return top, weight, torch.tensor(mean)


# %% nbgrader={"grade_id": "tiled_attention"}
def tiled_attention(hbm, q_len, kv_len, num_heads, num_kv_heads, block_m, block_n, first):
    group = num_heads // num_kv_heads
    for i in range(0, q_len, block_m):
        last = min(i + block_m, q_len) - 1
        for g in range(num_kv_heads):
            queries = [hbm.load("q", g * group + h, i // block_m) for h in range(group)]
            state = {}
            for j in range(0, min(kv_len, first + last + 1), block_n):
                keys, values = hbm.load("k", g, j // block_n), hbm.load("v", g, j // block_n)
                for h in range(group):
                    for r, query in enumerate(queries[h]):
                        for c in range(len(keys)):
                            if j + c > first + i + r:
                                break
                            score = float(query @ keys[c]) * query.shape[0] ** -0.5
                            top, weight, total = state.get((h, r), (score, 0.0, 0.0))
                            new = max(top, score)
                            shrink, mine = math.exp(top - new), math.exp(score - new)
                            state[h, r] = new, weight * shrink + mine, total * shrink + mine * values[c]
            for h in range(group):
                rows = [state[h, r][2] / state[h, r][1] for r in range(len(queries[h]))]
                hbm.store("o", g * group + h, i // block_m, torch.stack(rows))


# %% nbgrader={"grade_id": "merge_splits"}
def merge_splits(means, lse):
    o, whole = means[0].clone(), lse[0].clone()
    o[(whole == -math.inf).T] = 0.0
    for mean, part in zip(means[1:], lse[1:], strict=True):
        both = torch.logaddexp(whole, part)
        here = (part > -math.inf).T
        old, new = (torch.exp(x - both).T[..., None] for x in (whole, part))
        old, new = old / (old + new), new / (old + new)  # far below 0 `both` is rounded by more than a logarithm
        o[here] = o[here] * old.expand_as(o)[here] + mean[here] * new.expand_as(o)[here]
        whole = both
    return o, whole


# %% nbgrader={"grade_id": "softmax_kernel"}
@triton.jit
def softmax_kernel(scores, lengths, out, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    scores += row * num_columns
    out += row * num_columns
    column = tl.arange(0, BLOCK)
    visible = column < tl.load(lengths + row)
    score = tl.load(scores + column, mask=visible, other=0.0)  # as 0, and hidden by where
    largest = tl.max(tl.where(visible, score, -1e30), 0)
    weight = tl.where(visible, tl.exp(score - largest), 0.0)
    tl.store(out + column, weight / tl.maximum(tl.sum(weight, 0), 1e-30), mask=column < num_columns)


# %% nbgrader={"grade_id": "lse_kernel"}
@triton.jit
def lse_kernel(scores, out, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)  # a state for each lane, put together at the end
    sums = tl.zeros([BLOCK], tl.float32)
    for tile in range(tl.cdiv(num_columns, BLOCK)):
        column = tile * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(scores + row * num_columns + column, mask=column < num_columns, other=float("-inf"))
        new = tl.maximum(tops, score)
        sums = tl.where(tops > float("-inf"), sums * tl.exp(tops - new), 0.0) + tl.where(
            score > float("-inf"), tl.exp(score - new), 0.0
        )
        tops = new
    top = tl.max(tops, 0)
    total = tl.sum(tl.where(tops > float("-inf"), sums * tl.exp(tops - top), 0.0), 0)
    tl.store(out + row, top + tl.log(total))


# %% nbgrader={"grade_id": "tile_kernel"}
@triton.jit
def tile_kernel(
    q, k, v, o, q_len, kv_len, first, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_D)[None, :]
    row, key_row = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[:, None]
    query = tl.load(q + row * HEAD_DIM + column, mask=(row < q_len) & (column < HEAD_DIM), other=0.0)
    there = (key_row < kv_len) & (column < HEAD_DIM)
    key = tl.load(k + key_row * HEAD_DIM + column, mask=there, other=0.0)
    value = tl.load(v + key_row * HEAD_DIM + column, mask=there, other=0.0)
    n = tl.arange(0, BLOCK_N)[None, :]
    sees = (n < kv_len) & (n <= first + row)
    score = tl.where(sees, tl.sum(query[:, None, :] * key[None, :, :], 2) * scale, -1e30)
    weight = tl.where(sees, tl.exp(score - tl.max(score, 1, keep_dims=True)), 0.0)
    total = tl.sum(weight, 1, keep_dims=True)  # divided by here: of the plain sum the compiler makes a tl.dot, in TF32
    mean = tl.sum(weight[:, :, None] * value[None, :, :] / total[:, :, None], 1)
    tl.store(o + row * HEAD_DIM + column, mean, mask=(row < q_len) & (column < HEAD_DIM))


# %% nbgrader={"grade_id": "flash_kernel"}
@triton.jit
def flash_kernel(
    q, k, v, o, lse, q_len, kv_len, first, scale, q_stride, kv_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    KEYS: tl.constexpr = 16  # whatever the launch says: the products of a tile lie side by side
    head = tl.program_id(1)
    row, column = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    inside = (row < q_len)[:, None] & (column < HEAD_DIM)[None, :]
    places = (row * q_stride + head * HEAD_DIM)[:, None] + column[None, :]
    query = tl.load(q + places, mask=inside, other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last = tl.minimum(kv_len, first + tl.minimum(q_len, tl.program_id(0) * BLOCK_M + BLOCK_M)) - 1
    for start in range(0, last + 1, KEYS):
        n = start + tl.arange(0, KEYS)
        at = (n * kv_stride + (head // GROUP) * HEAD_DIM)[:, None] + column[None, :]
        there = (n <= last)[:, None] & (column < HEAD_DIM)[None, :]
        key = tl.load(k + at, mask=there, other=0.0)
        value = tl.load(v + at, mask=there, other=0.0)
        sees = (n < kv_len)[None, :] & (n[None, :] <= (first + row)[:, None])
        score = tl.where(sees, tl.dot(query, tl.trans(key), input_precision="ieee") * scale, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        shrink = tl.where(weight > 0, tl.exp(top - new), 0.0)
        mine = tl.where(sees, tl.exp(score - new[:, None]), 0.0)
        weight = weight * shrink + tl.sum(mine, 1)
        mean = mean * shrink[:, None] + tl.dot(mine.to(value.dtype), value, input_precision="ieee")
        top = new
    some = weight > 0
    mean = tl.where(some[:, None], mean / weight[:, None], 0.0)
    tl.store(o + places, mean.to(o.dtype.element_ty), mask=inside)
    tl.store(lse + head * q_len + row, tl.where(some, top + tl.log(weight), float("-inf")), mask=row < q_len)
