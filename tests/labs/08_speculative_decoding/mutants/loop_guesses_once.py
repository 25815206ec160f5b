# fault: drafts are made in the first round only.
# fails: check_loop

# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    """The num_tokens tokens after prompt, in rounds of at most k guesses."""
    tokens, end = list(prompt), len(prompt) + num_tokens
    first = propose(list(tokens), min(k, num_tokens - 1)) if num_tokens else []
    while len(tokens) < end:
        drafts = first if len(tokens) == len(prompt) else []
        kept, token = judge(list(tokens), drafts)
        tokens += [*drafts[:kept], token]
    return tokens[len(prompt) :]
