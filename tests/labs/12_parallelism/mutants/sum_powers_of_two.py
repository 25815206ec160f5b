# fault: recursive doubling: right for powers of 2 only.
# fails: check_sum, check_bits, check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
def all_reduce(group, x):
    total, apart = x.clone(), 1
    while apart < group.size:
        other = group.rank ^ apart
        if other < group.size:
            total = total + group.exchange({other: total}, [other])[other]
        apart *= 2
    return total
