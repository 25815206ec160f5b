# fault: subtracts the first score, so that exp overflows where another is 89 larger.
# fails: check_softmax_kernel

# %% nbgrader={"grade_id": "softmax_kernel"}
@triton.jit
def softmax_kernel(scores, lengths, out, num_columns, BLOCK: tl.constexpr):
    """The softmax of row program_id(0) of scores [num_rows, num_columns] over its first lengths[row] columns."""
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    length = tl.load(lengths + row)
    at = row * num_columns + columns
    score = tl.load(scores + at, mask=columns < length, other=float("-inf"))
    base = tl.where(length > 0, tl.sum(tl.where(columns == 0, score, 0.0), 0), 0.0)  # of no column: exp(-inf - 0) = 0
    weight = tl.exp(score - base)
    total = tl.where(length > 0, tl.sum(weight, 0), 1.0)
    tl.store(out + at, weight / total, mask=columns < num_columns)
