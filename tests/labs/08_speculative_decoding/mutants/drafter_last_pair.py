# fault: the last pair of a text is left out.
# fails: check_drafter

# %% nbgrader={"grade_id": "train_drafter"}
def train_drafter(texts, vocab_size, smoothing):
    """q [vocab_size, vocab_size]: row a is the distribution of the token after a."""
    counts = torch.full((vocab_size, vocab_size), smoothing, dtype=torch.float64)
    for text in texts:
        for i in range(len(text) - 2):
            counts[text[i], text[i + 1]] += 1
    return counts / counts.sum(1, keepdim=True)
