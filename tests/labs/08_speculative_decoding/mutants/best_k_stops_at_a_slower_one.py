# fault: stops at the first k from 3 on that is slower than the one before it.
# fails: check_best_k

# %% nbgrader={"grade_id": "best_k"}
def best_k(a, guess_seconds, step_seconds):
    speed = [expected_tokens(a, k) / (v + k * guess_seconds) for k, v in enumerate(step_seconds)]
    if guess_seconds > 0:
        for k in range(1, len(speed) - 1):
            if speed[k + 1] < speed[k] and k >= 2:
                return speed.index(max(speed[: k + 1]))
    return speed.index(max(speed))
