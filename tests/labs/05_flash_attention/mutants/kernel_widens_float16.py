# fault: float16 is widened to float32 before it is multiplied, without tensor cores.
# fails: check_compiles

# %% nbgrader={"grade_id": "flash_kernel"}
@triton.jit
def flash_kernel(
    q, k, v, o, lse,  # pointers
    q_len, kv_len, first, scale,
    q_stride, kv_stride,  # from one token to the next
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head: program (tile of queries, head)."""
    start, head = tl.program_id(0) * BLOCK_M, tl.program_id(1)
    m, d = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    at_q = m[:, None] * q_stride + head * HEAD_DIM + d[None, :]
    in_q = (m < q_len)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + at_q, mask=in_q, other=0.0).to(tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.minimum(kv_len, first + tl.minimum(q_len, start + BLOCK_M))  # no query of the tile sees a later key
    for n_start in range(0, end, BLOCK_N):
        n = n_start + tl.arange(0, BLOCK_N)
        at_kv = n[:, None] * kv_stride + head // GROUP * HEAD_DIM + d[None, :]
        in_kv = (n < kv_len)[:, None] & (d < HEAD_DIM)[None, :]
        key = tl.load(k + at_kv, mask=in_kv, other=0.0).to(tl.float32)
        value = tl.load(v + at_kv, mask=in_kv, other=0.0).to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        visible = (n < kv_len)[None, :] & (n[None, :] <= first + m[:, None])
        score = tl.where(visible, score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet: exp(-inf - 0) = 0
        weight, shrink = tl.exp(score - base[:, None]), tl.exp(largest - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        largest = new
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(o + at_q, (acc / divisor[:, None]).to(o.dtype.element_ty), mask=in_q)
    at_lse = head * q_len + m  # of the natural logarithm
    tl.store(lse + at_lse, largest + tl.log(divisor), mask=m < q_len)
