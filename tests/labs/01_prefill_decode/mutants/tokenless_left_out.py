# fault: requests without tokens are not described.
# fails: check_metrics, check_engine_metrics

# %% nbgrader={"grade_id": "metrics"}
def metrics(events):
    """Events (time in seconds, kind, request_id) -> {"requests": {request_id: dict}, "load": dict}."""
    requests = {name: request_metrics(**timeline) for name, timeline in timelines(events).items() if timeline["tokens"]}
    return {"requests": requests, "load": load_metrics(list(requests.values()))}
