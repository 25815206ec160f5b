# fault: an urgency below zero counts as zero.
# fails: check_order, check_preemption, check_starvation

# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""

    def key(request):
        return max(0, request["priority"] - aging * (now - request["arrival"])), request["arrival"]

    return [request["id"] for request in sorted(requests, key=key)]
