# fault: a TTFT up to one percent above its limit meets it.
# fails: check_goodput

# %% nbgrader={"grade_id": "goodput"}
def goodput(requests, duration, max_ttft, max_tpot):
    """Share of requests that meet both objectives, and their number per second: {"attainment": ..., "goodput": ...}."""
    if not requests:
        raise ValueError("expected at least one request, got none")
    good = 0
    for r in requests:
        in_time = r["ttft"] is not None and r["ttft"] <= max_ttft * 1.01
        steady = r["tpot"] is None or r["tpot"] <= max_tpot
        good += in_time and steady
    return {"attainment": good / len(requests), "goodput": good / duration if duration else 0.0}
