# fault: takes the parts out of the caller's requests as it counts them.
# fails: check_parts

# %% nbgrader={"grade_id": "stable_first"}
def stable_first(requests):
    """Names of a template's parts, those with the fewest different texts first. requests: dicts part -> text."""
    texts = {}
    for request in requests:
        for name in list(request):
            text = request.pop(name)
            texts.setdefault(name, set()).add(text)
    return sorted(texts, key=lambda name: len(texts[name]))
