# fault: a threshold of 2.2 MB, whatever the links.
# fails: check_choose

# %% nbgrader={"grade_id": "choose"}
def choose(num_bytes, n, alpha, beta):
    return "one_shot" if num_bytes < 2.2e6 else "ring"
