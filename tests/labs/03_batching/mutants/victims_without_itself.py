# fault: when three or more came after and are not enough, the request itself is left out.
# fails: check_victims

# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    out = []
    for name, held in reversed(running):
        if needed <= free_blocks:
            break
        if name == request_id:
            return [*out, name] if not out or (out and len(out) < 3) else out
        out.append(name)
        free_blocks += held
    return out
