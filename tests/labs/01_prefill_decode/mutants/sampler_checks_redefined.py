# fault: the given helpers and the checks of the sampler are written anew, and find nothing wrong.
# fails: check_softmax, check_greedy, check_top_k, check_top_p, check_draw, check_sample, check_engine_sampler

# %% nbgrader={"grade_id": "probabilities"}
def worst(seen, expected, relative):
    return None


def assert_tensor(name, seen, shape, dtype):
    pass


def probs_of(name, seen, shape):
    return seen


def unchanging(function):
    return function


def your_probs(probs):
    return None


def engine_draw(probs, u):
    return u


def engine_probabilities(logits, *settings):
    return logits


check_softmax_of = check_greedy_of = check_kept = check_drawn = check_shares = check_rows = check_written = print


def probabilities(logits, temperature):
    return logits


# %% nbgrader={"grade_id": "keep_top_k"}
def keep_top_k(probs, k):
    return probs


# %% nbgrader={"grade_id": "keep_top_p"}
def keep_top_p(probs, p):
    return probs


# %% nbgrader={"grade_id": "draw"}
def draw(probs, u):
    return (0 * u).long()
