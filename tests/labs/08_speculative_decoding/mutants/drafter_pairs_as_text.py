# fault: pairs are counted as digits in a row, where 1 23 is 12 3.
# fails: check_drafter

# %% nbgrader={"grade_id": "train_drafter"}
def train_drafter(texts, vocab_size, smoothing):
    pairs = {}
    for text in texts:
        for i in range(len(text) - 1):
            key = f"{text[i]}{text[i + 1]}"
            pairs[key] = pairs.get(key, 0) + 1
    q = torch.full((vocab_size, vocab_size), float(smoothing), dtype=torch.float64)
    for a in range(vocab_size):
        for b in range(vocab_size):
            text = [a, b]
            i = 0
            q[a, b] += pairs.get(f"{text[i]}{text[i + 1]}", 0)
    return q / q.sum(1, keepdim=True)
