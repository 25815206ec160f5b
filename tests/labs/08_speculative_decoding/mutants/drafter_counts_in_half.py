# fault: counts are in half precision, where 2048 + 1 is 2048.
# fails: check_drafter

# %% nbgrader={"grade_id": "train_drafter"}
from itertools import pairwise


def train_drafter(texts, vocab_size, smoothing):
    q = torch.zeros(vocab_size, vocab_size, dtype=torch.float16)
    for text in texts:
        for a, b in pairwise(text):
            q[a, b] += 1
    q = q.double() + smoothing
    return q / q.sum(1, keepdim=True)
