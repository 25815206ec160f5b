# Requests are objects with __slots__, results are tuples and tensors of one element where the text says list and
# number, and the sampler computes in float64 on views turned round.

# %% nbgrader={"grade_id": "timelines"}
class Request:
    __slots__ = ("arrived", "scheduled", "tokens")

    def __init__(self, arrived):
        self.arrived, self.scheduled, self.tokens = arrived, None, ()

    def on_scheduled(self, time):
        if self.scheduled is None:
            self.scheduled = time

    def on_token(self, time):
        self.tokens += (time,)

    def on_finished(self, time):
        pass

    on_aborted = on_finished

    def as_dict(self):
        return {name: getattr(self, name) for name in self.__slots__}


def timelines(events):
    requests = {}
    for time, kind, request_id in events:
        if kind == "arrived":
            requests[request_id] = Request(time)
        else:
            getattr(requests[request_id], f"on_{kind}")(time)
    return {request_id: request.as_dict() for request_id, request in requests.items()}


# %% nbgrader={"grade_id": "request_metrics"}
import torch


def request_metrics(arrived, scheduled, tokens):
    times = torch.tensor([arrived, *tokens], dtype=torch.float64)
    waits = times.diff()
    return {
        "arrived": arrived,
        "num_tokens": len(tokens),
        "queue": None if scheduled is None else scheduled - arrived,
        "ttft": waits[0] if len(waits) else None,
        "itl": tuple(waits[1:].tolist()),
        "tpot": waits[1:].mean() if len(waits) > 1 else None,
        "latency": waits.sum() if len(waits) else None,
    }


# %% nbgrader={"grade_id": "load_metrics"}
def load_metrics(requests):
    def mean(values):
        return torch.tensor(values, dtype=torch.float64).mean() if values else None

    def known(key):
        return [float(r[key]) for r in requests if r[key] is not None]

    gaps = [gap for r in requests for gap in r["itl"]]
    ends = [float(r["arrived"] + r["latency"]) for r in requests if r["latency"] is not None]
    duration = max(ends) - min(r["arrived"] for r in requests) if ends else 0
    num_tokens = sum(r["num_tokens"] for r in requests)
    return {
        "num_tokens": num_tokens,
        "duration": duration,
        "throughput": num_tokens / duration if duration > 0 else 0,
        "mean_ttft": mean(known("ttft")),
        "mean_tpot": mean(known("tpot")),
        "mean_itl": mean(gaps),
        "p99_itl": torch.quantile(torch.tensor(gaps, dtype=torch.float64), 0.99) if gaps else None,
    }


# %% nbgrader={"grade_id": "metrics"}
def metrics(events):
    requests = {}
    for request_id, timeline in timelines(events).items():
        requests[request_id] = request_metrics(timeline["arrived"], timeline["scheduled"], timeline["tokens"])
    return {"requests": requests, "load": load_metrics([*requests.values()])}


# %% nbgrader={"grade_id": "probabilities"}
def probabilities(logits, temperature):
    if temperature == 0:
        largest = logits == logits.amax(1, keepdim=True)
        return (largest & (largest.cumsum(1) == 1)).float()  # the first of them
    return logits.double().div(temperature).softmax(1).float()


# %% nbgrader={"grade_id": "keep_top_k"}
def keep_top_k(probs, k):
    vocab = probs.shape[1]
    ids = probs.flip(1).argsort(dim=1, stable=True).flip(1)  # of equals the lower id first: turned round twice
    ids = vocab - 1 - ids
    kept = probs.double()
    if 0 < k < vocab:
        kept = kept.scatter(1, ids[:, k:], 0.0)
    return kept.div(kept.sum(1, keepdim=True)).float()


# %% nbgrader={"grade_id": "keep_top_p"}
def keep_top_p(probs, p):
    if p >= 1:
        return probs.clone()
    ids = probs.argsort(dim=1, descending=True, stable=True)
    ordered = probs.double().gather(1, ids)
    before = torch.nn.functional.pad(ordered.cumsum(1), (1, -1))
    kept = torch.empty_like(ordered).scatter(1, ids, torch.where(before < p, ordered, 0.0))
    return torch.nn.functional.normalize(kept, p=1, dim=1).to(torch.float32)


# %% nbgrader={"grade_id": "draw"}
def draw(probs, u):
    ends = probs.to(torch.float64).cumsum(1)
    beyond = ends > (u * ends[:, -1]).unsqueeze(1)
    return beyond.int().argmax(1)
