# fault: a token goes to the request that was scheduled last.
# trap: mixed
# fails: check_timelines, check_engine_metrics

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    """Events (time, kind, request_id) -> {request_id: {"arrived": s, "scheduled": s or None, "tokens": [s, ...]}}."""
    found, current = {}, None
    for time, kind, request_id in events:
        if kind == "arrived":
            found[request_id] = {"arrived": time, "scheduled": None, "tokens": []}
        elif kind == "scheduled":
            current = request_id
            if found[request_id]["scheduled"] is None:
                found[request_id]["scheduled"] = time
        elif kind == "token":
            found[current]["tokens"].append(time)
    return found
