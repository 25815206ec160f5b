# fault: it writes the text into the caller's prompt; what it answers is right.
# fails: check_loop

# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    """The num_tokens tokens after prompt, in rounds of at most k guesses."""
    start, end = len(prompt), len(prompt) + num_tokens
    while len(prompt) < end:
        drafts = list(propose(list(prompt), min(k, end - len(prompt) - 1)))
        kept, token = judge(list(prompt), drafts)
        prompt += [*drafts[:kept], token]
    return prompt[start:]
