# fault: an aborted request is deleted.
# fails: check_timelines, check_engine_metrics

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    """Events (time, kind, request_id) -> {request_id: {"arrived": s, "scheduled": s or None, "tokens": [s, ...]}}."""
    found = {}
    for time, kind, request_id in events:
        if kind == "arrived":
            found[request_id] = {"arrived": time, "scheduled": None, "tokens": []}
        elif kind == "scheduled" and found[request_id]["scheduled"] is None:
            found[request_id]["scheduled"] = time
        elif kind == "token":
            found[request_id]["tokens"].append(time)
        elif kind == "aborted":
            del found[request_id]
    return found
