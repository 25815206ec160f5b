# fault: the sum ends after 40 drafts.
# fails: check_expected

# %% nbgrader={"grade_id": "expected_tokens"}
def expected_tokens(a, k):
    return float(sum(a**i for i in range(min(k, 40) + 1)))
