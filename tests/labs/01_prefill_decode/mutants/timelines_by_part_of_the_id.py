# fault: an event belongs to every request whose id is contained in its own.
# fails: check_timelines

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    """Events (time, kind, request_id) -> {request_id: {"arrived": s, "scheduled": s or None, "tokens": [s, ...]}}."""
    found = {}
    for start, kind, name in events:
        if kind == "arrived":
            own = [(time, what) for time, what, request_id in events if name in request_id and time >= start]
            scheduled = [time for time, what in own if what == "scheduled"]
            tokens = [time for time, what in own if what == "token"]
            found[name] = {"arrived": start, "scheduled": scheduled[0] if scheduled else None, "tokens": tokens}
    return found
