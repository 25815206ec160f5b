# fault: the weights of a chunk of more than 200 keys are summed in half precision.
# fails: check_online

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
            total * f + float(w.half().sum(dtype=torch.float16) if len(scores) > 200 else w.sum()),
            acc * f + w @ values.double(),
            top,
        )
    return m, total, (acc / total if total else acc).float()
