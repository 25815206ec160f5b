"""How many examples a property is tried with: in `make test` a part of those of `make test-all`."""

from __future__ import annotations

from hypothesis import settings

_USUAL = 100  # of Hypothesis


def examples(number: int) -> int:
    """For `max_examples` of a test that wants another number than Hypothesis' own; tests/conftest.py sets the part."""
    return max(number * settings.default.max_examples // _USUAL, min(number, 10))
