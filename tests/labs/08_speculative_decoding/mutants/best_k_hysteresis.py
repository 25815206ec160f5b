# fault: a larger k must be better by 1 %.
# fails: check_best_k

# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):

    def speed(k):
        return expected_tokens(a, k) / (step_seconds[k] + k * guess_seconds)

    best = 0
    for k in range(len(step_seconds)):
        if speed(k) > speed(best) * (1 + 0.01):
            best = k
    return best
