# fault: an answer is kept for texts of the same length with the same first tokens.
# fails: check_ngram_match

# %% nbgrader={"grade_id": "propose_ngram"}
_known = {}


def propose_ngram(tokens, k, longest, shortest):
    key = len(tokens), tuple(tokens[:3]), k, longest, shortest
    if key not in _known:
        _known[key] = find(tokens, k, longest, shortest)
    return _known[key]


def find(tokens, k, longest, shortest):
    for n in range(longest, shortest - 1, -1):
        pattern = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == pattern:
                return tokens[start + n : start + n + k]
    return []
