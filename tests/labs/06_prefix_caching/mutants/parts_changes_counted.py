# fault: counts how often a text differs from the one before, not the different texts.
# fails: check_parts

# %% nbgrader={"grade_id": "stable_first"}
import itertools


def stable_first(requests):
    """Names of a template's parts, those with the fewest different texts first. requests: dicts part -> text."""
    pairs = list(itertools.pairwise(requests))
    return sorted(requests[0], key=lambda name: sum(a[name] != b[name] for a, b in pairs))
