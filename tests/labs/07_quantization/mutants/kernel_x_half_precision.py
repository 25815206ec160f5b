# fault: x is rounded to float16.
# fails: check_kernel, check_ragged, check_loads, check_engine_weights, check_compiles

# %% nbgrader={"grade_id": "w4a16_kernel"}
@triton.jit
def w4a16_kernel(
    x, packed, scales, y,  # pointers
    M, N, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of y = x W^T, with W in 4 bits: program (tile of rows, tile of columns)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    num_bytes, num_groups = K // 2, (K + GROUP - 1) // GROUP
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)
        at_x = m[:, None] * K + 2 * byte[None, :]
        in_x = (m < M)[:, None] & (byte < num_bytes)[None, :]
        even = tl.load(x + at_x, mask=in_x, other=0.0).to(tl.float16)
        odd = tl.load(x + at_x + 1, mask=in_x, other=0.0).to(tl.float16)
        in_w = (byte < num_bytes)[:, None] & (n < N)[None, :]
        pair = tl.load(packed + n[None, :] * num_bytes + byte[:, None], mask=in_w, other=0).to(tl.int32)
        low = ((pair & 15) - 8).to(even.dtype)
        high = ((pair >> 4) - 8).to(even.dtype)
        part = tl.dot(even, low, input_precision="ieee") + tl.dot(odd, high, input_precision="ieee")
        scale = tl.load(scales + n * num_groups + start // GROUP, mask=n < N, other=0.0)
        acc += part * scale[None, :]
    tl.store(y + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])
