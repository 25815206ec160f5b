"""How every picture of the course looks and reaches the page: one palette, and an alt text for each.

The palette is Okabe and Ito's (2008), told apart with every common kind of colour blindness; what colour says is also
said by a label, a hatch or a position.
"""

from __future__ import annotations

import base64
import gc
import html
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ipywidgets import HTML, Button, Dropdown, HBox, Layout, VBox, Widget
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442",
)  # fmt: skip
GREY, INK = "#B8B8B8", "#333333"


def figure(width: float = 7.0, height: float = 3.0) -> Figure:
    """An empty figure of width x height inches. pyplot's global state is not used."""
    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Any, xlabel: str = "", ylabel: str = "", title: str = "") -> Any:
    """Labels, a light grid, no frame on top and right; returns the axes."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if title:
        axes.set_title(title, fontsize=10, loc="left")
    axes.grid(True, color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def to_html(fig: Figure, alt: str) -> str:
    """The figure as an <img> with its alt text; no file, no link."""
    buffer = io.BytesIO()
    fig.set_dpi(110)
    FigureCanvasAgg(fig).print_png(buffer)  # savefig would draw everything twice
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt, quote=True)}" style="max-width:100%">'


@dataclass(frozen=True)
class Shown:
    """A picture for a notebook. Where pictures cannot be shown, its alt text is."""

    html: str
    alt: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self.html, "text/plain": self.alt}


def show(fig: Figure, alt: str) -> Shown:
    """The figure, ready to be the last line of a cell. alt says in words what it shows."""
    if not alt.strip():
        raise ValueError("alt: expected a sentence that says what the figure shows, got nothing")
    return Shown(to_html(fig, alt), alt)


@dataclass
class View:
    """Controls above a picture. Where no front end speaks the widget protocol, the first picture stands alone.

    controls: ipywidgets by name; draw: their values as keyword arguments -> Shown.
    """

    controls: dict[str, Widget]
    draw: Callable[..., Shown]

    def __post_init__(self) -> None:
        self.shown = self.draw(**self.values)
        self.picture = HTML(self.shown.html)
        self.box = VBox([*map(_by_keyboard, self.controls.values()), self.picture])
        for control in self.controls.values():
            control.observe(self._redraw, "value")

    @property
    def values(self) -> dict[str, Any]:
        return {name: control.value for name, control in self.controls.items()}

    def _redraw(self, change: Any) -> None:
        with _no_collection():
            self.shown = self.draw(**self.values)
            self.picture.value = self.shown.html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return live(self.box, self.shown.html, self.shown.alt)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector out of a redraw: with torch loaded a full collection takes 0.2 s. It comes after."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _by_keyboard(control: Widget) -> Widget:
    """A menu with two buttons that step through it: JupyterLab takes a menu's arrow keys, not a slider's."""
    if not isinstance(control, Dropdown):
        return control

    def step(by: int) -> Button:
        what = f"{'Next' if by > 0 else 'Previous'}: {control.description}"
        button = Button(description=">" if by > 0 else "<", tooltip=what, layout=Layout(width="36px"))
        button.on_click(lambda _: setattr(control, "index", (control.index + by) % len(control.options)))
        return button

    return HBox([control, step(-1), step(+1)])


def live(widget: Widget, html: str, text: str) -> dict[str, Any]:
    """A widget for front ends that have widgets, HTML for those that have none, text for a terminal."""
    model = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": model, "text/html": html, "text/plain": text}
