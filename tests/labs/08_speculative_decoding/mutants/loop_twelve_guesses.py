# fault: a round has at most 12 drafts.
# fails: check_loop

# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    tokens, end = list(prompt), len(prompt) + num_tokens
    while len(tokens) < end:
        drafts = list(propose(list(tokens), min(k, 12, end - len(tokens) - 1)))
        kept, token = judge(list(tokens), drafts)
        tokens += [*drafts[:kept], token]
    return tokens[len(prompt) :]
