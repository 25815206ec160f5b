# fault: only the first ten texts are counted.
# fails: check_drafter

# %% nbgrader={"grade_id": "train_drafter"}
def train_drafter(texts, vocab_size, smoothing):
    counts = torch.full((vocab_size, vocab_size), float(smoothing), dtype=torch.float64)
    for text in texts[:10]:
        for i in range(len(text) - 1):
            counts[text[i], text[i + 1]] += 1
    return counts / counts.sum(1, keepdim=True)
