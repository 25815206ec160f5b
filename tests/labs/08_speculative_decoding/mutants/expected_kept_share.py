# fault: k times a drafts are kept.
# fails: check_expected, check_best_k

# %% nbgrader={"grade_id": "expected_tokens"}
def expected_tokens(a, k):
    """Tokens of a step with k guesses, of which each is kept with probability a if those before it were."""
    return 1 + k * a
