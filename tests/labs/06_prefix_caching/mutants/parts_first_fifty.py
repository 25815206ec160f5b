# fault: only the first fifty requests are looked at.
# fails: check_parts

# %% nbgrader={"grade_id": "stable_first"}
def stable_first(requests):
    """Names of a template's parts, those with the fewest different texts first. requests: dicts part -> text."""
    texts = {}
    for request in requests[:50]:
        for name, text in request.items():
            texts.setdefault(name, set()).add(text)
    return sorted(texts, key=lambda name: len(texts[name]))
