# fault: the small kernel rounds weights and values to TF32.
# fails: check_compiles

# %% nbgrader={"grade_id": "tile_kernel"}
@triton.jit
def tile_kernel(
    q, k, v, o,  # pointers
    q_len, kv_len, first, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Causal attention of one head: all queries in one tile, all keys in one tile, one program."""
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    at_q, at_kv = m[:, None] * HEAD_DIM + d[None, :], n[:, None] * HEAD_DIM + d[None, :]
    in_q = (m < q_len)[:, None] & (d < HEAD_DIM)[None, :]
    in_kv = (n < kv_len)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + at_q, mask=in_q, other=0.0)
    key, value = tl.load(k + at_kv, mask=in_kv, other=0.0), tl.load(v + at_kv, mask=in_kv, other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    visible = (n < kv_len)[None, :] & (n[None, :] <= first + m[:, None])
    score = tl.where(visible, score, float("-inf"))
    weight = tl.exp(score - tl.max(score, 1)[:, None])
    out = tl.dot(weight, value) / tl.sum(weight, 1)[:, None]
    tl.store(o + at_q, out, mask=in_q)
