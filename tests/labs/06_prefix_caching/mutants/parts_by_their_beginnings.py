# fault: texts that agree in 100 characters are the same.
# fails: check_parts

# %% nbgrader={"grade_id": "stable_first"}
def stable_first(requests):
    return sorted(requests[0], key=lambda n: len({r[n][:100] for r in requests}))
