# fault: an id of no text is dropped.
# fails: check_timelines

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    found = {}
    for t, kind, name in events:
        if not name:
            continue
        if kind == "arrived":
            found[name] = {"arrived": t, "scheduled": None, "tokens": []}
        elif kind == "scheduled" and found[name]["scheduled"] is None:
            found[name]["scheduled"] = t
        elif kind == "token":
            found[name]["tokens"].append(t)
    return found
