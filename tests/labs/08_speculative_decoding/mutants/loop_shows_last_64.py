# fault: the drafter is shown the last 64 tokens only.
# fails: check_loop

# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    tokens, end = list(prompt), len(prompt) + num_tokens
    while len(tokens) < end:
        drafts = list(propose(list(tokens)[-64:], min(k, end - len(tokens) - 1)))
        kept, token = judge(list(tokens), drafts)
        tokens += [*drafts[:kept], token]
    return tokens[len(prompt) :]
