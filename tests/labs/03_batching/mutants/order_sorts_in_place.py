# fault: sorts the caller's list.
# fails: check_order

# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""
    given, requests = requests, list(requests)
    given.sort(key=lambda r: r["arrival"])

    def key(request):
        return request["priority"] - aging * (now - request["arrival"]), request["arrival"]

    return [request["id"] for request in sorted(requests, key=key)]
