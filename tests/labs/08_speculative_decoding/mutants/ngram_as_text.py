# fault: the text is searched as a string of numbers, where 1 is found at the end of 21.
# fails: check_ngram_match

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    text = "".join(f"{t}," for t in tokens)
    for n in range(longest, shortest - 1, -1):
        if n >= len(tokens):
            continue
        pattern = "".join(f"{t}," for t in tokens[len(tokens) - n :])
        at = text.rfind(pattern, 0, len(text) - 1)
        if at >= 0:
            return [int(t) for t in text[at + len(pattern) :].split(",")[:-1]][:k]
    return []
