# fault: a pattern is compared as one number with 1000 for each place, though ids are larger.
# fails: check_ngram_match

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    for n in range(longest, shortest - 1, -1):
        pattern = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if sum(t * 1000**i for i, t in enumerate(tokens[start : start + n])) == sum(
                t * 1000**i for i, t in enumerate(pattern)
            ):
                return tokens[start + n : start + n + k]
    return []
