# Generators, reduce, recursion and heaps; no index is counted by hand, and rows are drawn one by one by bisection.

# %% nbgrader={"grade_id": "timelines"}
from collections import ChainMap
from functools import reduce


def timelines(events):
    def follow(found, event):
        time, kind, request_id = event
        known = found.get(request_id)
        match kind:
            case "arrived":
                return found | {request_id: {"arrived": time, "scheduled": None, "tokens": []}}
            case "scheduled" if known["scheduled"] is None:
                return found | {request_id: known | {"scheduled": time}}
            case "token":
                return found | {request_id: known | {"tokens": [*known["tokens"], time]}}
        return found

    return reduce(follow, events, {})


# %% nbgrader={"grade_id": "request_metrics"}
def gaps_of(tokens):
    """Recursive: the first gap, and those of the rest."""
    if len(tokens) < 2:
        return []
    first, second, *rest = tokens
    return [second - first, *gaps_of([second, *rest])]


def request_metrics(arrived, scheduled, tokens):
    described = {"arrived": arrived, "num_tokens": len(tokens), "itl": gaps_of(tokens)}
    described["queue"] = scheduled - arrived if scheduled is not None else None
    described["ttft"], described["latency"], described["tpot"] = None, None, None
    match tokens:
        case [first]:
            described["ttft"] = described["latency"] = first - arrived
        case [first, *_, last]:
            described["ttft"], described["latency"] = first - arrived, last - arrived
            described["tpot"] = (last - first) / (len(tokens) - 1)
    return ChainMap(described).maps[0]


# %% nbgrader={"grade_id": "load_metrics"}
import heapq
import math
from fractions import Fraction


def load_metrics(requests):
    def values(key):
        yield from (r[key] for r in requests if r[key] is not None)

    def mean(numbers):
        numbers = [Fraction(x) for x in numbers]
        return float(sum(numbers) / len(numbers)) if numbers else None

    gaps = [gap for r in requests for gap in r["itl"]]
    tail = None
    if gaps:
        place = 0.99 * (len(gaps) - 1)
        above = heapq.nlargest(len(gaps) - math.floor(place), gaps)  # the last is at or below the place
        tail = above[-1] + (place - math.floor(place)) * ((above[-2] if len(above) > 1 else above[-1]) - above[-1])
    last = max((r["arrived"] + r["latency"] for r in requests if r["latency"] is not None), default=None)
    duration = 0.0 if last is None else last - min(values("arrived"))
    tokens = sum(values("num_tokens"))
    try:
        throughput = tokens / duration
    except ZeroDivisionError:
        throughput = 0.0
    return {
        "num_tokens": tokens,
        "duration": duration,
        "throughput": throughput,
        "mean_ttft": mean(values("ttft")),
        "mean_tpot": mean(values("tpot")),
        "mean_itl": mean(gaps),
        "p99_itl": tail,
    }


# %% nbgrader={"grade_id": "goodput"}
def goodput(requests, duration, max_ttft, max_tpot):
    def good(request):
        if request["num_tokens"] == 0:
            return False
        return request["ttft"] <= max_ttft and (request["num_tokens"] == 1 or request["tpot"] <= max_tpot)

    if len(requests) < 1:
        raise ValueError
    met = len([*filter(good, requests)])
    return {"attainment": met / len(requests), "goodput": met / duration if duration > 0 else 0}


# %% nbgrader={"grade_id": "probabilities"}
import torch


def probabilities(logits, temperature):
    if not temperature:
        ids = torch.arange(logits.shape[1]).expand_as(logits)
        first = ids.masked_fill(logits < logits.amax(1, keepdim=True), logits.shape[1]).amin(1, keepdim=True)
        return (ids == first).float()
    return torch.stack([(row.double() / temperature).log_softmax(0).exp().float() for row in logits])


# %% nbgrader={"grade_id": "keep_top_k"}
def by_likelihood(row):
    """Ids, the most likely first, of equals the lower."""
    return sorted(range(len(row)), key=row.__getitem__, reverse=True)


def keep_top_k(probs, k):
    def rows():
        for row in probs.tolist():
            kept = [0.0] * len(row)
            for i in by_likelihood(row)[: k or len(row)]:
                kept[i] = row[i]
            total = math.fsum(kept)
            yield [x / total for x in kept]

    return torch.tensor([*rows()])


# %% nbgrader={"grade_id": "keep_top_p"}
from itertools import accumulate, takewhile


def keep_top_p(probs, p):
    result = torch.zeros(probs.shape)
    for row, out in zip(probs.tolist(), result, strict=True):
        ids = by_likelihood(row)
        before = accumulate((row[i] for i in ids), initial=0.0)
        num_kept = (
            len(row)
            if p == 1
            else len([*takewhile(lambda mass: mass < p, (mass for _, mass in zip(ids, before, strict=False)))])
        )
        kept = ids[:num_kept]
        out[kept] = torch.tensor([row[i] for i in kept], dtype=torch.float64).div(sum(row[i] for i in kept)).float()
    return result


# %% nbgrader={"grade_id": "draw"}
from bisect import bisect_right


def draw(probs, u):
    def tokens():
        for row, place in zip(probs.tolist(), u.tolist(), strict=True):
            ends = [*accumulate(row)]
            yield bisect_right(ends, place * ends[-1])

    return torch.tensor([*tokens()], dtype=torch.int64)
