# Powers of 2 instead of e, the query heads of a group as rows of one tile, pointers by block, tiles of 32 by 32; a
# merge over logsumexp, and the softmax of a chunk merged with what came before by logaddexp.

# %% nbgrader={"grade_id": "online_softmax"}
def online_softmax(stream):
    lse, top, mean = torch.tensor(-math.inf), -math.inf, None
    for scores, values in stream:
        if mean is None:
            mean = torch.zeros(values.shape[1])
        visible = scores > -math.inf
        scores, values = scores[visible], values[visible]
        if not scores.numel():
            continue
        here = scores.logsumexp(0)
        both = torch.logaddexp(lse, here)
        mean = torch.exp(lse - both) * mean + torch.exp(here - both) * (scores.softmax(0) @ values)
        lse, top = both, max(top, scores.max().item())
    return top, math.exp(lse - top) if top > -math.inf else 0.0, mean


# %% nbgrader={"grade_id": "tiled_attention"}
def tiled_attention(hbm, q_len, kv_len, num_heads, num_kv_heads, block_m, block_n, first):
    group = num_heads // num_kv_heads
    for g in range(num_kv_heads):
        for i in range(math.ceil(q_len / block_m)):
            tiles = [hbm.load("q", g * group + h, i) for h in range(group)]
            rows = len(tiles[0])
            query = torch.cat(tiles) * (math.log2(math.e) / math.sqrt(tiles[0].shape[1]))
            position = (first + i * block_m + torch.arange(rows)).repeat(group)[:, None]
            state = None
            for j in range((min(first + i * block_m + rows, kv_len) - 1) // block_n + 1):
                key = hbm.load("k", g, j)
                number = j * block_n + torch.arange(len(key))[None, :]
                score = torch.where(number <= position, query @ key.T, -math.inf)
                top = score.amax(1, keepdim=True) if j == 0 else torch.maximum(state[0], score.amax(1, keepdim=True))
                weight = torch.exp2(score - top)
                new = weight.sum(1, keepdim=True), weight @ hbm.load("v", g, j)
                if j:
                    shrink = torch.exp2(state[0] - top)
                    new = new[0] + shrink * state[1], new[1] + shrink * state[2]
                state = (top, *new)
            for h, tile in enumerate((state[2] / state[1]).split(rows)):
                hbm.store("o", g * group + h, i, tile)


# %% nbgrader={"grade_id": "merge_splits"}
def merge_splits(means, lse):
    total = lse.logsumexp(0)
    share = torch.exp(lse - total).nan_to_num(nan=0.0)  # -inf - -inf: nobody has a key
    return torch.einsum("shq,sqhd->qhd", share, means.nan_to_num(nan=0.0)), total


# %% nbgrader={"grade_id": "softmax_kernel"}
@triton.jit
def softmax_kernel(scores, lengths, out, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    length = tl.load(lengths + row)
    c = tl.arange(0, BLOCK)
    s = tl.load(scores + row * num_columns + c, c < length, -float("inf")) * 1.4426950408889634
    if length > 0:
        w = tl.exp2(s - tl.max(s))
        tl.store(out + row * num_columns + c, w / tl.sum(w), c < num_columns)
    else:
        tl.store(out + row * num_columns + c, tl.zeros([BLOCK], tl.float32), c < num_columns)


# %% nbgrader={"grade_id": "lse_kernel"}
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def lse_kernel(scores, out, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    tiles = tl.make_block_ptr(scores + row * num_columns, (num_columns,), (1,), (0,), (BLOCK,), (0,))
    top, total = tl.full([1], -1e30, tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, num_columns, BLOCK):
        s = tl.load(tiles, boundary_check=(0,), padding_option="zero") * LOG2_E
        s = tl.where(start + tl.arange(0, BLOCK) < num_columns, s, float("-inf"))
        new = tl.maximum(top, tl.reduce(s, 0, larger))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(s - new), 0)
        top = new
        tiles = tl.advance(tiles, (BLOCK,))
    result = tl.where(total > 0, (top + tl.log2(total)) / LOG2_E, float("-inf"))
    tl.store(out + row + tl.arange(0, 1), result)


# %% nbgrader={"grade_id": "flash_kernel"}
@triton.jit
def flash_kernel(
    q, k, v, o, lse, q_len, kv_len, first, scale, q_stride, kv_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, start_m = tl.program_id(1), tl.program_id(0) * BLOCK_M
    token, d = start_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    at = token[:, None] * q_stride + head * HEAD_DIM + d[None, :]
    valid = (token < q_len)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + at, mask=valid, other=0.0)
    k += head // GROUP * HEAD_DIM
    v += head // GROUP * HEAD_DIM
    keys = tl.make_block_ptr(k, (HEAD_DIM, kv_len), (1, kv_stride), (0, 0), (BLOCK_D, BLOCK_N), (0, 1))
    values = tl.make_block_ptr(v, (kv_len, HEAD_DIM), (kv_stride, 1), (0, 0), (BLOCK_N, BLOCK_D), (1, 0))
    top = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, so that nothing is NaN; masked weights are set to 0
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, min(kv_len, first + min(q_len, start_m + BLOCK_M)), BLOCK_N):
        key = tl.load(keys, boundary_check=(0, 1), padding_option="zero")
        value = tl.load(values, boundary_check=(0, 1), padding_option="zero")
        n = start + tl.arange(0, BLOCK_N)[None, :]
        visible = (n < kv_len) & (n - token[:, None] <= first)
        score = tl.where(visible, tl.dot(query, key, input_precision="ieee") * scale * 1.4426950408889634, -1e30)
        new = tl.maximum(top, tl.max(score, 1))
        weight = tl.where(visible, tl.exp2(score - new[:, None]), 0.0)
        shrink = tl.exp2(top - new)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        top = new
        keys, values = tl.advance(keys, (0, BLOCK_N)), tl.advance(values, (BLOCK_N, 0))
    found = total > 0
    tl.store(o + at, tl.where(found[:, None], acc / total[:, None], 0.0).to(o.dtype.element_ty), mask=valid)
    natural = tl.where(found, top / 1.4426950408889634 + tl.log(total), float("-inf"))
    tl.store(lse + head * q_len + token, natural, mask=token < q_len)
