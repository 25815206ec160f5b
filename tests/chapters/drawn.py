"""What of a picture lies outside its edges, and is cut off."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

CLOSE = 0.03  # inches: a glyph may be a pixel or two wider than its letters


@contextmanager
def nothing_cut_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every picture drawn inside must hold all its text: AssertionError with the inches that are missing."""
    draw = FigureCanvasAgg.print_png

    def checked(self: FigureCanvasAgg, *args: Any, **options: Any) -> None:
        draw(self, *args, **options)
        width, height = self.figure.get_size_inches()
        box = self.figure.get_tightbbox(self.get_renderer())  # type: ignore[no-untyped-call]
        missing = {"left": -box.x0, "below": -box.y0, "right": box.x1 - width, "above": box.y1 - height}
        assert max(missing.values()) < CLOSE, {side: round(much, 2) for side, much in missing.items() if much >= CLOSE}

    with monkeypatch.context() as patch:
        patch.setattr(FigureCanvasAgg, "print_png", checked)
        yield
