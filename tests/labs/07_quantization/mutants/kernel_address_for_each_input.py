# fault: an address for each input, so that each byte is loaded for both of its codes.
# fails: check_loads

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
        i = start + tl.arange(0, BLOCK_K)
        in_x = (m < M)[:, None] & (i < K)[None, :]
        tile = tl.load(x + m[:, None] * K + i[None, :], mask=in_x, other=0.0)
        in_w = (i < K)[:, None] & (n < N)[None, :]
        pair = tl.load(packed + n[None, :] * num_bytes + i[:, None] // 2, mask=in_w, other=0).to(tl.int32)
        code = ((pair >> (i % 2 * 4)[:, None]) & 15) - 8
        part = tl.dot(tile, code.to(tile.dtype), input_precision="ieee")
        scale = tl.load(scales + n * num_groups + start // GROUP, mask=n < N, other=0.0)
        acc += part * scale[None, :]
    tl.store(y + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])
