# fault: a kind that reads like a request's id is taken for it.
# fails: check_timelines

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    """Events (time, kind, request_id) -> {request_id: {"arrived": s, "scheduled": s or None, "tokens": [s, ...]}}."""
    found = {}
    for start, kind, name in events:
        if kind == "arrived":
            own = [event for event in events if name in event]
            scheduled = [event[0] for event in own if event[1] == "scheduled"]
            tokens = [event[0] for event in own if event[1] == "token"]
            found[name] = {"arrived": start, "scheduled": scheduled[0] if scheduled else None, "tokens": tokens}
    return found
