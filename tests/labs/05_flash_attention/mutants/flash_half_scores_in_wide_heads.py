# fault: where head_dim is above 64 and a tile has 64 keys, scores are rounded to the dtype of q.
# fails: check_half, check_compiles

# %% nbgrader={"grade_id": "flash_kernel"}
@triton.jit
def flash_kernel(
    q,
    k,
    v,
    o,
    lse,
    q_len,
    kv_len,
    first,
    scale,
    q_stride,
    kv_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t, h = tl.program_id(0), tl.program_id(1)
    i, d = t * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    qa = i[:, None] * q_stride + h * HEAD_DIM + d[None, :]
    qm = (i < q_len)[:, None] & (d < HEAD_DIM)[None, :]
    Q = tl.load(q + qa, mask=qm, other=0.0).to(tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = first + (t + 1) * BLOCK_M
    if first + q_len < end:
        end = first + q_len
    if kv_len < end:
        end = kv_len
    for start in range(0, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        ka = j[:, None] * kv_stride + (h // GROUP) * HEAD_DIM + d[None, :]
        km = (j < kv_len)[:, None] & (d < HEAD_DIM)[None, :]
        K = tl.load(k + ka, mask=km, other=0.0).to(tl.float32)
        V = tl.load(v + ka, mask=km, other=0.0).to(tl.float32)
        s = tl.dot(Q, tl.trans(K), input_precision="ieee") * scale
        if (HEAD_DIM > 64) & (BLOCK_N >= 64):
            s = s.to(q.dtype.element_ty).to(tl.float32)
        s = tl.where((j[None, :] <= first + i[:, None]) & (j < kv_len)[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        f = tl.exp(m - safe)
        w = tl.exp(s - safe[:, None])
        total = total * f + tl.sum(w, 1)
        acc = acc * f[:, None] + tl.dot(w, V, input_precision="ieee")
        m = new
    some = total > 0.0
    den = tl.where(some, total, 1.0)
    tl.store(o + qa, (acc / den[:, None]).to(o.dtype.element_ty), mask=qm)
    tl.store(lse + h * q_len + i, tl.where(some, m + tl.log(den), float("-inf")), mask=i < q_len)
