# fault: only the pattern's last token is compared.
# fails: check_ngram_match

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    """What followed the text's last tokens when they occurred before: at most k tokens."""
    for n in range(longest, shortest - 1, -1):
        pattern = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start + n - 1 : start + n] == pattern[-1:]:
                return tokens[start + n : start + n + k]
    return []
