# fault: it is the ring again.
# fails: check_one_shot

# %% nbgrader={"grade_id": "one_shot"}
def one_shot(group, x):
    return all_reduce(group, x)
