"""Widgets: most tests read what a picture says of itself, and painting takes most of the time that a picture takes."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def painted() -> None:
    """For a test that has pictures painted, as a notebook has them."""


@pytest.fixture(autouse=True)
def _unpainted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests/chapters/test_widget_*.py figures are made and put into words, but not painted, unless asked for."""
    if request.path.name.startswith("test_widget_") and "painted" not in request.fixturenames:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        def paint_nothing(*_: Any, **__: Any) -> None:
            pass

        monkeypatch.setattr(FigureCanvasAgg, "print_png", paint_nothing)
