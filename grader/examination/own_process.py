"""What a role's process has of its own although it is a fork: Python's seed for the hashes of text.

A process of its own would draw one at its start (PYTHONHASHSEED). All learners' processes are forks of one, and roles
in a notebook share the kernel, so that `hash("a")` would be the same number in all of them. A cell that is run before
the learner's gives each role a `hash` as if its seed were another. It is there for what is forgotten, not for what is
hidden: `"a".__hash__()` and the order of a set are as before.
"""

from __future__ import annotations

CELL = "hash"  # its name in messages

_SOURCE = """\
def hash(value, /, _hash=hash, _seed={seed}):
    def has_text(one):
        return any(map(has_text, one)) if isinstance(one, (tuple, frozenset)) else isinstance(one, (str, bytes))

    found = _hash(value)
    return _hash((_seed, found)) if has_text(value) else found
"""


def hash_of_role(role: int) -> str:
    """The source of a cell that defines `hash` for role 0, 1, ...; each gives other numbers for text."""
    return _SOURCE.format(seed=role + 1)
