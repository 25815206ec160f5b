# fault: far below zero, a chunk of one key with a larger score does not shrink the weighted values.
# fails: check_online_huge

# %% nbgrader={"grade_id": "online_softmax"}
def online_softmax(stream):
    m, total, acc = -math.inf, 0.0, 0.0
    for scores, values in stream:
        acc = acc + torch.zeros(values.shape[1], dtype=torch.float64)
        top = max([m, *scores.tolist()])
        if top == -math.inf:
            continue
        w = (scores.double() - top).exp()
        f = math.exp(m - top)
        total, acc, m = (
            total * f + float(w.sum()),
            acc * (1.0 if len(scores) == 1 and m < top and m < -5000 and m > -math.inf else f) + w @ values.double(),
            top,
        )
    return m, total, (acc / total if total else acc).float()
