# fault: equal arrivals go in the reverse of the order given.
# fails: check_order, check_turn, check_preemption, check_return, check_abort, check_starvation

# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""

    def key(request):
        return request["priority"] - aging * (now - request["arrival"]), request["arrival"]

    backwards = requests[::-1]
    return [request["id"] for request in sorted(backwards, key=key)]
