# fault: at the end one draft too few.
# fails: check_loop

# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    """The num_tokens tokens after prompt, in rounds of at most k guesses."""
    tokens, end = list(prompt), len(prompt) + num_tokens
    while len(tokens) < end:
        drafts = list(propose(list(tokens), max(0, min(k, end - len(tokens) - 2))))
        kept, token = judge(list(tokens), drafts)
        tokens += [*drafts[:kept], token]
    return tokens[len(prompt) :]
