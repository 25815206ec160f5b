# fault: once the drafter gave fewer drafts than asked for, a later round asks for one more than can be of use.
# fails: check_loop

# %% nbgrader={"grade_id": "speculate"}
def speculate(prompt, num_tokens, k, propose, judge):
    """The num_tokens tokens after prompt, in rounds of at most k guesses."""
    tokens, end, few = list(prompt), len(prompt) + num_tokens, False
    while len(tokens) < end:
        wanted = min(k, end - len(tokens) - 1)
        asked = min(k, end - len(tokens)) if few and wanted > 2 else wanted
        drafts = list(propose(list(tokens), asked))[:wanted] if wanted else []
        few = few or len(drafts) < wanted
        kept, token = judge(list(tokens), drafts)
        tokens += [*drafts[:kept], token]
    return tokens[len(prompt) :]
