# fault: scheduled again before its first token, a request has the later time.
# fails: check_timelines

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    found = {}
    for t, kind, name in events:
        if kind == "arrived":
            found[name] = {"arrived": t, "scheduled": None, "tokens": []}
        elif kind == "scheduled" and not found[name]["tokens"]:
            found[name]["scheduled"] = t
        elif kind == "token":
            found[name]["tokens"].append(t)
    return found
