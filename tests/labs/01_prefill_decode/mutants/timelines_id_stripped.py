# fault: white space around an id is cut off.
# fails: check_timelines

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    found = {}
    for t, kind, name in events:
        name = name.strip()
        if kind == "arrived":
            found[name] = {"arrived": t, "scheduled": None, "tokens": []}
        elif kind == "scheduled" and found[name]["scheduled"] is None:
            found[name]["scheduled"] = t
        elif kind == "token":
            found[name]["tokens"].append(t)
    return found
