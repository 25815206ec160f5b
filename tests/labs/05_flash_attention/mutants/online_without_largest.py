# fault: takes the exp of the scores as they are.
# fails: check_online_huge

# %% nbgrader={"grade_id": "online_softmax"}
def online_softmax(stream):
    """(largest, total, mean) over all chunks (scores [n], values [n, head_dim]) of the stream."""
    largest, total, acc = -math.inf, 0.0, 0.0
    for scores, values in stream:
        new = max([largest, *scores.tolist()])
        weights, shrink = torch.exp(scores), 1.0
        total = total * shrink + float(weights.sum())
        acc = acc * shrink + weights @ values
        largest = new
    return largest, total * math.exp(-largest) if total else 0.0, acc / total if total else acc
