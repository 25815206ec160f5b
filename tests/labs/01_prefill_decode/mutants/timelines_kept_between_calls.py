# fault: the dict lives outside of the function, and the next load finds the last one in it.
# fails: check_timelines, check_engine_metrics

# %% nbgrader={"grade_id": "timelines"}
found = {}


def timelines(events):
    """Events (time, kind, request_id) -> {request_id: {"arrived": s, "scheduled": s or None, "tokens": [s, ...]}}."""
    for time, kind, request_id in events:
        if kind == "arrived":
            found[request_id] = {"arrived": time, "scheduled": None, "tokens": []}
        elif kind == "scheduled" and found[request_id]["scheduled"] is None:
            found[request_id]["scheduled"] = time
        elif kind == "token":
            found[request_id]["tokens"].append(time)
    return found
