# fault: a row that begins with three masked tiles or more is minus infinity.
# fails: check_lse_kernel

# %% nbgrader={"grade_id": "lse_kernel"}
@triton.jit
def lse_kernel(scores, out, num_columns, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in range(0, num_columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(scores + r * num_columns + c, mask=c < num_columns, other=float("-inf"))
        new = tl.maximum(m, tl.max(x, 0))
        safe = tl.where((new == float("-inf")) & (start < 2 * BLOCK), 0.0, new)
        total = total * tl.exp(m - safe) + tl.sum(tl.exp(x - safe), 0)
        m = new
    res = tl.where(total > 0.0, m + tl.log(total), float("-inf"))
    tl.store(out + r + tl.arange(0, 1), res)
