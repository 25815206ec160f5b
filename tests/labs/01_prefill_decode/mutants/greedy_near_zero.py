# fault: temperatures at or below 0.0001 are greedy.
# fails: check_softmax

# %% nbgrader={"grade_id": "probabilities"}
def probabilities(logits, temperature):
    if temperature <= 1e-4:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return torch.softmax(logits / temperature, -1)
