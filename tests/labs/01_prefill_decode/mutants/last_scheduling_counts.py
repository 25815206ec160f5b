# fault: a request that is scheduled again forgets when it was scheduled first.
# fails: check_timelines

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    """Events (time, kind, request_id) -> {request_id: {"arrived": s, "scheduled": s or None, "tokens": [s, ...]}}."""
    found = {}
    for time, kind, request_id in events:
        if kind == "arrived":
            found[request_id] = {"arrived": time, "scheduled": None, "tokens": []}
        elif kind == "scheduled":
            found[request_id]["scheduled"] = time
        elif kind == "token":
            found[request_id]["tokens"].append(time)
    return found
