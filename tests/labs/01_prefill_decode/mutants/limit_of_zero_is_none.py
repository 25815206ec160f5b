# fault: a limit of 0 counts as none.
# fails: check_goodput

# %% nbgrader={"grade_id": "goodput"}
def goodput(requests, duration, max_ttft, max_tpot):
    if not requests:
        raise ValueError("none")
    met = sum(
        r["ttft"] is not None
        and (not max_ttft or r["ttft"] <= max_ttft)
        and (r["tpot"] is None or not max_tpot or r["tpot"] <= max_tpot)
        for r in requests
    )
    return {"attainment": met / len(requests), "goodput": met / duration if duration else 0.0}
