# fault: subtracts the largest score also while it is minus infinity.
# trap: nothing minus nothing
# fails: check_online_empty

# %% nbgrader={"grade_id": "online_softmax"}
def online_softmax(stream):
    """(largest, total, mean) over all chunks (scores [n], values [n, head_dim]) of the stream."""
    largest, total, acc = -math.inf, 0.0, 0.0
    for scores, values in stream:
        new = max([largest, *scores.tolist()])
        weights, shrink = torch.exp(scores - new), float(torch.exp(torch.tensor(largest) - new))
        total = total * shrink + float(weights.sum())
        acc = acc * shrink + weights @ values
        largest = new
    return largest, total, acc / total if total else acc
