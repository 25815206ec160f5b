# fault: k drafts are asked for, also at the end.
# fails: check_loop

# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    """The num_tokens tokens after prompt, in rounds of at most k guesses."""
    tokens, end = list(prompt), len(prompt) + num_tokens
    while len(tokens) < end:
        drafts = list(propose(list(tokens), k))
        kept, token = judge(list(tokens), drafts)
        tokens += [*drafts[:kept], token]
    return tokens[len(prompt) :]
