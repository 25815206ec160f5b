# fault: of three or more parts with equally many texts, the names decide.
# fails: check_parts

# %% nbgrader={"grade_id": "stable_first"}
def stable_first(requests):
    num = {n: len({r[n] for r in requests}) for n in requests[0]}
    many = list(num.values())
    return sorted(requests[0], key=lambda n: (num[n], n if many.count(num[n]) > 2 else ""))
