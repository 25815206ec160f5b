# fault: the larger priority goes first.
# fails: check_order, check_preemption, check_starvation, check_return

# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""

    def key(request):
        return -request["priority"] - aging * (now - request["arrival"]), request["arrival"]

    return [request["id"] for request in sorted(requests, key=key)]
