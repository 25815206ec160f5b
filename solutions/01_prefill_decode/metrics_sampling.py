# %% [markdown] nbgrader={"grade_id": "intro"}
# # Lab 01: metrics and sampling
#
# Two people wait for a model. One gets 10 tokens, each 10 ms after the one before. The other gets 4 tokens, with gaps
# of 10, 10 and 200 ms. What is the mean time between tokens? Write a number down. A cell below computes two, and both
# are right.
#
# In the first half you turn what an engine reports into latency, throughput and goodput. In the second half you choose
# tokens: temperature, top-k, top-p and one draw. At the end both halves run inside the engine: it generates text with
# your sampler, and your metrics say how fast.
#
# - Parts 1 to 5 need notebook 01c, parts 6 to 11 notebook 01d.
# - Each part has a text, a cell for your code, and checks. Run a check as often as you like; `inferlab lab check 01`
#   runs all of them on the saved notebook.
# - Grading draws other inputs of the same kinds, and hidden checks test the same properties once more. A check that
#   passes here for the right reason passes there.
# - Tensors are on the CPU. The arguments of your functions belong to the caller: do not modify them.
# - Your own cells may use `torch`, `numpy` and the standard library. Nothing else is available when they are graded,
#   neither engine nor grader.
#
# 20 points.

# %% nbgrader={"grade_id": "imports"} inferlab={"where": "both"}
import math

import numpy as np
import torch

# %% nbgrader={"grade_id": "tools"}
# Given: helpers of the checks. You may read them, but do not change them.

import numbers

from grader.checks import rng, seed, unchanging


def random_int(low, high, generator):
    """An integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def random_seconds(high, generator):
    return high * float(torch.rand((), dtype=torch.float64, generator=generator))


TIMES = ("queue", "ttft", "itl", "tpot", "latency", "mean_ttft", "mean_tpot", "mean_itl", "p99_itl")
YOUR_NAME = {name: name for name in TIMES}  # the key of each time in your dicts
YOUR_SECOND = 1  # a second, in the unit of these times


def scaled(value, factor):
    """A time, or a list of times, in another unit. None stays None."""
    if isinstance(value, list | tuple):
        return [scaled(one, factor) for one in value]
    return None if value is None else value * factor


def to_yours(described):
    """A described request, or the metrics of a load, as your functions take and return it. Inside, checks use TIMES."""
    return {YOUR_NAME.get(k, k): scaled(v, YOUR_SECOND) if k in YOUR_NAME else v for k, v in described.items()}


def from_yours(described):
    """The other way round."""
    own = {yours: name for name, yours in YOUR_NAME.items()}
    return {own.get(k, k): scaled(v, 1 / YOUR_SECOND) if k in own else v for k, v in described.items()}


def is_number(value):
    """Also NumPy's numbers and tensors with one element and no dimension, but no text that reads like a number."""
    return isinstance(value, numbers.Real) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def disagreement(seen, expected):
    """What is wrong with seen, None if nothing: a number equal to a millionth, a list of such numbers, or None."""
    if isinstance(expected, list | tuple):
        if not isinstance(seen, list | tuple):
            return f"expected a list, {list(expected)}, saw {seen!r}, a {type(seen).__name__}"
        right = len(seen) == len(expected) and not any(map(disagreement, seen, expected))
    elif expected is None or not is_number(seen):
        right = seen is None and expected is None
    else:
        right = abs(float(seen) - float(expected)) <= 1e-6 * max(1.0, abs(float(expected)))
    return None if right else f"expected {expected}, saw {seen if is_number(seen) else repr(seen)}"


def first_difference(seen, expected):
    """The first difference between two dicts of numbers and lists of numbers, as a sentence; None if there is none."""
    if not isinstance(seen, dict):
        return f"expected a dict with the keys {list(expected)}, saw {seen!r}, a {type(seen).__name__}"
    for key, value in expected.items():
        if key not in seen:
            return f"{key!r} is missing, the keys are {list(seen)}"
        if problem := disagreement(seen[key], value):
            return f"{key!r}: {problem}"
    return None


def assert_keys(what, described, names):
    """A dict with your keys for these names."""
    assert isinstance(described, dict), f"{what}: expected a dict, saw {described!r}, a {type(described).__name__}"
    for name in (YOUR_NAME.get(name, name) for name in names):
        assert name in described, f"{what}: {name!r} is missing, the keys are {list(described)}"


def in_short(described, names):
    """Some of the numbers of a dict of yours, to print."""
    found = ((YOUR_NAME.get(name, name), described[YOUR_NAME.get(name, name)]) for name in names)
    return ", ".join(
        f"{name} {value if isinstance(value, int | None) else round(float(value), 4)}" for name, value in found
    )


def measured(arrived, ttft, gaps):
    """A request as request_metrics describes it; ttft None: it got no token."""
    if ttft is None:
        return {"arrived": arrived, "num_tokens": 0, "queue": None, "ttft": None, "itl": [], "tpot": None,
                "latency": None}  # fmt: skip
    tpot = sum(gaps) / len(gaps) if gaps else None
    return {"arrived": arrived, "num_tokens": len(gaps) + 1, "queue": 0.0, "ttft": ttft, "itl": list(gaps),
            "tpot": tpot, "latency": ttft + sum(gaps)}  # fmt: skip


def random_requests(num_requests, generator):
    """Described requests in order of arrival: some without a token, some with a single one, some gaps of 0."""
    arrived, requests = random_seconds(2000, generator) - 1000, []  # a clock has an arbitrary zero
    for i in range(num_requests):
        arrived += random_seconds(2, generator)
        ttft = 0.1 + random_seconds(3, generator) if i % 6 else None
        num_gaps = random_int(1, 8, generator) if i % 3 else 0
        gaps = [random_seconds(0.5, generator) * (random_int(0, 4, generator) > 0) for _ in range(num_gaps)]
        requests.append(measured(arrived, ttft, gaps))
    return requests


def random_events(num_requests, generator):
    """An event stream of requests that overlap; every third gets no token, some are scheduled again."""
    events, start = [], random_seconds(2000, generator) - 1000
    for i in range(num_requests):
        name, time = f"r{random_int(100, 999, generator)}-{i}", start + random_seconds(2, generator)
        name = {1: "token", 2: "r1", 4: "r", 5: "Gülşen 李"}.get(i, name)  # an id is any text
        events.append((time, "arrived", name))
        num_tokens = 0 if i % 3 == 0 else random_int(1, 6, generator)
        if i % 2:
            time += random_seconds(1, generator)
            events.append((time, "scheduled", name))
        for k in range(num_tokens):
            time += random_seconds(0.5, generator) * (random_int(0, 3, generator) > 0)  # sometimes the same time
            if not (i % 2 or k):
                events.append((time, "scheduled", name))
            events.append((time, "token", name))
            if random_int(0, 5, generator) == 0:
                events.append((time, "scheduled", name))
        if i % 4:
            time += random_seconds(0.5, generator)
            events.append((time, "finished" if num_tokens else "aborted", name))
    return sorted(events, key=lambda event: event[0])


def assert_tensor(name, seen, shape, dtype):
    """A plain tensor of this shape and dtype."""
    assert isinstance(seen, torch.Tensor), f"{name}: expected a tensor, saw {type(seen).__name__}"
    assert tuple(seen.shape) == tuple(shape), f"{name}: expected shape {tuple(shape)}, saw {tuple(seen.shape)}"
    assert seen.dtype == dtype, f"{name}: expected {dtype}, saw {seen.dtype}"


def your_logits(logits):
    """Logits [rows, vocab] as your functions take them."""
    return logits


def your_u(place):
    """The u at this place of the line of probabilities: 0 where id 0 begins, 1 where the last id ends."""
    return place


def your_probs(probs):
    """Probabilities [rows, vocab] as your functions take and return them. Inside, checks use [rows, vocab]."""
    return probs


def probs_of(name, seen, shape):
    """Probabilities [rows, vocab] of this shape from what a function of yours returned."""
    assert_tensor(name, seen, shape, torch.float32)
    assert not bool(seen.isnan().any()), f"{name}: {int(seen.isnan().sum())} of {seen.numel()} numbers are NaN"
    return seen


def in_row(values):
    """The first numbers of a list, to print, and of a long one how many there are."""
    some = values if len(values) <= 60 else values[:8]
    shown = str([float(f"{value:.4g}") if isinstance(value, float) else value for value in some])
    return shown if some is values else f"{shown[:-1]}, ...] ({len(values)} of them)"


def worst(seen, expected, relative):
    """(row, id) of the worst probability that is off by more than this share of itself; None if there is none."""
    off = (seen.double() - expected.double()).abs() - relative * expected.double() - 1e-12
    return divmod(int(off.argmax()), off.shape[1]) if bool((off > 0).any()) else None


def shares_of(tokens, vocab_size):
    """How often each id was drawn, as shares of 1: [vocab_size]."""
    assert_tensor("tokens", tokens, (len(tokens),), torch.int64)
    outside = sorted({token for token in tokens.tolist() if not 0 <= token < vocab_size})
    assert not outside, f"expected ids in [0, {vocab_size}), saw {outside[:10]}"
    return tokens.bincount(minlength=vocab_size) / len(tokens)


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def even_u(num_rows, generator):
    """num_rows evenly spaced numbers in (0, 1), shuffled: a token of probability p is drawn by a share p of them."""
    u = (torch.arange(num_rows, dtype=torch.float64) + 0.5) / num_rows
    return u[torch.randperm(num_rows, generator=generator)]


# %% [markdown] nbgrader={"grade_id": "text_timelines"}
# ## 1. One timeline for each request
#
# An engine reports a list of events, each a tuple `(time, kind, request_id)` of a float and two strings:
#
# | kind | what happened |
# |---|---|
# | `"arrived"` | the request arrived: always its first event |
# | `"scheduled"` | the engine began to compute it; again, if it was preempted and had to wait a second time |
# | `"token"` | one output token was generated |
# | `"finished"` | its output is complete |
# | `"aborted"` | it was cancelled, perhaps before it had a token |
#
# Events are in order of time, and those of several requests are interleaved. Times are seconds on a clock with an
# arbitrary zero, so they may be 0 or negative: only differences of times have a meaning. Two tokens may have the same
# time: a step can yield more than one. An id identifies one request, and can be any text. The list ends where the
# recording ended, so the last events of a request may be missing.
#
# **Build** `timelines(events)`: a dict with an entry for every request that arrived, regardless of how it ended:
# `{request_id: {"arrived": time, "scheduled": time, "tokens": [time, time, ...]}}`. `"scheduled"` is the *first* time
# it was scheduled, or `None`. `"tokens"` has one time for each token, in order.
#
# **Hint:** one pass over the events. Create the entry, with an empty list in it, when the request arrives. Test for
# "not yet scheduled" with `is None`; 0.0 is a valid time.
#
# **Trap (mixed):** the event before a token usually belongs to another request. Only the id tells which request a token
# belongs to.


# %% nbgrader={"grade_id": "timelines", "solution": true}
def timelines(events):
    """Events (time, kind, request_id) -> {request_id: {"arrived": s, "scheduled": s or None, "tokens": [s, ...]}}."""
    ### BEGIN SOLUTION
    found = {}
    for time, kind, request_id in events:
        if kind == "arrived":
            found[request_id] = {"arrived": time, "scheduled": None, "tokens": []}
        elif kind == "scheduled" and found[request_id]["scheduled"] is None:
            found[request_id]["scheduled"] = time
        elif kind == "token":
            found[request_id]["tokens"].append(time)
    return found
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_timelines", "grade": true, "points": 1}
# property: every request that arrived has its own arrival, first scheduling and token times, in order.
# question: Take the request that never got a token and follow it through your loop: where does its entry come from?
# hint: look the request up by its id; keep the first "scheduled"; an aborted request stays in the result.
# explanation: Events: (1.0, arrived, x), (1.5, scheduled, x), (2.0, token, x), (2.5, scheduled, x), (3.0, token, x).
#   The entry of x has arrival 1.0, first scheduling 1.5 and tokens [2.0, 3.0]: the second scheduling follows a
#   preemption and changes nothing. A request with only an arrival has an entry too, with None and an empty list.
def check_timelines_of(events, expected):
    seen = unchanging(timelines)(list(events))
    assert isinstance(seen, dict), f"expected a dict, saw {type(seen).__name__}"
    assert set(seen) == set(expected), f"expected the requests {sorted(expected)}, saw {sorted(seen)}"
    for name, timeline in expected.items():
        problem = first_difference(seen[name], timeline)
        assert problem is None, f"request {name}: {problem}"
    return seen


events = [
    (100.0, "arrived", "anna"),
    (100.5, "scheduled", "anna"),
    (100.75, "arrived", "ben"),
    (101.0, "token", "anna"),
    (101.0, "scheduled", "ben"),
    (101.5, "token", "anna"),
    (101.5, "token", "ben"),
    (102.0, "scheduled", "anna"),  # again: it had been preempted
    (102.25, "arrived", "cleo"),
    (102.5, "token", "anna"),
    (102.5, "token", "ben"),
    (102.5, "token", "ben"),  # two tokens from one step
    (102.75, "finished", "anna"),
    (103.0, "aborted", "cleo"),
    (103.5, "arrived", "dora"),
]
expected = {
    "anna": {"arrived": 100.0, "scheduled": 100.5, "tokens": [101.0, 101.5, 102.5]},
    "ben": {"arrived": 100.75, "scheduled": 101.0, "tokens": [101.5, 102.5, 102.5]},
    "cleo": {"arrived": 102.25, "scheduled": None, "tokens": []},
    "dora": {"arrived": 103.5, "scheduled": None, "tokens": []},
}
for name, timeline in check_timelines_of(events, expected).items():
    print(f"{name}: {timeline}")
events = [(-1.0, "arrived", "token"), (0.0, "scheduled", "token"), (0.0, "token", "token"), (0.5, "scheduled", "token")]
check_timelines_of(events, {"token": {"arrived": -1.0, "scheduled": 0.0, "tokens": [0.0]}})  # times of 0, an odd id
odd = [(1.0, "arrived", ""), (1.0, "arrived", " "), (1.25, "scheduled", ""), (1.5, "scheduled", " ")]
odd += [(1.75, "scheduled", ""), (2.0, "token", " "), (2.0, "token", ""), (2.5, "token", " ")]
expected = {  # ids of no text and of a space; the first is scheduled again before its first token
    "": {"arrived": 1.0, "scheduled": 1.25, "tokens": [2.0]},
    " ": {"arrived": 1.0, "scheduled": 1.5, "tokens": [2.0, 2.5]},
}
check_timelines_of(odd, expected)
check_timelines_of([], {})
draw_numbers = rng("check_timelines")
for _ in range(4):
    events = random_events(random_int(6, 12, draw_numbers), draw_numbers)
    expected = {name: {} for _, kind, name in events if kind == "arrived"}
    for name, timeline in expected.items():
        own = [(time, kind) for time, kind, owner in events if owner == name]
        timeline["arrived"] = own[0][0]
        timeline["scheduled"] = next((time for time, kind in own if kind == "scheduled"), None)
        timeline["tokens"] = [time for time, kind in own if kind == "token"]
    check_timelines_of(events, expected)

# %% [markdown] nbgrader={"grade_id": "text_request"}
# ## 2. The latency of one request
#
# **Build** `request_metrics(arrived, scheduled, tokens)`: from one timeline to a dict, whose times are in seconds. The N
# tokens were generated at t1 ... tN.
#
# | key | value | if N = 0 |
# |---|---|---|
# | `"arrived"` | as given | as given |
# | `"num_tokens"` | N | 0 |
# | `"queue"` | scheduled - arrived; `None` if it never was scheduled | the same |
# | `"ttft"` | t1 - arrived: time to first token | `None` |
# | `"itl"` | the gaps t2 - t1, t3 - t2, ... as a list: inter-token latencies | `[]` |
# | `"tpot"` | (tN - t1) / (N - 1): time per output token; `None` for a single token, which has no gap | `None` |
# | `"latency"` | tN - arrived: end to end, up to the last token | `None` |
#
# **Count:** N tokens have N - 1 gaps, so TTFT and all gaps add up to the latency, and so do TTFT and N - 1 times TPOT.
# The check prints both sides.
#
# **Hint:** the gaps are `tokens[k] - tokens[k - 1]` for k from 1. Handle N = 0 before you take `tokens[0]`, and N = 1
# before you divide.
#
# **Trap (queue):** TTFT begins when the request *arrived*. Time in the queue counts. Measured from `scheduled`, an
# overloaded server looks as fast as an idle one.


# %% nbgrader={"grade_id": "request_metrics", "solution": true}
def request_metrics(arrived, scheduled, tokens):
    """Latency of one request: arrived and scheduled (or None) in seconds, tokens a list of times -> dict, see above."""
    ### BEGIN SOLUTION
    num_tokens = len(tokens)
    itl = [tokens[k] - tokens[k - 1] for k in range(1, num_tokens)]
    return {
        "arrived": arrived,
        "num_tokens": num_tokens,
        "queue": None if scheduled is None else scheduled - arrived,
        "ttft": tokens[0] - arrived if tokens else None,
        "itl": itl,
        "tpot": (tokens[-1] - tokens[0]) / (num_tokens - 1) if num_tokens > 1 else None,
        "latency": tokens[-1] - arrived if tokens else None,
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_ttft", "grade": true, "points": 1}
# property: TTFT runs from the arrival, so the queue is part of it; a request without tokens has no TTFT.
# question: From which moment does a user wait: from the request's arrival, or from when the engine begins with it?
# hint: queue = scheduled - arrived and ttft = first token - arrived; neither is the time on the clock itself. Without
#   a token there is no tokens[0]; never scheduled, there is nothing to subtract from.
# explanation: Arrived at 10.0, scheduled at 10.4, first token at 11.0. The queue is 0.4 s and the TTFT is 1.0 s, with
#   the queue in it; 0.6 s would be the prefill alone, and 11.0 a time on the clock. What has not happened has no
#   difference: None.
def check_first_token(arrived, scheduled, tokens, queue, ttft):
    print(f"arrived {arrived}, scheduled {scheduled}, tokens {tokens}")
    seen = unchanging(request_metrics)(arrived, scheduled, list(tokens))
    expected = {"arrived": arrived, "num_tokens": len(tokens), "queue": queue, "ttft": ttft}
    if not tokens:
        expected |= {"itl": [], "tpot": None, "latency": None}
    problem = first_difference(seen, to_yours(expected))
    assert problem is None, f"arrived {arrived}, scheduled {scheduled}, tokens {tokens}: {problem}"
    print(f"    {in_short(seen, ['queue', 'ttft'])}")


check_first_token(100.0, 100.25, [100.5, 100.75], queue=0.25, ttft=0.5)  # a short queue
check_first_token(100.0, 108.0, [108.25, 108.5], queue=8.0, ttft=8.25)  # the same work after a long one
check_first_token(100.0, 101.0, [], queue=1.0, ttft=None)  # aborted while its prompt was computed
check_first_token(100.0, None, [], queue=None, ttft=None)  # aborted in the queue
check_first_token(-1.0, 0.0, [0.5, 0.75], queue=1.0, ttft=1.5)  # a clock may pass 0
check_first_token(-2.0, -1.5, [0.0, 0.5], queue=0.5, ttft=2.0)
check_first_token(0.0, 0.0, [0.0, 0.5], queue=0.0, ttft=0.0)
draw_numbers = rng("check_ttft")
for num_tokens in (0, 2, 2, 5):
    arrived, queue = random_seconds(2000, draw_numbers) - 1000, 0.1 + random_seconds(5, draw_numbers)
    ttft = queue + 0.1 + random_seconds(1, draw_numbers)
    tokens = [arrived + ttft + 0.1 * k for k in range(num_tokens)]
    check_first_token(arrived, arrived + queue, tokens, queue, ttft if tokens else None)


# %% nbgrader={"grade_id": "check_gaps", "grade": true, "points": 2}
# property: N tokens have N - 1 gaps; TPOT is their mean; TTFT and the gaps add up to the latency; a lone token has no
#   TPOT.
# question: Three tokens: how many gaps are between them?
# hint: divide by N - 1 and not by N; for N = 1 the list is empty and TPOT is None, not 0.
# explanation: Arrived at 0.0, tokens at 1.0, 1.2, 1.6. The gaps are 0.2 and 0.4, two for three tokens; TPOT is 0.6 / 2
#   = 0.3. TTFT 1.0 and the gaps add up to 1.6, the latency. With one token there is no gap, and a mean of nothing is
#   not 0 but undefined.
def check_stream(arrived, tokens, itl, tpot, latency):
    seen = unchanging(request_metrics)(arrived, arrived + 0.25, list(tokens))
    problem = first_difference(seen, to_yours({"itl": itl, "tpot": tpot, "latency": latency}))
    assert problem is None, f"arrived {arrived}, tokens {tokens}: {problem}"
    gaps, total = from_yours(seen)["itl"], tokens[0] - arrived + sum(from_yours(seen)["itl"])
    print(
        f"tokens {len(tokens)}: gaps {[round(float(gap), 4) for gap in gaps]} s, {in_short(seen, ['tpot', 'latency'])}"
    )
    print(f"    TTFT and the gaps are {float(total):.4f} s together")


check_stream(50.0, [51.0, 51.5, 52.75, 53.25], itl=[0.5, 1.25, 0.5], tpot=0.75, latency=3.25)
check_stream(50.0, [51.0, 51.5], itl=[0.5], tpot=0.5, latency=1.5)
check_stream(-2.0, [-1.0, 0.0, 3.0], itl=[1.0, 3.0], tpot=2.0, latency=5.0)  # over the clock's 0
check_stream(-2.0, [-1.0, 0.0], itl=[1.0], tpot=1.0, latency=2.0)
check_stream(0.0, [0.0, 0.0], itl=[0.0], tpot=0.0, latency=0.0)  # 0.0 is a value, None is none
check_stream(50.0, [51.0], itl=[], tpot=None, latency=1.0)  # a lone token
check_stream(50.0, [51.0, 51.5, 51.5], itl=[0.5, 0.0], tpot=0.25, latency=1.5)  # two tokens at the same time
draw_numbers = rng("check_gaps")
for num_tokens in (1, 2, 3, random_int(4, 30, draw_numbers)):
    arrived, ttft = random_seconds(2000, draw_numbers) - 1000, 1 + random_seconds(1, draw_numbers)
    itl = [0.01 + random_seconds(0.5, draw_numbers) for _ in range(num_tokens - 1)]
    tokens = [arrived + ttft + sum(itl[:k]) for k in range(num_tokens)]
    check_stream(arrived, tokens, itl, sum(itl) / len(itl) if itl else None, ttft + sum(itl))

# %% [markdown] nbgrader={"grade_id": "text_load"}
# ## 3. The metrics of a load
#
# **Build** `load_metrics(requests)`. `requests` is a list of dicts as `request_metrics` returns them, in any order. Return
# a dict, in which times are in seconds and throughput in tokens per second:
#
# | key | value | if there is nothing to measure |
# |---|---|---|
# | `"num_tokens"` | output tokens of all requests | 0 |
# | `"duration"` | from the first arrival, even of a request without a token, to the last token | 0.0 if no token came |
# | `"throughput"` | num_tokens / duration | 0.0 if the duration is 0 |
# | `"mean_ttft"` | mean over the requests that have a TTFT | `None` |
# | `"mean_tpot"` | mean over the requests that have a TPOT: every *request* weighs the same | `None` |
# | `"mean_itl"` | mean over all gaps of all requests: every *gap* weighs the same | `None` |
# | `"p99_itl"` | 99th percentile of all gaps of all requests | `None` |
#
# A percentile of n values: sort them and go to place 0.99·(n - 1), counted from 0. If that lies between two
# values, take the point on the straight line between them. `np.percentile(values, 99)` does this.
#
# **Hint:** the time of a request's last token is arrived + latency. Test for a missing value with `is None`: a TTFT or a
# gap of 0.0 is a value like others.
#
# **Trap (mean of means):** mean ITL is not the mean of the requests' mean gaps. That is mean TPOT, a different number.
# Either may be the larger one; the cell below the checks shows both cases. The two names are often confused, so state
# the formula when you state a number.


# %% nbgrader={"grade_id": "load_metrics", "solution": true}
def load_metrics(requests):
    """Metrics of many requests together. requests: dicts as from request_metrics -> dict, see above."""
    ### BEGIN SOLUTION
    ttfts = [r["ttft"] for r in requests if r["ttft"] is not None]
    tpots = [r["tpot"] for r in requests if r["tpot"] is not None]
    gaps = [gap for r in requests for gap in r["itl"]]
    ends = [r["arrived"] + r["latency"] for r in requests if r["latency"] is not None]
    num_tokens = sum(r["num_tokens"] for r in requests)
    duration = max(ends) - min(r["arrived"] for r in requests) if ends else 0.0
    return {
        "num_tokens": num_tokens,
        "duration": duration,
        "throughput": num_tokens / duration if duration else 0.0,
        "mean_ttft": float(np.mean(ttfts)) if ttfts else None,
        "mean_tpot": float(np.mean(tpots)) if tpots else None,
        "mean_itl": float(np.mean(gaps)) if gaps else None,
        "p99_itl": float(np.percentile(gaps, 99)) if gaps else None,
    }
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_throughput", "grade": true, "points": 1}
# property: throughput is all tokens over the time from the first arrival to the last token, over all requests.
# question: When does the clock of the whole load start, and when does it stop?
# hint: the clock does not start at 0; the first to arrive may have no token; rates of requests do not add up, because
#   not all requests ran all the time.
# explanation: Request a arrives at 5.0 and has 4 tokens until 7.0; b arrives at 6.0 and has 6 tokens until 9.0. The
#   load took 9.0 - 5.0 = 4.0 s and made 10 tokens: 2.5 tokens/s. Each request's own rate is 4 / 2.0 = 2 and 6 / 3.0 =
#   2; their sum, 4, counts the time in which both ran twice.
def check_rate(requests, num_tokens, duration):
    throughput = num_tokens / duration if duration else 0.0
    ends = [None if r["latency"] is None else r["arrived"] + r["latency"] for r in requests]
    if len(requests) < 5:
        print(f"arrivals {[r['arrived'] for r in requests]}, last tokens {ends}")
    seen = unchanging(load_metrics)([to_yours(r) for r in requests])
    problem = first_difference(seen, {"num_tokens": num_tokens, "duration": duration, "throughput": throughput})
    assert problem is None, f"{len(requests)} requests: {problem}"
    print(f"    {in_short(seen, ['num_tokens', 'duration', 'throughput'])}")


check_rate([measured(100.0, 1.0, [0.5, 0.5])], num_tokens=3, duration=2.0)
load = [
    measured(100.0, None, []),  # the first to arrive; aborted, but it was part of the load
    measured(101.0, 2.0, [1.0, 5.0]),  # has the last token, at 109
    measured(104.0, 1.0, [1.0]),  # arrives last and ends first, at 106
]
check_rate(load, num_tokens=5, duration=9.0)
check_rate(load[::-1], num_tokens=5, duration=9.0)
check_rate([measured(100.0, None, [])], num_tokens=0, duration=0.0)
check_rate([], num_tokens=0, duration=0.0)
check_rate([measured(100.0, 0.0, [])], num_tokens=1, duration=0.0)  # a token in no time
check_rate([measured(-8.0, 2.0, [1.0]), measured(-6.0, 2.5, [])], num_tokens=3, duration=4.5)  # before the clock's 0
draw_numbers = rng("check_throughput")
for _ in range(4):
    load = random_requests(random_int(2, 20, draw_numbers), draw_numbers)
    end = max(r["arrived"] + r["latency"] for r in load if r["latency"] is not None)
    check_rate(load, sum(r["num_tokens"] for r in load), end - load[0]["arrived"])


# %% nbgrader={"grade_id": "check_means", "grade": true, "points": 2}
# property: mean TPOT weighs requests and mean ITL weighs gaps; requests without a value are left out; p99 interpolates.
# question: One request has 2 tokens and another has 100: how much does each count in mean TPOT, and how much in mean
#   ITL?
# hint: collect one list of the TPOTs that are not None and one list of all gaps; a list with nothing in it has no mean
#   and no percentile, so None; sort before you look for a percentile.
# explanation: Request a has the gaps [0.1, 0.1, 0.1], b has [0.5]. Mean TPOT is over requests: (0.1 + 0.5) / 2 = 0.3.
#   Mean ITL is over gaps: 0.8 / 4 = 0.2. A percentile of a few values lies between two of them, at the place that the
#   lab's text defines, and of no values there is none.
def check_load_means(requests, expected):
    if len(requests) < 5:
        print(f"gaps of each request {[r['itl'] for r in requests]}")
    seen = unchanging(load_metrics)([to_yours(r) for r in requests])
    problem = first_difference(seen, to_yours(expected))
    assert problem is None, f"gaps {[r['itl'] for r in requests]}: {problem}"
    print(f"    {in_short(seen, expected)}")


load = [
    measured(100.0, 1.0, [0.25, 0.75, 0.25, 0.25, 0.25, 0.25]),
    measured(100.0, 3.0, [1.0]),
    measured(101.0, 5.0, []),  # a lone token: a TTFT and no TPOT
    measured(102.0, None, []),  # no token: neither
]
p99 = 0.75 + (7 - 1) * 0.99 % 1 * (1.0 - 0.75)  # place 5.94 of the sorted gaps 0.25 (five times), 0.75, 1
check_load_means(load, {"mean_ttft": 3.0, "mean_tpot": (2.0 / 6 + 1.0) / 2, "mean_itl": 3.0 / 7, "p99_itl": p99})
check_load_means(load[::-1], {"mean_ttft": 3.0, "mean_tpot": (2.0 / 6 + 1.0) / 2, "mean_itl": 3.0 / 7, "p99_itl": p99})
check_load_means(load[2:], {"mean_ttft": 5.0, "mean_tpot": None, "mean_itl": None, "p99_itl": None})
check_load_means(load[3:], {"mean_ttft": None, "mean_tpot": None, "mean_itl": None, "p99_itl": None})
check_load_means([], {"mean_ttft": None, "mean_tpot": None, "mean_itl": None, "p99_itl": None})
check_load_means(load[1:2], {"mean_ttft": 3.0, "mean_tpot": 1.0, "mean_itl": 1.0, "p99_itl": 1.0})  # a single gap
zeros = [measured(100.0, 0.0, [0.0, 0.0]), measured(100.0, 1.0, [0.75, 0.75])]  # at once; 0.0 is a value like others
check_load_means(zeros, {"mean_ttft": 0.5, "mean_tpot": 0.375, "mean_itl": 0.375, "p99_itl": 0.75})
draw_numbers = rng("check_means")
for least in (3, 5, 12, 60):
    load = random_requests(random_int(least, 2 * least, draw_numbers), draw_numbers)
    gaps = sorted(gap for r in load for gap in r["itl"])
    place, tpots = 0.99 * (len(gaps) - 1), [r["tpot"] for r in load if r["itl"]]
    low, high = gaps[math.floor(place)], gaps[math.ceil(place)]
    ttfts = [r["ttft"] for r in load if r["ttft"] is not None]
    expected = {
        "mean_ttft": sum(ttfts) / len(ttfts),
        "mean_tpot": sum(tpots) / len(tpots),
        "mean_itl": sum(gaps) / len(gaps),
        "p99_itl": low + place % 1 * (high - low),
    }
    check_load_means(load, expected)

# %% [markdown] nbgrader={"grade_id": "text_two_means"}
# Here is the question from the top, in ms, and a second load for which the order is reversed. In the first, the
# stuttering request has few tokens, so it weighs more when requests are counted. In the second, the slow request has
# most of the tokens.

# %% nbgrader={"grade_id": "two_means"} inferlab={"where": "notebook"}
for gaps in (([10] * 9, [10, 10, 200]), ([100] * 9, [10] * 3)):
    load = [measured(0.0, 0.05, [gap / 1000 for gap in request_gaps]) for request_gaps in gaps]
    seen = from_yours(load_metrics([to_yours(request) for request in load]))
    tpot, itl = 1000 * seen["mean_tpot"], 1000 * seen["mean_itl"]
    print(f"gaps {gaps[0]} and {gaps[1]}: mean TPOT {tpot:.1f}, mean ITL {itl:.1f} ms")

# %% [markdown] nbgrader={"grade_id": "text_goodput"}
# ## 4. Goodput
#
# Tokens that come too late are of little use. An objective defines what is fast enough, for example TTFT at most 1 s
# and TPOT at most 50 ms. *Attainment* is the share of requests that meet both objectives, *goodput* the number of such
# requests per second.
#
# **Build** `goodput(requests, duration, max_ttft, max_tpot)`. `requests` and `duration` are as in part 3, the
# two limits in seconds. Return `{"attainment": share, "goodput": requests per second}`.
#
# - A request meets both objectives if its TTFT is at most `max_ttft` and its TPOT is at most `max_tpot`. Equal counts
#   as met.
# - A single token has no TPOT to miss: its TTFT decides. A request without a token meets no objective.
# - If the duration is 0, goodput is 0.0. If there is no request, raise `ValueError`: the share of an empty list is
#   undefined.
#
# **Hint:** count once how many meet both. Divided by the number of all requests it is the attainment, divided by the
# duration it is the goodput.
#
# **Trap (survivors):** a request that was aborted without a token stays in the denominator of the share. If such
# requests are left out, a server scores better the more users give up waiting.


# %% nbgrader={"grade_id": "goodput", "solution": true}
def goodput(requests, duration, max_ttft, max_tpot):
    """Share of requests that meet both objectives, and their number per second: {"attainment": ..., "goodput": ...}."""
    ### BEGIN SOLUTION
    if not requests:
        raise ValueError("expected at least one request, got none")
    good = 0
    for r in requests:
        in_time = r["ttft"] is not None and r["ttft"] <= max_ttft
        steady = r["tpot"] is None or r["tpot"] <= max_tpot
        good += in_time and steady
    return {"attainment": good / len(requests), "goodput": good / duration if duration else 0.0}
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_goodput", "grade": true, "points": 1}
# property: a request counts if it meets both objectives; all requests are in the denominator of the share.
# question: A request whose only token came in time: has it missed the limit on TPOT?
# hint: go through the cases: both met, one missed, a lone token, no token; equal to the limit is met. The share is of
#   all requests, also of those without a token; an empty list is a ValueError before anything is divided.
# explanation: Limits: TTFT 1.0, TPOT 0.1. (0.8, 0.1) counts, since equal is met; (0.8, 0.2) and (1.2, 0.1) do not; one
#   token at 0.8 counts, since there is no TPOT to miss; no token does not. That is 2 of 5: an attainment of 0.4. In 4 s
#   it is a goodput of 2 / 4 = 0.5 requests/s.
def check_good(requests, duration, limits, num_good):
    seen = unchanging(goodput)([to_yours(r) for r in requests], duration, *scaled(limits, YOUR_SECOND))
    expected = {"attainment": num_good / len(requests), "goodput": num_good / duration if duration else 0.0}
    problem = first_difference(seen, expected)
    assert problem is None, f"{len(requests)} requests, {num_good} of them good, in {duration:.2f} s: {problem}"
    print(f"{len(requests)} requests, {num_good} of them good, in {duration:.2f} s: {seen}")


load = [
    measured(100.0, 0.5, [0.25, 0.25]),  # meets both
    measured(100.0, 1.0, [0.5, 0.5]),  # both exactly at the limit
    measured(100.0, 1.5, [0.25, 0.25]),  # first token late
    measured(100.0, 0.5, [0.25, 1.25]),  # slow stream
    measured(100.0, 0.75, []),  # a lone token in time
    measured(100.0, 2.0, []),  # a lone token late
    measured(101.0, None, []),  # aborted without a token
    measured(101.0, None, []),
]
check_good(load, 2.0, (1.0, 0.5), num_good=3)
check_good(load[6:], 0.0, (1.0, 0.5), num_good=0)
check_good(load[:1], 0.0, (1.0, 0.5), num_good=1)
at_once = [measured(100.0, 0.0, [0.0]), measured(100.0, 0.0, []), measured(100.0, None, [])]
check_good(at_once, 4.0, (1.0, 0.5), num_good=2)  # a TTFT of 0.0 is a value, None is none
check_good(at_once, 4.0, (0.0, 0.0), num_good=2)  # equal is met, also at 0
check_good(load, 2.0, (0.0, 0.5), num_good=0)  # a limit of 0 is a limit
check_good(load, 2.0, (1.0, 0.0), num_good=1)
print("no requests: a ValueError is expected")
for duration in (1.0, 0.0):
    try:
        goodput([], duration, *scaled((1.0, 0.5), YOUR_SECOND))
    except ValueError as error:
        print("    ValueError:", error)
    else:
        raise AssertionError(f"goodput of no requests in {duration} s: expected ValueError, it returned")
draw_numbers = rng("check_goodput")
for _ in range(4):
    max_ttft, max_tpot = random_int(16, 80, draw_numbers) / 32, random_int(4, 12, draw_numbers) / 32  # exact sums
    load, num_good, above = [measured(100.0, None, [])], 0, (-(2.0**-5), 0.0, 2.0**-14, 0.5)
    for _ in range(random_int(8, 30, draw_numbers)):
        ttft, tpot = (above[random_int(0, 3, draw_numbers)] for _ in range(2))  # above the limit, by this much
        gaps = [[], [max_tpot + tpot], [max_tpot + tpot - 2.0**-5, max_tpot + tpot + 2.0**-5]]
        gaps = gaps[random_int(0, 2, draw_numbers)]
        load.append(measured(100.0, max_ttft + ttft, gaps))
        num_good += ttft <= 0 and (tpot <= 0 or not gaps)
    check_good(load, 1 + random_seconds(9, draw_numbers), (max_ttft, max_tpot), num_good)

# %% [markdown] nbgrader={"grade_id": "text_metrics"}
# ## 5. From events to metrics
#
# **Build** `metrics(events)`: combine parts 1 to 3. Return `{"requests": {request_id: result of request_metrics},
# "load": result of load_metrics for all of them}`.
#
# **Hint:** the keys of a timeline have the names of the arguments, so `request_metrics(**timeline)` passes each value
# to the argument of its name.


# %% nbgrader={"grade_id": "metrics", "solution": true}
def metrics(events):
    """Events (time in seconds, kind, request_id) -> {"requests": {request_id: dict}, "load": dict}."""
    ### BEGIN SOLUTION
    requests = {name: request_metrics(**timeline) for name, timeline in timelines(events).items()}
    return {"requests": requests, "load": load_metrics(list(requests.values()))}
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_metrics", "grade": true, "points": 1}
# property: metrics has an entry for every request, also without tokens, and the load's metrics of all of them.
# question: Which requests does the load consist of: those that got tokens, or all that arrived?
# hint: timelines, then request_metrics for each, then load_metrics of the list of all; leave none out.
# explanation: Three requests arrive, and one gets no token. There are three entries, and the load's numbers come from
#   the same three: what each part does with a missing value was decided in the parts. If this fails while their checks
#   pass, something is lost on the way between them.
def check_composed(events):
    seen = unchanging(metrics)(list(events))
    assert isinstance(seen, dict), f"expected a dict, saw {type(seen).__name__}"
    assert set(seen) == {"requests", "load"}, f"expected the keys requests and load, saw {sorted(map(str, seen))}"
    requests = {name: request_metrics(**timeline) for name, timeline in timelines(list(events)).items()}
    assert isinstance(seen["requests"], dict), f"requests: expected a dict, saw {type(seen['requests']).__name__}"
    names, served = set(seen["requests"]), {name for _, kind, name in events if kind == "token"}
    expected = sorted(served | set(requests))
    assert names == set(expected), f"expected the requests {expected}, saw {sorted(map(str, names))}"
    for name, expected in requests.items():
        assert_keys(f"request {name}", seen["requests"][name], measured(0.0, None, []))
        problem = first_difference(seen["requests"][name], expected)
        assert problem is None, f"request {name} is not what your request_metrics says: {problem}"
    assert_keys("the load", seen["load"], ["num_tokens", "duration", "throughput", *TIMES[5:]])
    problem = first_difference(seen["load"], load_metrics(list(requests.values())))
    assert problem is None, f"the load is not what your load_metrics says: {problem}"
    return seen


check_composed([])  # nothing recorded
events = [
    (7.0, "arrived", "cleo"),
    (8.0, "arrived", "anna"),
    (8.5, "arrived", "ben"),
    (9.0, "scheduled", "anna"),
    (9.0, "scheduled", "ben"),
    (10.0, "token", "anna"),
    (10.5, "token", "ben"),
    (11.0, "token", "anna"),
    (11.5, "finished", "ben"),
    (11.75, "aborted", "cleo"),
    (12.0, "token", "anna"),
]
seen = check_composed(events)
for name, request in seen["requests"].items():
    print(f"{name}: {request}")
print("load:", seen["load"])
draw_numbers = rng("check_metrics")
for _ in range(3):
    check_composed(random_events(random_int(6, 12, draw_numbers), draw_numbers))

# %% [markdown] nbgrader={"grade_id": "text_softmax"}
# ## 6. From logits to probabilities
#
# The second half. After each step the model gives for every request a row of *logits*: one number per token id, the
# larger the more likely. Sampling the next token turns a row into probabilities, filters out unlikely tokens, and
# draws. Each row belongs to a different request. The contents of one row must not affect another.
#
# **Build** `probabilities(logits, temperature)`: `logits` `[rows, vocab]` float32, `temperature` a number, int or float.
# Return the probabilities: `[rows, vocab]` float32, and each row sums to 1. Parts 7 to 9 take and return them in this
# form.
#
# - Above 0: softmax(logits / temperature) over each row. Below 1 this makes likely tokens likelier, above 1 it flattens
#   the distribution.
# - Temperature 0 is *greedy*: probability 1 for the largest logit of the row, 0 for all others. If several are equal,
#   the one with the lowest token id gets it.
# - A logit of -inf means "never": probability exactly 0. Each row has at least one finite logit. Logits may be as large
#   as 10 000 and temperatures as small as 0.00001. There may be one row, and as many ids as a real vocabulary has.
# - Compute in float32 at least: each probability may be off by a ten-thousandth of itself, which half precision is not
#   good enough for.
# - `logits` belongs to the caller and is not modified.
#
# **Hint:** subtracting the same number from all logits of a row does not change the softmax. With the row's largest
# logit subtracted, no exponent is above 0. `argmax` finds the first of equals.
#
# **Trap (overflow):** exp(100) is more than float32 can hold: it becomes inf, and inf / inf is NaN.


# %% nbgrader={"grade_id": "probabilities", "solution": true}
def probabilities(logits, temperature):
    """Softmax of logits / temperature over each row, [rows, vocab] float32; temperature 0: all on the largest logit."""
    ### BEGIN SOLUTION
    if temperature == 0:
        first = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter(1, first, 1.0)
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    weights = scores.exp()
    return weights / weights.sum(dim=-1, keepdim=True)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_softmax", "grade": true, "points": 1}
# property: each row is softmax(logits / temperature), also for huge logits, -inf and tiny temperatures.
# question: What is exp(1000) in float32, and what is exp(1000 - 1000)?
# hint: divide by the temperature; subtract each row's own largest value before exp, in a new tensor; sum over the row.
# explanation: The row [1000, 999] at temperature 1: exp overflows to infinity for both, and infinity / infinity is NaN.
#   Minus the row's largest it is [0, -1], with exps 1 and 0.368, so 0.731 and 0.269: the same shares, since a common
#   factor cancels. A logit of -inf gives exp(-inf) = 0. At a tiny temperature the divided logits are huge, and the same
#   holds; each row has a largest of its own.
def check_softmax_of(logits, temperature, expected):
    seen = probs_of("probabilities", unchanging(probabilities)(your_logits(logits), temperature), logits.shape)
    print(f"temperature {temperature}: {[[round(float(p), 4) for p in row] for row in seen[:2, :6]]}")
    if place := worst(seen, expected, 1e-4):
        raise AssertionError(f"temperature {temperature}: the probability of id {place[1]} in row {place[0]} is "
                             f"{float(seen[place]):.6g}, expected {float(expected[place]):.6g}")  # fmt: skip
    forbidden = int((seen[logits == -math.inf] != 0).sum())
    assert forbidden == 0, f"{forbidden} tokens with logit -inf have a probability above 0"


never = -math.inf
logits = torch.tensor([[2.0, 1.0, 0.0, never], [never, 3.0, never, 0.0]])
for temperature in (0.5, 1.0, 1, 2):
    weights = [[math.exp(x / temperature) for x in row] for row in logits.tolist()]
    check_softmax_of(logits.clone(), temperature, torch.tensor([[w / sum(row) for w in row] for row in weights]))
check_softmax_of(
    torch.tensor([[1e4, 1e4 - 1, 0.0], [-1e4, 0.0, -5e3]]),
    1.0,
    torch.tensor([[1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0.0], [0.0, 1.0, 0.0]]),
)
check_softmax_of(torch.tensor([[9998.0, 1e4, never], [3.0, 1.0, 2.0]]), 1e-5, torch.tensor([[0.0, 1, 0], [1, 0, 0]]))
low = torch.tensor([[-1e4, never, 1 - 1e4], [-1e4, never, never]])  # never is below any number
check_softmax_of(low, 1.0, low.double().softmax(-1).float())
close = torch.tensor([[0.0, 1e-5, -2e-5]])  # at the temperature 0.00001 no longer close
check_softmax_of(close, 1e-5, (close.double() / 1e-5).softmax(-1).float())
check_softmax_of(torch.tensor([[-7.0]]), 0.5, torch.tensor([[1.0]]))  # one row, one id
draw_numbers = rng("check_softmax")
for _ in range(4):
    rows, vocab = random_int(2, 5, draw_numbers), random_int(3, 40, draw_numbers)
    logits = 4 * torch.randn(rows, vocab, generator=draw_numbers)
    logits[:, 1:][torch.rand(rows, vocab - 1, generator=draw_numbers) < 0.2] = -math.inf
    temperature = 0.3 + random_seconds(2, draw_numbers)
    expected = (logits.double() / temperature).softmax(-1)
    check_softmax_of(logits, temperature, expected.float())
    whole = torch.randperm(vocab, generator=draw_numbers).float() + 1e4 - 50
    check_softmax_of(whole[None], 2.0, (whole[None].double() / 2).softmax(-1).float())
    check_softmax_of(whole[None], 1e-5, (whole == whole.max())[None].float())
for temperature in (3.0, 20.0, 500.0):
    logits = 2 * temperature * torch.randn(2, 12, generator=draw_numbers)
    check_softmax_of(logits, temperature, (logits.double() / temperature).softmax(-1).float())
large = 2 * torch.randn(2, 32_000 + random_int(0, 768, draw_numbers), generator=draw_numbers)
check_softmax_of(large, 0.8, (large.double() / 0.8).softmax(-1).float())


# %% nbgrader={"grade_id": "check_greedy", "grade": true, "points": 1}
# property: temperature 0 puts probability 1 on the largest logit of each row, the first one if several are equal.
# question: What would a division by a temperature of 0 give?
# hint: a case of its own, without a division; 1 at argmax(dim=-1) of each row and 0 elsewhere.
# explanation: Logits [2, 5, 5]: at temperature 0 all of the probability is at one of the two largest, not half at each;
#   which of them is the lab's rule. It is the limit for small temperatures only where one logit is the largest, so it
#   needs a rule of its own.
def check_greedy_of(logits, expected):
    for zero in (0, 0.0):
        seen = probs_of("probabilities", unchanging(probabilities)(your_logits(logits), zero), logits.shape)
        ids = [[i for i, p in enumerate(row) if p != 0] for row in seen.tolist()]
        print(f"temperature {zero}: tokens with a probability above 0, per row:", ids)
        assert ids == [[i] for i in expected], f"expected one token per row, {expected}, saw {ids}"
        largest = seen.amax(dim=-1).tolist()
        assert largest == [1.0] * len(seen), f"the probability must be exactly 1, saw {largest}"


check_greedy_of(torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 5.0], [-1e4, -math.inf, -2e4]]), [1, 0, 0])
check_greedy_of(torch.tensor([[-1e4] * 20 + [0.0] * 300]), [20])  # three hundred are equal
check_greedy_of(torch.tensor([[-3.0]]), [0])
draw_numbers = rng("check_greedy")
for _ in range(3):
    logits = torch.randint(-5, 5, (6, random_int(8, 80, draw_numbers)), generator=draw_numbers).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    check_greedy_of(logits, expected)
    check_greedy_of(logits * 1e3 - 1e4, expected)
    check_greedy_of(logits.masked_fill(logits < logits.amax(-1, keepdim=True) - 2, -math.inf), expected)

# %% [markdown] nbgrader={"grade_id": "text_top_k"}
# ## 7. Top-k
#
# A token of probability 0.0001 is drawn once in ten thousand, but vocabularies are large: all the unlikely tokens
# together are drawn often. Two filters remove them.
#
# **Build** `keep_top_k(probs, k)`: `probs` `[rows, vocab]` float32, each row sums to 1. Keep the k largest of each row,
# set the others to 0, and renormalize, so that each row sums to 1 again. Return `[rows, vocab]` float32; ids keep their
# positions.
#
# - Exactly k tokens are kept. Of equal ones at the cutoff, those with the lower ids stay.
# - `k = 0` switches the filter off: all are kept. A k larger than the vocabulary also keeps all.
# - As in part 6, there may be one row and a real vocabulary, and half precision is not good enough.
#
# **Hint:** `probs.sort(dim=-1, descending=True, stable=True)` returns values and ids and leaves equal values in
# the order of their ids. (`topk` promises nothing about equal ones.) `torch.zeros_like(probs).scatter(1, ids, values)`
# puts values back to their ids.
#
# **Trap (ties):** "keep whatever is at least as large as the k-th" keeps more than k where values are equal.


# %% nbgrader={"grade_id": "keep_top_k", "solution": true}
def keep_top_k(probs, k):
    """The k most likely tokens of each row, the rest 0, each row divided by its sum. [rows, vocab] -> the same."""
    ### BEGIN SOLUTION
    if k == 0:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter(1, ids[:, :k], ordered[:, :k])
    return kept / kept.sum(dim=-1, keepdim=True)
    ### END SOLUTION


# %% nbgrader={"grade_id": "kept_checks"}
# Given: how the checks of this part and the next test your result.


def check_kept(function, name, probs, limit, kept_ids):
    """kept_ids: per row the ids that must stay."""
    seen = probs_of(f"{name} {limit:g}", unchanging(function)(your_probs(probs), limit), probs.shape)
    seen_ids = [[i for i, p in enumerate(row) if p != 0] for row in seen.tolist()]
    if probs.shape[1] < 60:
        print(f"{name} {limit:g}: the ids {seen_ids} stay")
    for row, ids in enumerate(kept_ids):
        given = f"{name} {limit:g} of {in_row(probs[row].tolist())}"
        ids = sorted(ids)
        stay = f"expected the ids {in_row(ids)} to stay, saw {in_row(seen_ids[row])}"
        assert seen_ids[row] == ids, f"{given}: {stay}"
        expected = torch.zeros(probs.shape[1], dtype=torch.float64)
        expected[ids] = probs[row, ids].double() / probs[row, ids].double().sum()
        if place := worst(seen[row : row + 1], expected[None], 3e-5):
            raise AssertionError(f"{given}: expected {in_row(expected.tolist())}, saw {in_row(seen[row].tolist())}; id {place[1]} "
                                 f"has {float(seen[row, place[1]]):.6g}, expected {float(expected[place[1]]):.6g}")  # fmt: skip


# %% nbgrader={"grade_id": "check_top_k", "grade": true, "points": 1}
# property: exactly k tokens stay, of equal ones those with the lower ids; each row sums to 1; k = 0 keeps all.
# question: If three tokens are equally likely and k is 2, how many does a comparison with the k-th largest value keep?
# hint: sort by probability with stable=True, take the first k ids of each row, put their values back in place, and
#   divide each row by its own sum; k = 0 is a case of its own.
# explanation: Probabilities [0.25, 0.25, 0.25, 0.25], k = 2: every value equals the 2nd largest, so a comparison with
#   it keeps four. A sort decides which two; equal ones keep the order that the sort is told to keep. What stays sums to
#   0.5 and is divided by it: 0.5 each. Another row has another sum.
probs = torch.tensor([[0.125, 0.25, 0.25, 0.25, 0.125], [0.5, 0.0, 0.125, 0.25, 0.125]])
for k, kept in ((1, [[1], [0]]), (2, [[1, 2], [0, 3]]), (4, [[0, 1, 2, 3], [0, 2, 3, 4]])):
    check_kept(keep_top_k, "top-k", probs.clone(), k, kept)
everything = [[0, 1, 2, 3, 4], [0, 2, 3, 4]]
for k in (0, 5, 1000):
    check_kept(keep_top_k, "top-k", probs.clone(), k, everything)
even, one = torch.full((1, 64), 1 / 64), torch.tensor([[1.0]])  # one row: 64 equal ids, a single id
for k in (1, 33, 63):
    check_kept(keep_top_k, "top-k", even.clone(), k, [list(range(k))])
check_kept(keep_top_k, "top-k", one, 1, [[0]])
rounded = torch.tensor([[0.5, 0.25, 0.25 - 2.0**-22]])  # a sum that rounding left a little below 1
check_kept(keep_top_k, "top-k", rounded, 0, [[0, 1, 2]])
draw_numbers = rng("check_top_k")
for _ in range(4):
    vocab = random_int(4, 30, draw_numbers)
    weights = torch.randint(1, 6, (3, vocab), generator=draw_numbers).float()  # many are equal
    k = random_int(1, vocab - 1, draw_numbers)
    by_size = [sorted(range(vocab), key=lambda i, row=row: (-row[i], i)) for row in weights.tolist()]
    probs = weights / weights.sum(dim=-1, keepdim=True)
    check_kept(keep_top_k, "top-k", probs.clone(), k, [ids[:k] for ids in by_size])
    check_kept(keep_top_k, "top-k", probs.clone(), vocab + k, by_size)
k = random_int(30_000, 32_000, draw_numbers)
check_kept(keep_top_k, "top-k", torch.full((2, 2**15), 2.0**-15), k, [list(range(k))] * 2)

# %% [markdown] nbgrader={"grade_id": "text_top_p"}
# ## 8. Top-p
#
# k = 50 is too many where the model is confident, and too few where hundreds of tokens are plausible. Top-p (also
# called nucleus sampling) counts probability mass, not tokens.
#
# **Build** `keep_top_p(probs, p)`: of each row keep the smallest set of most likely tokens whose probabilities together
# reach `p` (`0 < p <= 1`). Set the others to 0 and renormalize. Return `[rows, vocab]` float32.
#
# - Reaching is enough: if the first two have exactly p together, these two are kept. Of equal ones at the cutoff, those
#   with the lower ids stay.
# - The most likely token is always kept, however small p is.
# - `p = 1` switches the filter off: every token is kept. Make it a special case, because a sum of rounded numbers can
#   reach 1 before the last token.
# - As in part 6, there may be one row and a real vocabulary. A sum of many numbers in half precision stops growing;
#   float32 is good enough here.
#
# **Hint:** sort as before. A token is kept if the mass *before* it is less than p. `cumsum` gives the mass up to and
# including each token.
#
# **Trap (the one that crosses):** the token with which the sum first reaches p is kept. Without it the set is too
# small: in a row of 0.6 and 0.4, p = 0.5 would leave nothing.


# %% nbgrader={"grade_id": "keep_top_p", "solution": true}
def keep_top_p(probs, p):
    """The smallest set of most likely tokens with mass p in each row, the rest 0, each row divided by its sum."""
    ### BEGIN SOLUTION
    if p == 1:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    kept = torch.zeros_like(probs).scatter(1, ids, ordered.masked_fill(mass_before >= p, 0.0))
    return kept / kept.sum(dim=-1, keepdim=True)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_top_p", "grade": true, "points": 2}
# property: the smallest set whose mass reaches p stays, the token that crosses p included; p = 1 keeps every token.
# question: The mass is 0.8 before a token and 1.0 with it, and p is 0.9: does the token belong to the set?
# hint: sort, then keep a token while the mass before it, its own not included, is below p; put the values back to
#   their ids; p = 1 is a case of its own.
# explanation: Sorted probabilities 0.5, 0.3, 0.2 and p = 0.9. The mass before each is 0, 0.5, 0.8: all are below 0.9,
#   so all three stay; without the third the set would have 0.8 < p. With p = 0.7 the mass before the third, 0.8, is not
#   below 0.7: two stay, as 0.625 and 0.375. At p = 1 rounding of the sum could drop a token at the end, so it is
#   decided before.
probs = torch.tensor([[0.125, 0.5, 0.25, 0.125], [0.25, 0.25, 0.25, 0.25]])  # sums of these are exact
for p, kept in (
    (1e-6, [[1], [0]]),
    (0.4, [[1], [0, 1]]),
    (0.5, [[1], [0, 1]]),
    (0.6, [[1, 2], [0, 1, 2]]),
    (0.8, [[0, 1, 2], [0, 1, 2, 3]]),
    (0.9, [[0, 1, 2, 3], [0, 1, 2, 3]]),
    (1.0, [[0, 1, 2, 3], [0, 1, 2, 3]]),
):
    check_kept(keep_top_p, "top-p", probs.clone(), p, kept)
sure = torch.tensor([[0.0, 30.0, 0.0]]).softmax(dim=-1)  # the second token alone: 1 in float32
check_kept(keep_top_p, "top-p", sure, 1.0, [[0, 1, 2]])
check_kept(keep_top_p, "top-p", sure, 1, [[0, 1, 2]])
rounded = torch.tensor([[0.5, 0.25, 0.25 - 2.0**-22]])  # a sum that rounding left a little below 1
check_kept(keep_top_p, "top-p", rounded, 1.0, [[0, 1, 2]])
even = torch.full((1, 64), 1 / 64)  # 64 equal ids
for p, num_kept in ((0.01, 1), (0.5, 32), (0.51, 33), (0.99, 64)):
    check_kept(keep_top_p, "top-p", even.clone(), p, [list(range(num_kept))])
check_kept(keep_top_p, "top-p", torch.tensor([[1.0]]), 0.5, [[0]])
draw_numbers = rng("check_top_p")
for _ in range(5):
    vocab = random_int(4, 12, draw_numbers)
    weights = torch.randint(1, 10, (3, vocab), generator=draw_numbers).float()
    by_size = [sorted(range(vocab), key=lambda i, row=row: (-row[i], i)) for row in weights.tolist()]
    probs = weights / weights.sum(dim=-1, keepdim=True)
    masses = [probs[row, ids].double().cumsum(0) for row, ids in enumerate(by_size)]
    middle = random_int(0, vocab - 2, draw_numbers)
    p = float(masses[0][middle] + masses[0][middle + 1]) / 2  # halfway through one of the first row's
    while min(float((mass - p).abs().min()) for mass in masses) < 1e-4:
        p -= 2e-4  # rounding would decide
    kept = [ids[: int((mass < p).sum()) + 1] for ids, mass in zip(by_size, masses, strict=True)]
    check_kept(keep_top_p, "top-p", probs.clone(), p, kept)
    check_kept(keep_top_p, "top-p", probs.clone(), 1e-4, [ids[:1] for ids in by_size])
for bits in (6, 9, 12, 14):  # p is between 0.97 and 1, and the last token is behind it
    halves = [2.0**-k for k in range(1, bits)] + [1.25 * 2.0**-bits, 0.75 * 2.0**-bits]  # exact sums
    order = torch.randperm(bits + 1, generator=draw_numbers).tolist()
    row, kept = torch.tensor([[halves[i] for i in order]]), [place for place, i in enumerate(order) if i < bits]
    check_kept(keep_top_p, "top-p", row, 1 - 1.5 * 2.0**-bits, [kept])
num_kept = random_int(30_000, 32_000, draw_numbers)
p = (num_kept - 0.5) / 2**15
check_kept(keep_top_p, "top-p", torch.full((2, 2**15), 2.0**-15), p, [list(range(num_kept))] * 2)

# %% [markdown] nbgrader={"grade_id": "text_draw"}
# ## 9. The draw
#
# Lay the tokens of a row side by side on a line, each as long as its probability, in the order of their *ids*. A number
# u in [0, 1) is a place on that line, and the token at that position is chosen. This is called inverse transform
# sampling. With u from a random generator each token comes up as often as its probability says.
#
# The order is a convention. Sorted by probability, every token would be drawn just as often, but the same u would give
# a different token, and so the same seed a different text. The engine draws in the order of ids; so do you.
#
# **Build** `draw(probs, u)`: `probs` `[rows, vocab]` float32, `u` `[rows]` float64, one number for each row. Return
# token ids `[rows]`, int64: in each row the first id whose cumulative probability (its own included) is *greater* than
# u times the row's sum.
#
# - u = 0 is possible. A token of probability 0 is never chosen, also not by u = 0.
# - Add up in float64, and leave u in float64. Between 0.5 and 1 the numbers of float32 are 2^-24 apart: of the tokens
#   that are shorter, some are drawn too often there and others never. Those of float16 are 2^-11 apart, and a vocabulary
#   has more tokens than that leaves places.
#
# **Hint:** `.double()`, `cumsum`, then count the ids whose cumulative probability is not greater: that many come before.
# `u[:, None]` turns u into a column, one entry per row.
#
# **Trap (rounding):** the probabilities may sum to a little less than 1. If you compare with u itself, a u close to 1
# is beyond the end of the line, and the result is no token, or the last one of the vocabulary, whatever its
# probability. The check exaggerates this with rows that sum to 0.75.


# %% nbgrader={"grade_id": "draw", "solution": true}
def draw(probs, u):
    """Inverse transform in the order of ids. probs [rows, vocab], u [rows] in [0, 1) -> token ids [rows] int64."""
    ### BEGIN SOLUTION
    cumulative = probs.double().cumsum(dim=-1)
    target = u[:, None] * cumulative[:, -1:]  # [rows, 1]
    return (cumulative <= target).sum(dim=-1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_draw", "grade": true, "points": 2}
# property: each row gets the first id whose cumulative probability exceeds its own u times the row's sum.
# question: Draw the probabilities as pieces of a line from 0 to 1: in which piece is u?
# hint: cumulative sums in the order of ids; compare with u * sum; > and not >=; every row has its own u.
# explanation: Probabilities [0.2, 0.5, 0.3] are pieces of a line, with their ends at the running sums; laid down in the
#   order of ids these are 0.2, 0.7 and 1.0. u = 0.1 falls into the first piece, 0.5 into the second, 0.95 into the
#   third; from which side the line is laid, and to which piece an edge belongs, stands in the lab's text. A row that
#   sums to 0.999 is a shorter line: u times its sum falls into a piece always.
def check_drawn(probs, u, expected, also=""):
    seen = unchanging(draw)(your_probs(probs), u)
    assert_tensor("draw", seen, (len(probs),), torch.int64)
    for row in range(len(probs)):
        given = f"probabilities {in_row(probs[row].tolist())}, u = {float(u[row]):.17g}"
        if len(probs) < 12 and probs.shape[1] < 60:
            print(f"{given}: token {int(seen[row])}")
        assert int(seen[row]) == expected[row], (
            f"row {row}, {given}: expected {expected[row]}, saw {int(seen[row])}{also}"
        )


below_1 = 1 - 2.0**-53  # the largest float64 below 1
line = [0.25, 0.0, 0.5, 0.25]
places = {0.0: 0, 0.2: 0, 0.25: 2, 0.5: 2, 0.7: 2, 0.75: 3, below_1: 3}
check_drawn(torch.tensor([line] * len(places)), float64(list(places)), list(places.values()))
check_drawn(torch.tensor([[0.0, 0.5, 0.5], [0.5, 0.5, 0.0]]), float64([0.0, below_1]), [1, 1])
check_drawn(torch.tensor([[1.0]]), float64([0.5]), [0])  # one row, one id
short = [0.25, 0.25, 0.25, 0.0]  # sums to 0.75
check_drawn(torch.tensor([short] * 4), float64([0.3, 0.5, 0.7, 0.9]), [0, 1, 2, 2])
halves, sum_of = [2.0**-k for k in range(1, 13)], 1 - 2.0**-12  # a line that is only a little short
check_drawn(torch.tensor([[*halves, 0.0]]), your_u(float64([1 - 2.0**-13 / sum_of])), [11])  # the middle of the last
# Long lines, on which each place is an exact number: u is in the middle of the token that must be drawn.
even, ids = torch.full((6, 2**15), 2.0**-15), [0, 1, 2049, 16_384, 20_001, 2**15 - 1]
check_drawn(even, your_u((float64(ids) + 0.5) / 2**15), ids)
tiny = [0.5] + [2.0**-30] * 4096 + [2.0**-k for k in range(18, 1, -1)]  # sums to 1
ids, narrow = (
    [1, 2, 3, 1000, 4095, 4096],
    "; most tokens here are so short that only float64 tells their ends apart",
)
check_drawn(torch.tensor([tiny] * 6), your_u(0.5 + (float64(ids) - 0.5) / 2**30), ids, narrow)
draw_numbers = rng("check_draw")
for _ in range(4):
    rows, vocab = 20, random_int(3, 50, draw_numbers)
    weights = torch.randint(0, 6, (rows, vocab), generator=draw_numbers).double()
    weights[:, random_int(0, vocab - 1, draw_numbers)] += 1
    expected = weights.multinomial(1, generator=draw_numbers)[:, 0]  # a token; then a u inside its interval
    end = weights.cumsum(dim=-1).gather(1, expected[:, None])[:, 0]
    inside = 0.1 + 0.8 * torch.rand(rows, generator=draw_numbers, dtype=torch.float64)
    u = (end - inside * weights.gather(1, expected[:, None])[:, 0]) / weights.sum(dim=-1)
    scale = 1 - 0.2 * torch.rand(rows, 1, generator=draw_numbers, dtype=torch.float64)
    probs = scale * weights / weights.sum(dim=-1, keepdim=True)
    check_drawn(probs.float(), your_u(u), expected.tolist())
ids = [random_int(0, 2**15 - 1, draw_numbers) for _ in range(6)]
check_drawn(even, your_u((float64(ids) + 0.5) / 2**15), ids)
ids = [random_int(1, 4096, draw_numbers) for _ in range(6)]
check_drawn(torch.tensor([tiny] * 6), your_u(0.5 + (float64(ids) - 0.5) / 2**30), ids, narrow)

# %% [markdown] nbgrader={"grade_id": "text_sample"}
# ## 10. The sampler
#
# **Build** `sample(logits, u, temperature, top_k, top_p)`: `logits` `[rows, vocab]` float32, `u` `[rows]` float64, and
# three numbers that apply to all rows. Return token ids `[rows]`, int64. In this order: temperature, top-k, top-p
# within what top-k left, draw.
#
# **Hint:** four calls. Temperature 0 needs no special case here: its row has one token, which is drawn for any u.
#
# **Trap (order):** top-p comes after the temperature. The temperature changes the masses, so it changes which tokens
# reach p. The first lines of the check show a row in which the order decides.


# %% nbgrader={"grade_id": "sample", "solution": true}
def sample(logits, u, temperature, top_k, top_p):
    """Next token of each row. logits [rows, vocab] float32, u [rows] in [0, 1) -> token ids [rows] int64."""
    ### BEGIN SOLUTION
    probs = probabilities(logits, temperature)
    probs = keep_top_k(probs, top_k)
    probs = keep_top_p(probs, top_p)
    return draw(probs, u)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_sample", "grade": true, "points": 2}
# property: temperature, top-k, top-p, draw, in this order; tokens come as often as they should; rows do not mix.
# question: Does top-p see the probabilities before top-k, or after it?
# hint: each filter gets what the one before it returned; make the checks of the four parts pass first. If they do and a
#   share is wrong, it is the order.
# explanation: Probabilities [0.4, 0.3, 0.2, 0.1], k = 2, p = 0.5. After top-k: [0.571, 0.429]; top-p then keeps one,
#   because 0.571 reaches 0.5. The other way round top-p keeps two, because 0.4 does not reach 0.5, and top-k leaves
#   both. So the order shows in how often tokens come.
def check_shares(weights, temperature, top_k, top_p, expected, num_rows=1000):
    """Draws from a row whose probabilities at this temperature are proportional to the weights."""
    logits = (torch.tensor([weights]).log() * temperature).repeat(num_rows, 1)
    tokens = unchanging(sample)(your_logits(logits), even_u(num_rows, rng("even")), temperature, top_k, top_p)
    seen, expected = shares_of(tokens, len(weights)), torch.tensor(expected) / sum(expected)
    shown, wanted = ([round(float(share), 3) for share in shares] for shares in (seen, expected))
    before = [round(weight / sum(weights), 3) for weight in weights]
    settings = f"probabilities {before} at temperature {temperature}, then top-k {top_k}, top-p {top_p}"
    print(f"{settings}: shares {shown}")
    off = float((seen - expected).abs().max())
    assert off < 0.002, f"{settings}: expected shares {wanted}, saw {shown}"


def check_rows(logits, u, settings, expected):
    """Every row's token, in one batch and with each row alone."""
    u = your_u(u)
    tokens = unchanging(sample)(your_logits(logits), u, *settings)
    assert_tensor("sample", tokens, (len(logits),), torch.int64)
    seen = tokens.tolist()
    assert seen == expected, f"temperature, top-k, top-p {settings}: expected tokens {expected}, saw {seen}"
    for row in range(min(3, len(logits))):
        alone = int(sample(your_logits(logits[row : row + 1].clone()), u[row : row + 1].clone(), *settings)[0])
        assert alone == expected[row], f"row {row} alone gets token {alone}, among other rows {expected[row]}"


check_shares([0.6, 0.3, 0.1], 1.0, 0, 0.7, [6.0, 3.0, 0.0])
check_shares([0.36, 0.09, 0.01], 0.5, 0, 0.7, [1.0, 0.0, 0.0])  # the same logits at temperature 0.5
check_shares([5.0, 1.9, 1.8, 1.3], 1.0, 2, 0.7, [1.0, 0.0, 0.0, 0.0])  # 5 of 5 + 1.9 reach 0.7
check_shares([1.0, 6.0, 2.0, 8.0, 3.0], 0.8, 4, 0.8, [0.0, 6.0, 0.0, 8.0, 3.0])
check_shares([1.0, 6.0, 2.0, 8.0, 3.0], 1.5, 0, 1.0, [1.0, 6.0, 2.0, 8.0, 3.0])
logits = torch.tensor([[2.0, 1.0, 5.0]]).log().repeat(3, 1)
check_rows(logits, float64([0.2, 0.3, 0.4]), (1.0, 0, 1.0), [0, 1, 2])
u = [round(float(place), 4) for place in your_u(float64([0.2, 0.3, 0.4]))]
print(f"probabilities in proportion to 2, 1, 5: u = {u} choose tokens 0, 1, 2")
logits = torch.tensor([[0.0, 9.0, 1.0], [1e4, 0.0, -math.inf], [0.0, 1.0, 2.0]])
for settings in ((0, 0, 1.0), (0, 2, 0.5), (1e-5, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-6)):
    check_rows(logits.clone(), float64([0.3, 0.9, 0.5]), settings, [1, 0, 2])
print("temperature 0, top-k 1 and a tiny top-p all choose the largest logit of each row")
from reference_impl.assembly.lab_parts import engine_probabilities

draw_numbers = rng("check_sample")
for vocab in (*(random_int(8, 40, draw_numbers) for _ in range(5)), 32_000):
    rows = 12 if vocab < 100 else 2
    temperature, top_k = 0.4 + random_seconds(1.5, draw_numbers), random_int(3, min(vocab, 60), draw_numbers)
    top_p = 0.5 + random_seconds(0.49, draw_numbers)
    near = [p for p in (top_p - 1e-4, top_p, top_p + 1e-4) if p <= 1]
    logits, u, expected = [], [], []
    while len(logits) < rows:
        row = 3 * torch.randn(1, vocab, generator=draw_numbers)
        less, exact, *more = (engine_probabilities(row.double(), temperature, top_k, p)[0] for p in near)
        token = int(exact.multinomial(1, generator=draw_numbers))
        if exact[token] < 0.01 or any(not torch.equal(less > 0, other > 0) for other in (exact, *more)):
            continue  # too close to a boundary: rounding would decide
        inside = 0.25 + random_seconds(0.5, draw_numbers)
        u.append(float(exact[: token + 1].sum() - inside * exact[token]))
        logits.append(row[0])
        expected.append(token)
    check_rows(torch.stack(logits), float64(u), (temperature, top_k, top_p), expected)
logits = 2 * torch.randn(1, 10, generator=draw_numbers)
u = torch.rand(5_000, generator=draw_numbers, dtype=torch.float64)
shares = shares_of(sample(your_logits(logits.repeat(len(u), 1)), u, 1.3, 0, 1.0), 10)
exact = engine_probabilities(logits.double(), 1.3)[0]
distance = float((shares - exact).abs().sum() / 2)  # total variation; about 0.02 by chance
assert distance < 0.05, f"5000 random draws: expected shares {exact.tolist()}, saw {shares.tolist()}"

# %% [markdown] nbgrader={"grade_id": "text_engine"}
# ## 11. Inside the engine: your sampler
#
# The engine asks a *sampler* for the next token of each request: a callable `(logits, requests)`. `SamplerBySettings`
# is one that looks up each request's temperature, top-k and top-p, and makes one call for all rows with the same
# settings; the cell below calls your `sample`. u is the engine's own: computed from the request's seed and the number
# of its tokens, so that a text depends neither on the other requests in its batch nor on when it runs.
#
# The engine's scheduler, model and cache stay as they are. The model continues with your token. The text must be that
# of the engine's own sampler, token for token. One exception: if u is so close to the boundary between two tokens that
# rounding decides which one it hits, both are accepted, and the model continues with the engine's.


# %% nbgrader={"grade_id": "engine_sampler"}
from reference_impl.assembly.lab_parts import (
    LabEngine,
    SamplerBySettings,
    course_llm,
    engine_draw,
    engine_probabilities,
)


def your_tokens(asked):
    """The tokens your `sample` chooses for rows with the same settings, each compared with the engine's token."""
    logits, u, settings = asked.logits, asked.u, asked.settings
    seen = sample(your_logits(logits.clone()), your_u(u.clone()), *settings)
    assert_tensor("sample", seen, (len(u),), torch.int64)
    for row, (token, own) in enumerate(zip(seen.tolist(), asked.expected, strict=True)):
        if token == own or token in possible_tokens(logits[row], float(u[row]), settings):
            continue
        wrong = first_wrong_part(logits[row : row + 1], u[row : row + 1], settings)
        raise AssertionError(f"temperature, top-k, top-p {settings}, u {float(u[row]):.6f}: the engine "
                             f"chooses token {own}, sample chose {token}: {wrong}")  # fmt: skip
    return asked.expected  # also yours, unless u is at a boundary


def possible_tokens(logits, u, settings):
    """Ids that u may give: two where u is within rounding of the boundary between them."""
    temperature, top_k, top_p = settings
    found = set()
    for nearby_p in (top_p - 1e-5, top_p + 1e-5):
        probs = engine_probabilities(logits[None].double(), temperature, top_k, nearby_p)[0]
        end = probs.cumsum(dim=-1)
        inside = (probs > 0) & (end - probs - 1e-4 < u) & (u < end + 1e-4)
        found.update(inside.nonzero()[:, 0].tolist())
    return found


def first_wrong_part(logits, u, settings):
    temperature, top_k, top_p = settings
    probs = engine_probabilities(logits, temperature)
    top = engine_probabilities(logits, temperature, top_k)
    kept = engine_probabilities(logits, temperature, top_k, top_p)
    for name, seen, expected in (
        ("probabilities", probabilities(your_logits(logits.clone()), temperature), probs),
        ("keep_top_k", keep_top_k(your_probs(probs.clone()), top_k), top),
        ("keep_top_p", keep_top_p(your_probs(top.clone()), top_p), kept),
    ):
        if not bool(((probs_of(name, seen, expected.shape) - expected).abs() < 1e-3).all()):
            return f"{name} gives other probabilities than the engine"
    if int(draw(your_probs(kept.clone()), your_u(u))[0]) != int(engine_draw(kept, u)[0]):
        return "the probabilities are right, draw chooses another token"
    return "the four parts are right, sample puts them together in another way"


def write(prompt, settings, sampler, num_tokens):
    """Token ids that the engine generates for each prompt. settings: per prompt (temperature, top_k, top_p, seed)."""
    engine = LabEngine(course_llm(), {"num_blocks": 64}, sampler=sampler)
    for temperature, top_k, top_p, number in settings:
        params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": number}
        engine.add(course_llm().encode(prompt), num_tokens, **params)
    return list(engine.run().values())


def check_written(prompt, settings, num_tokens):
    """Generates with and without your sampler, and compares; returns the texts."""
    seen, expected = (
        write(prompt, settings, sampler, num_tokens) for sampler in (SamplerBySettings(your_tokens), None)
    )
    for one, own, setting in zip(seen, expected, settings, strict=True):
        assert one == own, f"temperature, top-k, top-p, seed {setting}: the engine writes {own}, with yours {one}"
    return [course_llm().tokenizer.decode(tokens) for tokens in seen]


# %% nbgrader={"grade_id": "check_engine_sampler", "grade": true, "points": 1}
# property: with your sampler the engine writes the same text as with its own, for every temperature and seed.
# question: Which part does the message name, and which value of it did the engine use?
# hint: the message names the part that differs; make that part's own check pass first.
# explanation: The engine gives your sampler its logits and uniforms, and compares with its own token. One token that
#   differs changes all that follow, so only the first difference says something. If single checks pass and this fails,
#   look for what differs: a batch of several rows, each with its own parameters, and a vocabulary of thousands.
settings = [(0, 0, 1.0, 1), (0.7, 0, 0.9, 1), (0.7, 0, 0.9, 2), (1.0, 20, 1.0, 3), (1.3, 50, 0.7, 4)]
prompt = "def add(a, b):\n"
for (temperature, top_k, top_p, number), text in zip(settings, check_written(prompt, settings, 8), strict=True):
    print(f"temperature {temperature}, top-k {top_k}, top-p {top_p}, seed {number}: {text!r}")
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_engine_sampler")
settings = [(0, 0, 1.0, 1)]
for case in range(3):
    temperature, top_p = 0.5 + random_seconds(1, draw_numbers), 0.6 + random_seconds(0.39, draw_numbers)
    settings.append((temperature, (0, random_int(2, 60, draw_numbers))[case % 2], top_p, seed(f"engine {case}")))
check_written("class Reader:\n    def read(self):\n", settings, 4)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_engine_metrics"}
# ## 12. Inside the engine: your metrics
#
# The engine records a trace of its steps. `events_of` turns such a trace into the events of part 1. The check runs a
# small load in which requests queue, one is aborted in the queue and one has a single token. It uses a clock that
# advances whenever it is read, and compares your `metrics` with the engine's.


# %% nbgrader={"grade_id": "engine_events"}
from reference_impl.assembly.lab_parts import MovingClock, events_of


def run_load(prompts, settings, num_tokens, sampler=None, clock=None):
    """Serves prompts two at a time; the third and later ones arrive while it runs; the last is aborted in the queue.

    settings: per prompt (temperature, top_k, top_p, seed). Returns the engine, with its trace.
    """
    engine = LabEngine(course_llm(), {"num_blocks": 64, "max_num_seqs": 2}, sampler=sampler, clock=clock)
    for i, (prompt, n) in enumerate(zip(prompts, num_tokens, strict=True)):
        temperature, top_k, top_p, number = settings[i]
        params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": number}
        engine.add(course_llm().encode(prompt), n, f"request-{i}", **params)
        if i > 0:
            engine.step()
    engine.abort(f"request-{len(prompts) - 1}")
    engine.run()
    return engine


# %% nbgrader={"grade_id": "check_engine_metrics", "grade": true, "points": 1}
# property: from the engine's trace your metrics are what the engine's own metrics are.
# question: Which request does the message name, and was it preempted, or aborted, or without a token?
# hint: the message names the request and the number that differs; make the check of that part pass first.
# explanation: The trace has one clock for all requests and events of all of them mixed. If one number of one request
#   differs, write down its own events in order, and compute the number by hand as in the checks above; the event that
#   your loop reads otherwise is the fault.
def check_run(num_tokens, start):
    prompts, greedy = ["x = "] * len(num_tokens), [(0, 0, 1.0, 0)] * len(num_tokens)
    engine = run_load(prompts, greedy, num_tokens, clock=MovingClock(start))
    seen, own = metrics(events_of(engine.trace)), engine.trace.workload()
    assert isinstance(seen, dict), f"expected a dict, saw {type(seen).__name__}"
    assert set(seen) == {"requests", "load"}, f"expected the keys requests and load, saw {sorted(map(str, seen))}"
    assert isinstance(seen["requests"], dict), f"requests: expected a dict, saw {type(seen['requests']).__name__}"
    names = {f"request-{i}" for i in range(len(num_tokens))}
    assert set(seen["requests"]) == names, f"expected the requests {sorted(names)}, saw {sorted(seen['requests'])}"
    for name in sorted(names):
        m, request = engine.trace.metrics(name), seen["requests"][name]
        expected = {"num_tokens": m.num_output_tokens, "queue": m.queue, "ttft": m.ttft, "itl": list(m.itl),
                    "tpot": m.tpot, "latency": m.latency}  # fmt: skip
        problem = first_difference(request, to_yours(expected))
        assert problem is None, f"{name}: {problem}"
    expected = {
        "num_tokens": own.num_output_tokens,
        "duration": own.duration,
        "throughput": own.throughput,
        "mean_ttft": sum(own.ttft) / len(own.ttft),
        "mean_tpot": sum(own.tpot) / len(own.tpot),
        "mean_itl": sum(own.itl) / len(own.itl),
        "p99_itl": float(np.percentile(own.itl, 99)),
    }
    problem = first_difference(seen["load"], to_yours(expected))
    assert problem is None, f"the load: {problem}"
    return seen


load = check_run(num_tokens=[5, 3, 6, 1, 5], start=1000.0)
for name, request in load["requests"].items():
    print(f"{name}: {in_short(request, ['queue', 'ttft', 'num_tokens'])}")
print(in_short(load["load"], ["mean_ttft", "throughput"]))
### BEGIN HIDDEN TESTS
draw_numbers = rng("check_engine_metrics")
num_tokens = [random_int(2, 4, draw_numbers), random_int(2, 4, draw_numbers), 1, random_int(2, 4, draw_numbers), 5]
check_run(num_tokens, start=100 + random_seconds(900, draw_numbers))
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_report"}
# ## 13. Your engine generates, and you measure it
#
# Now with the real clock: your sampler chooses every token, your metrics read the trace. Two requests run at a time, so
# the later ones wait; the last is aborted while it waits. Look at how much of each TTFT is queue, and at how few
# requests meet an objective of 50 ms. Change temperatures and seeds and run it again. The seconds depend on this
# machine and are not checked; they include the engine's own sampler, which `SamplerBySettings` runs in every step for
# comparison. The model is a small one trained for this course on Python code: its output has the form of code and
# little meaning.

# %% nbgrader={"grade_id": "report"} inferlab={"where": "notebook"}
prompts = [
    "def add(a, b):\n",
    "class Stack:\n    def push(self, item):\n        ",
    "import ",
    "# The number of ",
    "for line in ",
    "while ",
]
settings = [
    (0.7, 0, 0.9, 7),
    (0.7, 0, 0.9, 8),
    (0.9, 40, 1.0, 9),
    (0.9, 0, 0.9, 10),
    (1.1, 0, 0.9, 11),
    (1, 0, 1.0, 12),
]
engine = run_load(prompts, settings, [32, 24, 24, 16, 16, 16], sampler=SamplerBySettings(your_tokens))
result = metrics(events_of(engine.trace))
for prompt, (temperature, *_), tokens in zip(prompts, settings, engine.outputs.values(), strict=True):
    if tokens:
        print(f"--- temperature {temperature}\n{prompt}{course_llm().tokenizer.decode(tokens)}")


def milliseconds(value):
    return "      -" if value is None else f"{1000 * value:7.1f}"


print(f"\n{'in ms':12s}{'tokens':>7s}{'queue':>9s}{'TTFT':>9s}{'TPOT':>9s}{'latency':>9s}")
for name, request in result["requests"].items():
    request = from_yours(request)
    columns = [milliseconds(request[key]) for key in ("queue", "ttft", "tpot", "latency")]
    print(f"{name:12s}{request['num_tokens']:7d}  " + "  ".join(columns))
load = from_yours(result["load"])
print(f"\n{load['num_tokens']} tokens in {load['duration']:.2f} s: {load['throughput']:.0f} tokens/s")
print(f"mean TTFT {milliseconds(load['mean_ttft'])}, mean TPOT {milliseconds(load['mean_tpot'])}, ", end="")
print(f"mean ITL {milliseconds(load['mean_itl'])}, p99 ITL {milliseconds(load['p99_itl'])} ms")
limits = scaled((0.05, 0.05), YOUR_SECOND)
good = goodput(list(result["requests"].values()), load["duration"], *limits)
print(f"TTFT and TPOT at most 50 ms: {good['attainment']:.0%} of the requests, {good['goodput']:.1f} a second")

# %% [markdown] nbgrader={"grade_id": "text_loop"}
# ## 14. The loop itself
#
# Everything an engine does for one request, without the engine: run the model, take the last logits, choose a token,
# append it, repeat. It recomputes the whole sequence for every token; lab 02 avoids that. The bars show how the
# temperature changes the distribution of the first token.

# %% nbgrader={"grade_id": "loop"} inferlab={"where": "notebook"}
from reference_impl.features.baselines.contiguous_cache import ContiguousAttention, ContiguousKVCache
from reference_impl.features.baselines.ragged import ragged_batch

decoder = course_llm().engine.model


@torch.inference_mode()
def last_logits(tokens):
    """Logits [1, vocab] after the last of the tokens, with no state from earlier calls."""
    cache = ContiguousKVCache(decoder, rows=1, max_len=len(tokens))
    batch = ragged_batch([(tokens, 0)], len(tokens), decoder.device)
    return decoder(batch, cache, ContiguousAttention(decoder.config.head_dim**-0.5))


tokens, generator = course_llm().encode("def is_even(number):\n    return "), torch.Generator().manual_seed(0)
logits = last_logits(tokens)
for temperature in (0.5, 1.0, 2.0):
    print(f"temperature {temperature}")
    probs = probs_of("probabilities", probabilities(your_logits(logits), temperature), logits.shape)
    for p, token in zip(*(x[0].tolist() for x in probs.topk(5)), strict=True):
        print(f"    {course_llm().tokenizer.decode([token])!r:14}{p:6.3f} {'#' * round(60 * p)}")
for _ in range(24):
    u = torch.rand(1, generator=generator, dtype=torch.float64)
    tokens.append(int(sample(your_logits(last_logits(tokens)), u, 0.7, 0, 0.9)[0]))
print(course_llm().tokenizer.decode(tokens))

# %% [markdown] nbgrader={"grade_id": "text_milestone"}
# ## 15. Your sampler serves a text
#
# The engine runs the model, and every token of the text is chosen by your `sample`. Your `metrics` measures it. With all
# checks passed, `inferlab lab check` shows this, too.

# %% nbgrader={"grade_id": "milestone"} inferlab={"where": "milestone"}
from reference_impl.assembly.lab_parts import DEMO_PROMPT, show_served

engine = LabEngine(course_llm(), {"num_blocks": 64}, sampler=SamplerBySettings(your_tokens))
engine.add(course_llm().encode(DEMO_PROMPT), 19)
engine.run()
show_served("Your sampler just chose every token of this text", engine, course_llm())
ttft = from_yours(metrics(events_of(engine.trace))["requests"]["0"])["ttft"]
print(f"By your metrics the first token came after {1000 * ttft:.0f} ms.")

# %% [markdown] nbgrader={"grade_id": "extensions"}
# ## Further (not graded)
#
# Add cells below and try one.
#
# - **What a client sees.** A server sends two tokens at a time. What do the client's gaps look like, and what is the
#   mean ITL then, compared with TPOT?
# - **Min-p.** Keep the tokens whose probability is at least m times that of the most likely one. For which rows does it
#   keep more tokens than top-p, for which fewer?
# - **Two at a time, or eight.** Change `max_num_seqs` in `run_load`. What happens to TTFT, TPOT and throughput?
#   (Lab 03.)
# - **Without sorting.** Draw with the largest of log(p) plus Gumbel noise, -log(-log(u)) with one u per token. Is the
#   distribution the same? Is the text?
