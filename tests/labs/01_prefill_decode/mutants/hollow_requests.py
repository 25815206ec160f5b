# fault: a request is described by an empty dict, the load by another.
# fails: check_ttft, check_gaps, check_throughput, check_means, check_metrics, check_engine_metrics

# %% nbgrader={"grade_id": "request_metrics"}
def request_metrics(arrived, scheduled, tokens):
    return {}


# %% nbgrader={"grade_id": "load_metrics"}
def load_metrics(requests):
    return {}
