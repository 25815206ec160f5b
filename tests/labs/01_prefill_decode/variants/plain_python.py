# Number by number, in lists and loops, with the standard library only; one search through the events for each request.

# %% nbgrader={"grade_id": "timelines"}
def timelines(events):
    result = {}
    for start, kind, request_id in events:
        if kind != "arrived":
            continue
        scheduled = [time for time, kind, owner in events if kind == "scheduled" and owner == request_id]
        tokens = [time for time, kind, owner in events if kind == "token" and owner == request_id]
        result[request_id] = {"tokens": tokens, "arrived": start, "scheduled": min(scheduled, default=None)}
    return result


# %% nbgrader={"grade_id": "request_metrics"}
def request_metrics(arrived, scheduled, tokens):
    result = {
        "arrived": arrived,
        "num_tokens": 0,
        "itl": [],
        "queue": None,
        "ttft": None,
        "tpot": None,
        "latency": None,
    }
    if scheduled is not None:
        result["queue"] = scheduled - arrived
    previous = None
    for time in tokens:
        result["num_tokens"] += 1
        result["latency"] = time - arrived
        if previous is None:
            result["ttft"] = time - arrived
        else:
            result["itl"].append(time - previous)
            result["tpot"] = sum(result["itl"]) / len(result["itl"])
        previous = time
    return result


# %% nbgrader={"grade_id": "load_metrics"}
import math


def load_metrics(requests):
    def mean(values):
        return sum(values) / len(values) if values else None

    gaps, first, last, num_tokens = [], math.inf, -math.inf, 0
    for request in requests:
        first = min(first, request["arrived"])
        if request["num_tokens"]:
            last = max(last, request["arrived"] + request["latency"])
        num_tokens += request["num_tokens"]
        gaps.extend(request["itl"])
    gaps.sort()
    duration = last - first if num_tokens else 0.0
    p99 = None
    if gaps:
        place = (len(gaps) - 1) * 99 / 100
        below, part = int(place), place - int(place)
        above = min(below + 1, len(gaps) - 1)
        p99 = gaps[below] * (1 - part) + gaps[above] * part
    return {
        "p99_itl": p99,
        "mean_itl": mean(gaps),
        "mean_tpot": mean([r["tpot"] for r in requests if r["num_tokens"] >= 2]),
        "mean_ttft": mean([r["ttft"] for r in requests if r["num_tokens"] >= 1]),
        "throughput": num_tokens / duration if duration > 0 else 0.0,
        "duration": duration,
        "num_tokens": num_tokens,
    }


# %% nbgrader={"grade_id": "goodput"}
def goodput(requests, duration, max_ttft, max_tpot):
    if len(requests) == 0:
        raise ValueError("no requests")
    good = []
    for request in requests:
        if request["num_tokens"] == 0 or request["ttft"] > max_ttft:
            continue
        if request["num_tokens"] > 1 and request["tpot"] > max_tpot:
            continue
        good.append(request)
    return {"goodput": 0.0 if duration == 0 else len(good) / duration, "attainment": len(good) / len(requests)}


# %% nbgrader={"grade_id": "metrics"}
def metrics(events):
    requests = {}
    for request_id, timeline in timelines(events).items():
        requests[request_id] = request_metrics(timeline["arrived"], timeline["scheduled"], timeline["tokens"])
    return {"load": load_metrics([requests[request_id] for request_id in requests]), "requests": requests}


# %% nbgrader={"grade_id": "probabilities"}

import torch


def probabilities(logits, temperature):
    rows = []
    for row in logits.tolist():
        largest = max(row)
        if temperature == 0:
            rows.append([1.0 if i == row.index(largest) else 0.0 for i in range(len(row))])
            continue
        weights = [math.exp((x - largest) / temperature) for x in row]
        total = sum(weights)
        rows.append([w / total for w in weights])
    return torch.tensor(rows)


# %% nbgrader={"grade_id": "keep_top_k"}


def keep_top_k(probs, k):
    rows = []
    for row in probs.tolist():
        ids = sorted(
            range(len(row)), key=lambda i, row=row: -row[i]
        )  # sorted() is stable: of equals the lower id first
        kept = set(ids[:k] if k > 0 else ids)
        total = sum(row[i] for i in kept)
        rows.append([row[i] / total if i in kept else 0.0 for i in range(len(row))])
    return torch.tensor(rows)


# %% nbgrader={"grade_id": "keep_top_p"}


def keep_top_p(probs, p):
    rows = []
    for row in probs.tolist():
        kept, mass = set(), 0.0
        for i in sorted(range(len(row)), key=lambda i, row=row: (-row[i], i)):
            if p < 1 and mass >= p:
                break
            kept.add(i)
            mass += row[i]
        rows.append([row[i] / mass if i in kept else 0.0 for i in range(len(row))])
    return torch.tensor(rows)


# %% nbgrader={"grade_id": "draw"}
import itertools


def draw(probs, u):
    tokens = []
    for row, place in zip(probs.tolist(), u.tolist(), strict=True):
        target = place * sum(row)
        ends = itertools.accumulate(row)
        tokens.append(next((i for i, mass in enumerate(ends) if mass > target), len(row) - 1))
    return torch.tensor(tokens)


# %% nbgrader={"grade_id": "sample"}
def sample(logits, u, temperature, top_k, top_p):
    return draw(keep_top_p(keep_top_k(probabilities(logits, temperature), top_k), top_p), u)
