# fault: tokens are compared as digits in a row, where 1 23 is 12 3.
# fails: check_ngram_match

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    for n in range(longest, shortest - 1, -1):
        pattern = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if "".join(map(str, tokens[start : start + n])) == "".join(map(str, pattern)):
                return tokens[start + n : start + n + k]
    return []
