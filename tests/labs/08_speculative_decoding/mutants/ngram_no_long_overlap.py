# fault: an occurrence of three tokens or more that overlaps the end is passed over.
# fails: check_ngram_match

# %% nbgrader={"grade_id": "propose_ngram"}
def propose_ngram(tokens, k, longest, shortest):
    T = len(tokens)
    for n in range(min(longest, T), shortest - 1, -1):
        for at in range(T - n - 1, -1, -1):
            if n > 2 and k > 2 and at + n > T - n:
                continue
            if tokens[at : at + n] == tokens[T - n :]:
                return tokens[at + n : at + n + k]
    return []
