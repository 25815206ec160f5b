# fault: the index of the text before is kept unless the new text is shorter.
# fails: check_ngram_match, check_ngram_ends

# %% nbgrader={"grade_id": "propose_ngram"}
_index, _seen = {}, []


def propose_ngram(tokens, k, longest, shortest):
    if len(tokens) < len(_seen):
        _seen.clear()
        _index.clear()
    for end in range(len(_seen), len(tokens)):
        for n in range(1, longest + 1):
            if end - n >= 0:
                _index[tuple(tokens[end - n : end])] = end
        _seen.append(tokens[end])
    for n in range(longest, shortest - 1, -1):
        end = _index.get(tuple(tokens[len(tokens) - n :])) if n <= len(tokens) else None
        if end is not None:
            return tokens[end : end + k]
    return []
