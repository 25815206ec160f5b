# fault: priorities end at 10.
# fails: check_order, check_starvation

# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""

    def key(request):
        return min(10, request["priority"]) - aging * (now - request["arrival"]), request["arrival"]

    return [request["id"] for request in sorted(requests, key=key)]
