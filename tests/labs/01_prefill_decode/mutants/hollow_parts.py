# fault: every part returns an empty dict, and metrics is made of them.
# fails: check_timelines, check_ttft, check_gaps, check_throughput, check_means, check_goodput, check_metrics,
#   check_engine_metrics

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    return {}


# %% nbgrader={"grade_id": "request_metrics"}
def request_metrics(arrived, scheduled, tokens):
    return {}


# %% nbgrader={"grade_id": "load_metrics"}
def load_metrics(requests):
    return {}


# %% nbgrader={"grade_id": "goodput"}
def goodput(requests, duration, max_ttft, max_tpot):
    return {}
