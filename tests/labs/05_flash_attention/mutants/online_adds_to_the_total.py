# fault: divides by the total and a little more, lest it be 0.
# fails: check_online, check_online_empty

# %% nbgrader={"grade_id": "online_softmax"}
def online_softmax(stream):
    """(largest, total, mean) over all chunks (scores [n], values [n, head_dim]) of the stream."""
    largest, total, acc = -math.inf, 0.0, 0.0
    for scores, values in stream:
        new = max([largest, *scores.tolist()])
        base = new if new > -math.inf else 0.0  # of no key: exp(-inf - 0) = 0
        weights, shrink = torch.exp(scores - base), math.exp(largest - base)
        total = total * shrink + float(weights.sum())
        acc = acc * shrink + weights @ values
        largest = new
    return largest, total, acc / (total + 1e-4)
