# fault: with a draft that takes longer than a step it is always 0.
# fails: check_best_k

# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):
    if guess_seconds >= step_seconds[0]:
        return 0

    def speed(k):
        return expected_tokens(a, k) / (step_seconds[k] + k * guess_seconds)

    return max(range(len(step_seconds)), key=speed)
