# Key by key in plain Python; merging two splits at a time by their logarithms; a kernel that
# multiplies and sums without tl.dot.

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
        o[here] = o[here] * old.expand_as(o)[here] + mean[here] * new.expand_as(o)[here]
        whole = both
    return o, whole


# %% nbgrader={"grade_id": "attention"}
import triton
import triton.language as tl


@triton.jit
def flash_kernel(
    q, k, v, o, lse, q_len, kv_len, first, scale, num_heads, num_kv_heads,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < q_len)[:, None] & (column < HEAD_DIM)[None, :]
    places = (row * num_heads + head)[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(q + places, mask=inside, other=0.0).to(tl.float32) * scale
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, WIDTH], tl.float32)
    kv_head = head // (num_heads // num_kv_heads)
    last = tl.minimum(kv_len - 1, first + tl.program_id(0) * ROWS + ROWS - 1)
    for start in range(0, last + 1, KEYS):
        n = start + tl.arange(0, KEYS)
        at = ((n * num_kv_heads + kv_head) * HEAD_DIM)[:, None] + column[None, :]
        there = (n < kv_len)[:, None] & (column < HEAD_DIM)[None, :]
        key = tl.load(k + at, mask=there, other=0.0).to(tl.float32)
        value = tl.load(v + at, mask=there, other=0.0).to(tl.float32)
        sees = (n < kv_len)[None, :] & (n[None, :] <= (first + row)[:, None])
        score = tl.where(sees, tl.sum(query[:, None, :] * key[None, :, :], 2), float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        shrink = tl.where(weight > 0, tl.exp(top - new), 0.0)
        mine = tl.where(sees, tl.exp(score - new[:, None]), 0.0)
        weight = weight * shrink + tl.sum(mine, 1)
        mean = mean * shrink[:, None] + tl.sum(mine[:, :, None] * value[None, :, :], 1)
        top = new
    some = weight > 0
    mean = tl.where(some[:, None], mean / weight[:, None], 0.0)
    tl.store(o + places, mean.to(o.dtype.element_ty), mask=inside)
    tl.store(lse + head * q_len + row, tl.where(some, top + tl.log(weight), float("-inf")), mask=row < q_len)


def attention(q, k, v, first):
    if q.dtype == torch.float32 or q.dtype == torch.float16:
        (q_len, num_heads, head_dim), (kv_len, num_kv_heads, _) = q.shape, k.shape
        o, lse = torch.zeros_like(q), q.new_zeros((num_heads, q_len), dtype=torch.float32)
        flash_kernel[((q_len + 31) // 32, num_heads)](
            q, k, v, o, lse, q_len, kv_len, first, head_dim**-0.5, num_heads, num_kv_heads,
            HEAD_DIM=head_dim, ROWS=32, KEYS=32, WIDTH=triton.next_power_of_2(head_dim),
        )  # fmt: skip
        return o, lse
    raise TypeError(f"{q.dtype} is not computed here")
