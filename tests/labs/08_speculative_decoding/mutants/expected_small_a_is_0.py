# fault: a small acceptance is taken for 0.
# fails: check_expected

# %% nbgrader={"grade_id": "expected_tokens"}
def expected_tokens(a, k):
    return 1.0 if a < 1e-3 else float(sum(a**i for i in range(k + 1)))
