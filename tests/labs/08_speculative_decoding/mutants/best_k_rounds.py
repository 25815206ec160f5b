# fault: speeds are rounded, so that equal ones differ and other ones do not.
# fails: check_best_k

# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):

    def speed(k):
        return expected_tokens(a, k) / (step_seconds[k] + k * guess_seconds)

    return max(range(len(step_seconds)), key=lambda k: round(speed(k), 6))
