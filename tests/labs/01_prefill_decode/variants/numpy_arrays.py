# Everything in NumPy; what a request is described by are NumPy numbers, and the sampler counts in float64.

# %% nbgrader={"grade_id": "timelines"}
from collections import defaultdict


def timelines(events):
    times = defaultdict(lambda: defaultdict(list))
    for time, kind, request_id in events:
        times[request_id][kind].append(time)
    return {
        request_id: {
            "arrived": kinds["arrived"][0],
            "scheduled": kinds["scheduled"][0] if kinds["scheduled"] else None,
            "tokens": kinds["token"],
        }
        for request_id, kinds in times.items()
    }


# %% nbgrader={"grade_id": "request_metrics"}
import numpy as np


def request_metrics(arrived, scheduled, tokens):
    times = np.array(tokens, dtype=np.float64)
    gaps = np.diff(times)
    return {
        "arrived": arrived,
        "num_tokens": len(times),
        "queue": scheduled - arrived if scheduled is not None else None,
        "ttft": times[0] - arrived if len(times) else None,
        "itl": gaps.tolist(),
        "tpot": gaps.mean() if len(gaps) else None,
        "latency": times[-1] - arrived if len(times) else None,
    }


# %% nbgrader={"grade_id": "load_metrics"}


def load_metrics(requests):
    def column(key):
        return np.array([r[key] for r in requests if r[key] is not None], dtype=np.float64)

    def mean(values):
        return values.mean() if len(values) else None

    gaps = np.concatenate([np.array(r["itl"], dtype=np.float64) for r in requests] or [np.empty(0)])
    served = [r for r in requests if r["num_tokens"]]
    num_tokens = int(column("num_tokens").sum())
    duration = max((r["arrived"] + r["latency"] for r in served), default=0.0)
    duration -= column("arrived").min() if served else 0.0
    return {
        "num_tokens": num_tokens,
        "duration": duration,
        "throughput": np.divide(num_tokens, duration) if duration else 0.0,
        "mean_ttft": mean(column("ttft")),
        "mean_tpot": mean(column("tpot")),
        "mean_itl": mean(gaps),
        "p99_itl": np.quantile(gaps, 0.99) if len(gaps) else None,
    }


# %% nbgrader={"grade_id": "goodput"}


def goodput(requests, duration, max_ttft, max_tpot):
    if not requests:
        raise ValueError("expected requests, got none")
    ttft = np.array([np.inf if r["ttft"] is None else r["ttft"] for r in requests])
    tpot = np.array([0.0 if r["tpot"] is None else r["tpot"] for r in requests])
    good = (ttft <= max_ttft) & (tpot <= max_tpot)
    return {"attainment": good.mean(), "goodput": good.sum() / duration if duration else 0.0}


# %% nbgrader={"grade_id": "metrics"}
def metrics(events):
    requests = {}
    for request_id, timeline in timelines(events).items():
        requests[request_id] = request_metrics(**timeline)
    return {"load": load_metrics(list(requests.values())), "requests": requests}


# %% nbgrader={"grade_id": "probabilities"}
import torch


def probabilities(logits, temperature):
    x = logits.numpy().astype(np.float64)
    if temperature == 0:
        weights = np.arange(x.shape[1])[None] == x.argmax(axis=1)[:, None]
    else:
        weights = np.exp((x - x.max(axis=1, keepdims=True)) / temperature)
    return torch.from_numpy((weights / weights.sum(axis=1, keepdims=True)).astype(np.float32))


# %% nbgrader={"grade_id": "keep_top_k"}


def keep_top_k(probs, k):
    x = probs.numpy()
    rank = np.argsort(np.argsort(-x, axis=1, kind="stable"), axis=1)  # of every id, 0 for the most likely
    kept = np.where(rank < (k or x.shape[1]), x, 0)
    return torch.from_numpy(kept / kept.sum(axis=1, keepdims=True))


# %% nbgrader={"grade_id": "keep_top_p"}


def keep_top_p(probs, p):
    if p >= 1:
        return probs.clone()
    kept = probs.numpy().copy()
    for row in kept:
        ids = np.argsort(-row, kind="stable")
        size = np.searchsorted(np.cumsum(row[ids], dtype=np.float64), p) + 1  # first place where the sum reaches p
        row[ids[size:]] = 0
        row /= row.sum()
    return torch.from_numpy(kept)


# %% nbgrader={"grade_id": "draw"}


def draw(probs, u):
    ends = np.cumsum(probs.numpy(), axis=1, dtype=np.float64)
    places = u.numpy().astype(np.float64) * ends[:, -1]
    return torch.tensor(
        [int(np.searchsorted(end, place, side="right")) for end, place in zip(ends, places, strict=True)]
    )


# %% nbgrader={"grade_id": "sample"}
def sample(logits, u, temperature, top_k, top_p):
    probs = keep_top_k(probabilities(logits, temperature), top_k)
    return draw(keep_top_p(probs, top_p), u)
