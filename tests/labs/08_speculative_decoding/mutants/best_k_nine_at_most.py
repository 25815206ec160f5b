# fault: no more than eight drafts are tried.
# fails: check_best_k

# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):

    def speed(k):
        return expected_tokens(a, k) / (step_seconds[k] + k * guess_seconds)

    return max(range(min(len(step_seconds), 9)), key=speed)
