# fault: a step takes as long with drafts as without.
# trap: v of 1
# fails: check_best_k

# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):
    """The number of guesses with the most tokens per second, the smallest of equal ones; 0: none."""

    def speed(k):
        return expected_tokens(a, k) / (step_seconds[0] + k * guess_seconds)

    return max(range(len(step_seconds)), key=speed)
