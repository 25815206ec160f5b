# fault: a first token at time 0.0 counts as none.
# fails: check_ttft

# %% nbgrader={"grade_id": "request_metrics"}
def request_metrics(arrived, scheduled, tokens):
    """Latency of one request: arrived and scheduled (or None) in seconds, tokens a list of times -> dict, see above."""
    num_tokens = len(tokens)
    itl = [tokens[k] - tokens[k - 1] for k in range(1, num_tokens)]
    return {
        "arrived": arrived,
        "num_tokens": num_tokens,
        "queue": None if scheduled is None else scheduled - arrived,
        "ttft": tokens[0] - arrived if tokens and tokens[0] else None,
        "itl": itl,
        "tpot": (tokens[-1] - tokens[0]) / (num_tokens - 1) if num_tokens > 1 else None,
        "latency": tokens[-1] - arrived if tokens else None,
    }
