# fault: `or` takes a first scheduling at time 0.0 for none.
# fails: check_timelines

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    """Events (time, kind, request_id) -> {request_id: {"arrived": s, "scheduled": s or None, "tokens": [s, ...]}}."""
    found = {}
    for time, kind, request_id in events:
        if kind == "arrived":
            found[request_id] = {"arrived": time, "scheduled": None, "tokens": []}
        elif kind == "scheduled":
            found[request_id]["scheduled"] = found[request_id]["scheduled"] or time
        elif kind == "token":
            found[request_id]["tokens"].append(time)
    return found
