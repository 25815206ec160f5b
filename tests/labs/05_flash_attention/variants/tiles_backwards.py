# A kernel that goes through the tiles of keys backwards, with its loads in kernels of their own. Chunks are kept as
# weighted sums of their own and put together at the end, tiles as splits that are merged.

# %% nbgrader={"grade_id": "online_softmax"}
def online_softmax(stream):
    tops, totals, sums = [], [], []
    for scores, values in stream:
        top = scores.max() if len(scores) else torch.tensor(-math.inf)
        weights = (scores - top).nan_to_num(nan=-math.inf).exp()
        tops.append(top)
        totals.append(weights.sum())
        sums.append(weights @ values)
    tops, totals, sums = torch.stack(tops), torch.stack(totals), torch.stack(sums)
    top = tops.max()
    shrink = torch.where(tops > -math.inf, torch.exp(tops - top), 0.0)
    total = (shrink * totals).sum()
    return top.item(), total.item(), (shrink @ sums) / total.clamp(min=1e-30)


# %% nbgrader={"grade_id": "tiled_attention"}
def tiled_attention(hbm, q_len, kv_len, num_heads, num_kv_heads, block_m, block_n, first):
    def count(rows, block):
        return (rows + block - 1) // block

    heads_of = torch.arange(num_heads).view(num_kv_heads, -1).tolist()
    for i in reversed(range(count(q_len, block_m))):
        for kv_head, heads in enumerate(heads_of):
            q = torch.stack([hbm.load("q", head, i) for head in heads], 1)  # [rows, group, head_dim]
            rows = torch.arange(i * block_m, i * block_m + len(q))
            means, lse = [], []
            for j in range(count(min(kv_len, first + int(rows[-1]) + 1), block_n)):
                k, v = (hbm.load(name, kv_head, j) for name in "kv")
                s = torch.einsum("mgd,nd->gmn", q, k) * q.shape[-1] ** -0.5
                late = torch.arange(j * block_n, j * block_n + len(k)) > (rows + first)[:, None]
                s[:, late] = -math.inf
                lse.append(s.logsumexp(-1))
                means.append(torch.einsum("gmn,nd->mgd", s.softmax(-1), v).nan_to_num(nan=0.0))
            lse = torch.stack(lse)
            share = (lse - lse.logsumexp(0)).exp()
            o = torch.einsum("sgm,smgd->gmd", share, torch.stack(means))
            for head, tile in zip(heads, o, strict=True):
                hbm.store("o", head, i, tile)


# %% nbgrader={"grade_id": "merge_splits"}
def merge_splits(means, lse):
    num_splits, q_len, num_heads, _ = means.shape
    o, out = torch.zeros_like(means[0]), torch.full_like(lse[0], -math.inf)
    for i in range(q_len):
        for h in range(num_heads):
            there = [s for s in range(num_splits) if lse[s, h, i] != -math.inf]
            if not there:
                continue
            out[h, i] = torch.logsumexp(lse[there, h, i], 0)
            o[i, h] = torch.softmax(lse[there, h, i], 0) @ means[there, i, h]
    return o, out


# %% nbgrader={"grade_id": "flash_kernel"}
@triton.jit
def place(rows, stride, head, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    return rows[:, None] * stride + head * HEAD_DIM + tl.arange(0, D)[None, :]


@triton.jit
def there(rows, limit, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    return (rows < limit)[:, None] & (tl.arange(0, D) < HEAD_DIM)[None, :]


@triton.jit
def tile_of(x, rows, limit, stride, head, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    return tl.load(x + place(rows, stride, head, HEAD_DIM, D), mask=there(rows, limit, HEAD_DIM, D), other=0.0)


@triton.jit
def flash_kernel(
    q, k, v, o, lse, q_len, kv_len, first, scale, q_stride, kv_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    limit = tl.minimum(first + row + 1, kv_len)  # keys that each query sees
    query = tile_of(q, row, q_len, q_stride, head, HEAD_DIM, BLOCK_D)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    most = tl.max(tl.where(row < q_len, limit, 0), 0)
    num_tiles = tl.cdiv(tl.maximum(most, 0), BLOCK_N)
    for back in range(0, num_tiles):  # the last tile first
        n = (num_tiles - 1 - back) * BLOCK_N + tl.arange(0, BLOCK_N)
        key = tile_of(k, n, kv_len, kv_stride, head // GROUP, HEAD_DIM, BLOCK_D)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(n[None, :] < limit[:, None], score, float("-inf"))
        best = tl.maximum(top, tl.max(score, 1))
        base = tl.where(best > float("-inf"), best, 0.0)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(top - base)
        value = tile_of(v, n, kv_len, kv_stride, head // GROUP, HEAD_DIM, BLOCK_D)
        total = tl.fma(total, shrink, tl.sum(weight, 1))
        acc = acc * shrink[:, None]
        acc += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = best
    acc = acc / tl.where(limit > 0, total, 1.0)[:, None]
    tl.store(o + place(row, q_stride, head, HEAD_DIM, BLOCK_D), acc.to(o.dtype.element_ty),
             mask=there(row, q_len, HEAD_DIM, BLOCK_D))  # fmt: skip
    tl.store(lse + head * q_len + row, tl.where(limit > 0, top + tl.log(total), float("-inf")), mask=row < q_len)
