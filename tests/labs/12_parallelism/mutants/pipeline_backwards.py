# fault: the last stage comes first.
# fails: check_pipeline

# %% nbgrader={"grade_id": "pipeline"}
def pipeline(stages, passes):
    """A shortest schedule: for each step the request in each stage, or None."""
    left, begins = list(passes), []  # begins: the request whose pass begins in each step
    while any(left):
        recent = begins[max(0, len(begins) - stages + 1) :]
        ready = [i for i in range(len(left)) if left[i] and i not in recent]
        begins.append(max(ready, key=lambda i: left[i]) if ready else None)
        if ready:
            left[begins[-1]] -= 1
    padded = [None] * (stages - 1) + begins + [None] * (stages - 1)
    return [padded[step : step + stages] for step in range(len(padded) - stages + 1)] if begins else []
