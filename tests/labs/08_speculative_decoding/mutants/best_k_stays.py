# fault: the last answer stays while it is nearly as good.
# fails: check_best_k

# %% nbgrader={"grade_id": "best_k"}
_last = [0]


def best_k(a, guess_seconds, step_seconds):
    def speed(k):
        return expected_tokens(a, k) / (step_seconds[k] + k * guess_seconds)

    best = max(range(len(step_seconds)), key=speed)
    if _last[0] < len(step_seconds) and speed(_last[0]) > 0.99 * speed(best):
        return _last[0]
    _last[0] = best
    return best
