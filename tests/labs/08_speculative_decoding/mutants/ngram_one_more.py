# fault: one draft too many.
# fails: check_ngram_match, check_ngram_ends

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    """What followed the text's last tokens when they occurred before: at most k tokens."""
    for n in range(longest, shortest - 1, -1):
        pattern = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == pattern:
                return tokens[start + n : start + n + k + 1]
    return []
