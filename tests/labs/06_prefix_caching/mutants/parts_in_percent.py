# fault: what counts is how many percent of the requests have another text.
# fails: check_parts

# %% nbgrader={"grade_id": "stable_first"}
def stable_first(requests):
    """Names of a template's parts, those with the fewest different texts first. requests: dicts part -> text."""
    texts = {}
    for request in requests:
        for name, text in request.items():
            texts.setdefault(name, set()).add(text)
    return sorted(texts, key=lambda name: round(len(texts[name]) / len(requests), 2))
