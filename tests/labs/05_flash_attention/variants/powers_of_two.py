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


# %% nbgrader={"grade_id": "attention"}
import triton
import triton.language as tl


@triton.jit
def packed_kernel(
    q, k, v, o, lse, q_len, kv_len, first, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    packed = tl.program_id(0) * M + tl.arange(0, M)  # token after token, the heads of the group side by side
    token, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    d = tl.arange(0, D)
    at = (token * KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + d[None, :]
    valid = (token < q_len)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + at, mask=valid, other=0.0)
    keys = tl.make_block_ptr(
        k + kv_head * HEAD_DIM, (HEAD_DIM, kv_len), (1, KV_HEADS * HEAD_DIM), (0, 0), (D, N), (0, 1)
    )
    values = tl.make_block_ptr(
        v + kv_head * HEAD_DIM, (kv_len, HEAD_DIM), (KV_HEADS * HEAD_DIM, 1), (0, 0), (N, D), (1, 0)
    )
    top = tl.full([M], -1e30, tl.float32)  # finite, so that nothing is NaN; masked weights are set to 0
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for start in range(0, kv_len, N):
        key = tl.load(keys, boundary_check=(0, 1), padding_option="zero")
        value = tl.load(values, boundary_check=(0, 1), padding_option="zero")
        n = start + tl.arange(0, N)[None, :]
        visible = (n < kv_len) & (n - token[:, None] <= first)
        score = tl.where(visible, tl.dot(query, key, input_precision="ieee") * scale * 1.4426950408889634, -1e30)
        new = tl.maximum(top, tl.max(score, 1))
        weight = tl.where(visible, tl.exp2(score - new[:, None]), 0.0)
        shrink = tl.exp2(top - new)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        top = new
        keys, values = tl.advance(keys, (0, N)), tl.advance(values, (N, 0))
    found = total > 0
    acc = tl.where(found[:, None], acc / total[:, None], 0.0)
    tl.store(o + at, acc.to(o.dtype.element_ty), mask=valid)
    natural = tl.where(found, (top + tl.log2(total)) / 1.4426950408889634, float("-inf"))
    tl.store(lse + head * q_len + token, natural, mask=token < q_len)


def attention(q, k, v, first):
    allowed = {torch.float16, torch.float32}
    if {q.dtype, k.dtype, v.dtype} - allowed:
        raise TypeError("float16 or float32")
    q_len, num_heads, head_dim = q.shape
    kv_len, num_kv_heads = k.shape[:2]
    group = num_heads // num_kv_heads
    o, lse = torch.empty_like(q), torch.empty((num_heads, q_len), dtype=torch.float32, device=q.device)
    packed_kernel[triton.cdiv(q_len * group, 32), num_kv_heads](
        q, k, v, o, lse, q_len, kv_len, first, head_dim**-0.5, num_kv_heads, group, head_dim,
        max(16, triton.next_power_of_2(head_dim)), 32, 32,
    )  # fmt: skip
    return o, lse
