# fault: takes out of the caller's list the requests that miss a limit.
# fails: check_goodput

# %% nbgrader={"grade_id": "goodput"}
def goodput(requests, duration, max_ttft, max_tpot):
    """Share of requests that meet both objectives, and their number per second: {"attainment": ..., "goodput": ...}."""
    if not requests:
        raise ValueError("expected at least one request, got none")
    good = 0
    for r in requests:
        in_time = r["ttft"] is not None and r["ttft"] <= max_ttft
        steady = r["tpot"] is None or r["tpot"] <= max_tpot
        good += in_time and steady
    given = len(requests)
    requests[:] = [r for r in requests if r["ttft"] is not None and r["ttft"] <= max_ttft]
    return {"attainment": good / given, "goodput": good / duration if duration else 0.0}
