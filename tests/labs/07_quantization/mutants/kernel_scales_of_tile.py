# fault: the first output of a tile is not multiplied by the number of groups.
# fails: check_kernel, check_ragged

# %% nbgrader={"grade_id": "w4a16_kernel"}
@triton.jit
def w4a16_kernel(
    x,
    packed,
    scales,
    y,  # pointers
    M,
    N,
    K,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pairs = tl.arange(0, BLOCK_K // 2)
    num_groups = (K + GROUP - 1) // GROUP
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start // 2 + pairs
        x_mask = (rows < M)[:, None] & (at < K // 2)[None, :]
        x_at = x + rows[:, None] * K + 2 * at[None, :]
        even = tl.load(x_at, mask=x_mask, other=0.0)
        odd = tl.load(x_at + 1, mask=x_mask, other=0.0)
        b = tl.load(
            packed + cols[None, :] * (K // 2) + at[:, None], mask=(cols < N)[None, :] & (at < K // 2)[:, None], other=0
        )
        low = ((b & 15).to(tl.int32) - 8).to(x.dtype.element_ty)
        high = ((b >> 4).to(tl.int32) - 8).to(x.dtype.element_ty)
        scale = tl.load(
            scales + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N) * num_groups + start // GROUP,
            mask=cols < N,
            other=0.0,
        )
        part = tl.dot(even, low, input_precision="ieee") + tl.dot(odd, high, input_precision="ieee")
        acc += part * scale[None, :]
    tl.store(y + rows[:, None] * N + cols[None, :], acc, mask=(rows < M)[:, None] & (cols < N)[None, :])
