# fault: priority alone; who waits does not become more urgent.
# fails: check_order, check_preemption, check_starvation

# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""

    def key(request):
        return request["priority"], request["arrival"]

    return [request["id"] for request in sorted(requests, key=key)]
