# fault: a ring's turn moves the whole tensor.
# fails: check_choose

# %% nbgrader={"grade_id": "choose"}
def choose(num_bytes, n, alpha, beta):
    """ "one_shot" or "ring": the faster sum of num_bytes over n ranks."""
    at_once = alpha + (n - 1) * num_bytes * beta
    ring = 2 * (n - 1) * (alpha + num_bytes * beta)
    return "one_shot" if at_once <= ring else "ring"
