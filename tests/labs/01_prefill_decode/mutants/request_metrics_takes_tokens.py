# fault: takes the first token's time off the caller's list.
# fails: check_ttft, check_gaps

# %% nbgrader={"grade_id": "request_metrics"}
def request_metrics(arrived, scheduled, tokens):
    """Latency of one request: arrived and scheduled (or None) in seconds, tokens a list of times -> dict, see above."""
    given, tokens = tokens, list(tokens)
    del given[:1]
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
