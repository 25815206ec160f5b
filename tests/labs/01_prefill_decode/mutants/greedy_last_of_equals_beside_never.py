# fault: of equal logits the last one gets it in a row that has a logit of -inf; the first one in any other.
# fails: check_greedy

# %% nbgrader={"grade_id": "probabilities"}
def probabilities(logits, temperature):
    """Softmax of logits / temperature over each row, [rows, vocab] float32; temperature 0: all on the largest logit."""
    if temperature == 0:
        probs = torch.zeros_like(logits)
        for row, line in enumerate(logits):
            largest = (line == line.max()).nonzero()[:, 0]
            probs[row, largest[-1] if bool((line == -math.inf).any()) else largest[0]] = 1
        return probs
    return (logits / temperature).softmax(dim=-1)
