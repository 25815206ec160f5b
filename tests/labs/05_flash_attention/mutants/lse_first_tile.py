# fault: stops after the first tile.
# fails: check_lse_kernel

# %% nbgrader={"grade_id": "lse_kernel"}
@triton.jit
def lse_kernel(scores, out, num_columns, BLOCK: tl.constexpr):
    """The log-sum-exp of row program_id(0) of scores [num_rows, num_columns], in tiles of BLOCK columns."""
    row, lane = tl.program_id(0), tl.arange(0, 1)
    largest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, BLOCK, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        score = tl.load(scores + row * num_columns + columns, mask=columns < num_columns, other=float("-inf"))
        new = tl.maximum(largest, tl.max(score, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(score - base), 0)
        largest = new
    tl.store(out + row + lane, largest + tl.log(total))
