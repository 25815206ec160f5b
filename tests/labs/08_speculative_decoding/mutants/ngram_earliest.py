# fault: the earliest occurrence is taken.
# fails: check_ngram_match, check_ngram_ends

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    """What followed the text's last tokens when they occurred before: at most k tokens."""
    for n in range(longest, shortest - 1, -1):
        pattern = tokens[len(tokens) - n :]
        for start in range(max(0, len(tokens) - n)):
            if tokens[start : start + n] == pattern:
                return tokens[start + n : start + n + k]
    return []
