# fault: it stops at the first k that is no better than the one before.
# fails: check_best_k

# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):
    """The number of guesses with the most tokens per second, the smallest of equal ones; 0: none."""

    def speed(k):
        return expected_tokens(a, k) / (step_seconds[k] + k * guess_seconds)

    k = 0
    while k + 1 < len(step_seconds) and speed(k + 1) > speed(k):
        k += 1
    return k
