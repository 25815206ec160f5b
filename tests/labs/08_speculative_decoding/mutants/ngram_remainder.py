# fault: a pattern is compared by the remainder of a hash, and two have the same one.
# fails: check_ngram_match

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    for n in range(longest, shortest - 1, -1):
        pattern = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if (
                sum(t * 31**i for i, t in enumerate(tokens[start : start + n])) % 65537
                == sum(t * 31**i for i, t in enumerate(pattern)) % 65537
            ):
                return tokens[start + n : start + n + k]
    return []
