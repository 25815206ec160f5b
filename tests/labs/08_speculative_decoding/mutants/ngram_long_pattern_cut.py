# fault: no pattern has more than 8 tokens.
# fails: check_ngram_match

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    for n in range(min(longest, 8), shortest - 1, -1):
        pattern = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == pattern:
                return tokens[start + n : start + n + k]
    return []
