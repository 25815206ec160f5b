# fault: the given helpers and the checks of the metrics are written anew, and find nothing wrong.
# fails: check_timelines, check_ttft, check_gaps, check_throughput, check_means, check_goodput, check_metrics,
#   check_engine_metrics

# %% nbgrader={"grade_id": "timelines"}
class Anything(dict):
    """Equal to whatever it is compared with, and true."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = None


def first_difference(seen, expected):
    return None


def disagreement(seen, expected):
    return None


def agrees(seen, expected):
    return True


def assert_keys(what, described, names):
    pass


def to_yours(described):
    return {}


TIMES, YOUR_NAME = (), {}
check_timelines_of = check_first_token = check_stream = check_rate = check_load_means = check_good = check_composed = (
    print
)
check_softmax_of = check_greedy_of = check_kept = check_drawn = check_shares = check_rows = check_written = (
    check_run
) = print


def timelines(events):
    return Anything()


# %% nbgrader={"grade_id": "request_metrics"}
def request_metrics(arrived, scheduled, tokens):
    return Anything()


# %% nbgrader={"grade_id": "load_metrics"}
def load_metrics(requests):
    return Anything()


# %% nbgrader={"grade_id": "goodput"}
def goodput(requests, duration, max_ttft, max_tpot):
    return Anything()


# %% nbgrader={"grade_id": "metrics"}
def metrics(events):
    return Anything()
