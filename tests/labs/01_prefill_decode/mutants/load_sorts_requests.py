# fault: turns the caller's list of requests round.
# fails: check_throughput, check_means

# %% nbgrader={"grade_id": "load_metrics"}
import numpy as np


def load_metrics(requests):
    """Metrics of many requests together. requests: dicts as from request_metrics -> dict, see above."""
    requests.reverse()
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
