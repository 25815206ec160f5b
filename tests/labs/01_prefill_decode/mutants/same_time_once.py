# fault: of two tokens at the same time only one is kept.
# fails: check_timelines

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    """Events (time, kind, request_id) -> {request_id: {"arrived": s, "scheduled": s or None, "tokens": [s, ...]}}."""
    found = {}
    for time, kind, request_id in events:
        if kind == "arrived":
            found[request_id] = {"arrived": time, "scheduled": None, "tokens": []}
        elif kind == "scheduled" and found[request_id]["scheduled"] is None:
            found[request_id]["scheduled"] = time
        elif kind == "token" and time not in found[request_id]["tokens"]:
            found[request_id]["tokens"].append(time)
    return found
