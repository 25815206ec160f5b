# Sampling as engines do it: filters put -inf into the logits, softmax comes from torch, float32 up to the draw.
# The metrics walk through the events once, with a small class for a request.

# %% nbgrader={"grade_id": "timelines"}
from dataclasses import asdict, dataclass, field


@dataclass
class Timeline:
    arrived: float
    scheduled: float | None = None
    tokens: list = field(default_factory=list)

    def note(self, time, kind):
        if kind == "token":
            self.tokens.append(time)
        elif kind == "scheduled":
            self.scheduled = time if self.scheduled is None else self.scheduled


def timelines(events):
    seen = {}
    for time, kind, request_id in events:
        seen.setdefault(request_id, Timeline(time)).note(time, kind)
    return {request_id: asdict(timeline) for request_id, timeline in seen.items()}


# %% nbgrader={"grade_id": "request_metrics"}
import itertools


def request_metrics(arrived, scheduled, tokens):
    queue = scheduled - arrived if scheduled is not None else None
    described = {"arrived": arrived, "num_tokens": len(tokens), "queue": queue, "itl": []}
    if not tokens:
        return described | {"ttft": None, "tpot": None, "latency": None}
    ttft, latency = tokens[0] - arrived, tokens[-1] - arrived
    itl = [b - a for a, b in itertools.pairwise(tokens)]
    tpot = (latency - ttft) / len(itl) if itl else None
    return described | {"ttft": ttft, "itl": itl, "tpot": tpot, "latency": latency}


# %% nbgrader={"grade_id": "load_metrics"}
import statistics

import torch


def load_metrics(requests):
    itl = torch.tensor([gap for r in requests for gap in r["itl"]], dtype=torch.float64)
    ttft = [r["ttft"] for r in requests if r["num_tokens"] > 0]
    tpot = [r["tpot"] for r in requests if r["num_tokens"] > 1]
    total = sum(r["num_tokens"] for r in requests)
    duration = 0.0
    if total:
        first = min(r["arrived"] for r in requests)
        duration = max(r["arrived"] - first + r["latency"] for r in requests if r["latency"] is not None)
    return {
        "num_tokens": total,
        "duration": duration,
        "throughput": total / duration if duration else 0.0,
        "mean_ttft": statistics.fmean(ttft) if ttft else None,
        "mean_tpot": statistics.fmean(tpot) if tpot else None,
        "mean_itl": float(itl.mean()) if len(itl) else None,
        "p99_itl": float(itl.quantile(0.99)) if len(itl) else None,
    }


# %% nbgrader={"grade_id": "goodput"}
def goodput(requests, duration, max_ttft, max_tpot):
    if not requests:
        raise ValueError("no requests, no share")

    def met(request):
        if request["ttft"] is None:
            return False
        return request["ttft"] <= max_ttft and (request["tpot"] or 0.0) <= max_tpot

    good = sum(map(met, requests))
    return {"attainment": good / len(requests), "goodput": good / duration if duration else 0.0}


# %% nbgrader={"grade_id": "probabilities"}


def probabilities(logits, temperature):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[1]).float()
    return torch.softmax(logits / temperature, dim=-1)


# %% nbgrader={"grade_id": "keep_top_k"}


def top_k_mask(values, k):
    ids = values.argsort(dim=-1, descending=True, stable=True)[:, : k or None]
    return torch.ones_like(values, dtype=torch.bool).scatter(1, ids, False)


def keep_top_k(probs, k):
    return probs.log().masked_fill(top_k_mask(probs, k), -torch.inf).softmax(dim=-1)


# %% nbgrader={"grade_id": "keep_top_p"}


def keep_top_p(probs, p):
    if p == 1:
        return probs
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    cut = ordered.cumsum(dim=-1).roll(1, dims=-1) >= p
    cut[:, 0] = False
    return probs.log().masked_fill(torch.empty_like(cut).scatter(1, ids, cut), -torch.inf).softmax(dim=-1)


# %% nbgrader={"grade_id": "draw"}


def draw(probs, u):
    end = probs.double().cumsum(dim=-1)
    return torch.searchsorted(end, u[:, None] * end[:, -1:], right=True)[:, 0]


# %% nbgrader={"grade_id": "sample"}


def sample(logits, u, temperature, top_k, top_p):
    """Greedy is a case of its own, and top-k works on the logits."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    scores = logits.masked_fill(top_k_mask(logits, top_k), -torch.inf)
    return draw(keep_top_p(probabilities(scores, temperature), top_p), u)
