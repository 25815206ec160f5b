# fault: an answer is kept by the first step's time.
# fails: check_best_k

# %% nbgrader={"grade_id": "best_k"}
_c = {}


def best_k(a, guess_seconds, step_seconds):
    def speed(k):
        return expected_tokens(a, k) / (step_seconds[k] + k * guess_seconds)

    key = a, guess_seconds, len(step_seconds), step_seconds[0]
    if key not in _c:
        _c[key] = max(range(len(step_seconds)), key=speed)
    return _c[key]
