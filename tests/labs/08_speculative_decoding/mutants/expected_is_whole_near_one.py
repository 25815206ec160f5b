# fault: an acceptance of nearly 1 is taken for 1.
# fails: check_expected

# %% nbgrader={"grade_id": "expected_tokens"}
def expected_tokens(a, k):
    return float(k + 1) if abs(1 - a) < 1e-2 else (1 - a ** (k + 1)) / (1 - a)
