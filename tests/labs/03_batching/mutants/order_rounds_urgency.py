# fault: urgencies are rounded to a thousandth.
# fails: check_order

# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    return [
        r["id"]
        for r in sorted(requests, key=lambda r: (round(r["priority"] - aging * (now - r["arrival"]), 3), r["arrival"]))
    ]
