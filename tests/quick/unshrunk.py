"""For a quick run (`tests/selection.py` loads it): what fails is shown as it was found.

To look for the smallest example takes hypothesis up to five minutes; `make test` does that.
"""

from hypothesis import Phase, settings


def pytest_sessionstart() -> None:
    """After conftest.py has chosen its profile, and before tests take their settings from it."""
    settings.register_profile("unshrunk", settings(), phases=(Phase.explicit, Phase.reuse, Phase.generate))
    settings.load_profile("unshrunk")
