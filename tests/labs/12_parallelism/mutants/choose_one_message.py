# fault: one-shot is charged for one message's bytes, not for n - 1.
# fails: check_choose

# %% nbgrader={"grade_id": "choose"}
def choose(num_bytes, n, alpha, beta):
    """ "one_shot" or "ring": the faster sum of num_bytes over n ranks."""
    at_once = alpha + num_bytes * beta
    ring = 2 * (n - 1) * (alpha + num_bytes / n * beta)
    return "one_shot" if at_once <= ring else "ring"
