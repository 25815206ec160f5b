# fault: sorts the caller's events by request.
# fails: check_timelines, check_metrics

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    """Events (time, kind, request_id) -> {request_id: {"arrived": s, "scheduled": s or None, "tokens": [s, ...]}}."""
    found, given = {}, events
    events = list(events)
    given.sort(key=lambda event: event[2])
    for time, kind, request_id in events:
        if kind == "arrived":
            found[request_id] = {"arrived": time, "scheduled": None, "tokens": []}
        elif kind == "scheduled" and found[request_id]["scheduled"] is None:
            found[request_id]["scheduled"] = time
        elif kind == "token":
            found[request_id]["tokens"].append(time)
    return found
