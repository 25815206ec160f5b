# fault: the largest score begins at minus a billion, and stays there where all are lower.
# fails: check_online_huge

# %% nbgrader={"grade_id": "online_softmax"}
def online_softmax(stream):
    """(largest, total, mean) over all chunks (scores [n], values [n, head_dim]) of the stream."""
    largest, total, acc = -1e9, 0.0, 0.0
    for scores, values in stream:
        new = max([largest, *scores.tolist()])
        base = new if new > -math.inf else 0.0  # of no key: exp(-inf - 0) = 0
        weights, shrink = torch.exp(scores - base), math.exp(largest - base)
        total = total * shrink + float(weights.sum())
        acc = acc * shrink + weights @ values
        largest = new
    return largest if total else -math.inf, total, acc / total if total else acc
