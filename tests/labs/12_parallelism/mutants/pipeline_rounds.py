# fault: a round of all requests ends before the next begins.
# fails: check_pipeline

# %% nbgrader={"grade_id": "pipeline"}
def pipeline(stages, passes):
    begins = []
    for turn in range(max(passes, default=0)):
        own = [i for i, count in enumerate(passes) if count > turn]
        begins += own + [None] * max(0, stages - len(own))
    while begins and begins[-1] is None:
        begins.pop()
    padded = [None] * (stages - 1) + begins + [None] * (stages - 1)
    return [padded[step : step + stages][::-1] for step in range(len(padded) - stages + 1)] if begins else []
