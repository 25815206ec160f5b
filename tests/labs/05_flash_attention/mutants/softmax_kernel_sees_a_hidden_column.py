# fault: where the columns fill the tile, the largest score may be that of the first hidden column.
# fails: check_softmax_kernel

# %% nbgrader={"grade_id": "softmax_kernel"}
@triton.jit
def softmax_kernel(scores, lengths, out, num_columns, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    n = tl.load(lengths + r)
    x = tl.load(
        scores + r * num_columns + c,
        mask=(c < n) | ((num_columns == BLOCK) & (c < n + 1) & (n > BLOCK // 2) & (c < num_columns)),
        other=float("-inf"),
    )
    m = tl.max(x, 0)
    m = tl.where(m == float("-inf"), 0.0, m)
    e = tl.where(c < n, tl.exp(x - m), 0.0)
    s = tl.sum(e, 0)
    tl.store(out + r * num_columns + c, e / tl.where(s == 0.0, 1.0, s), mask=c < num_columns)
