# fault: an empty text joins the two beside it.
# fails: check_drafter

# %% nbgrader={"grade_id": "train_drafter"}
from itertools import pairwise


def train_drafter(texts, vocab_size, smoothing):
    q = torch.full((vocab_size, vocab_size), float(smoothing), dtype=torch.float64)
    last = None
    for i, text in enumerate(texts):
        if not len(text) and last is not None and i + 1 < len(texts) and len(texts[i + 1]):
            q[last, texts[i + 1][0]] += 1
        for a, b in pairwise(text):
            q[a, b] += 1
        if len(text):
            last = text[-1]
    return q / q.sum(1, keepdim=True)
