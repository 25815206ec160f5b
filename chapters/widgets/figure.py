"""How every picture of the course looks and reaches the page: one palette, and an alt text for each.

The palette is Okabe and Ito's (2008), told apart with every common kind of colour blindness; what colour says is also
said by a label, a hatch or a position.

On a dark page a picture is shown with its lightness inverted and its hues kept, by a style sheet that goes with it:
JupyterLab, Colab and VS Code each mark a dark page in their own way. No text of a picture is smaller than `SMALLEST`
in a window 900 pixels wide; on a narrower page, a phone's, the picture keeps a width and scrolls sideways.
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
from matplotlib.text import Text

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442",
)  # fmt: skip
GREY, INK = "#B8B8B8", "#333333"

DPI = 110
PAGE = 770  # pixels that JupyterLab leaves for a picture in a window of 900, its file browser closed
PHONE = 620  # pixels that a picture keeps where the page has fewer
SMALLEST = 9  # pixels of the smallest text, on PAGE

# Three ways to say that a page is dark: JupyterLab's, Colab's (the frame of an output) and VS Code's.
_DARK = ('body[data-jp-theme-light="false"]', "html[theme=dark]", "body.vscode-dark")
_INVERTED = ", ".join(f"{page} img.inferlab-figure" for page in _DARK)
STYLE = (
    "<style>.inferlab-wide { overflow-x: auto; max-width: 100% }"
    " img.inferlab-figure { max-width: 100%; height: auto; display: block }"
    # 0.93: white becomes the dark grey of the page, not a black box on it
    f" {_INVERTED} {{ filter: invert(0.93) hue-rotate(180deg) }}</style>"
)


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


def smallest_size(width: float) -> float:
    """Points of the smallest text that a figure of `width` inches may have, so that it can be read on PAGE."""
    pixels = width * DPI
    return SMALLEST / DPI * 72 * max(1.0, pixels / PAGE)


def _enlarge(fig: Figure) -> None:
    """Sets text that could not be read to the smallest size that can."""
    size = smallest_size(fig.get_figwidth())
    for axes in fig.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = axis.get_ticklabels() if axis.get_visible() else []
            if any(label.get_fontsize() < size for label in labels):
                axis.set_tick_params(labelsize=size)
    for text in fig.findobj(Text):
        if text.get_fontsize() < size:
            text.set_fontsize(size)


def to_html(fig: Figure, alt: str) -> str:
    """The figure as an <img> with its alt text and the style that adapts it to the page; no file, no link."""
    buffer = io.BytesIO()
    fig.set_dpi(DPI)
    _enlarge(fig)
    FigureCanvasAgg(fig).print_png(buffer)  # savefig would draw everything twice
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    least = min(PHONE, round(fig.get_figwidth() * DPI))
    image = (
        f'<img class="inferlab-figure" src="data:image/png;base64,{data}" alt="{html.escape(alt, quote=True)}" '
        f'style="min-width:{least}px">'
    )
    return f'{STYLE}<div class="inferlab-wide">{image}</div>'


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
        self.picture = HTML(self.shown.html, layout=Layout(max_width="100%"))
        self.box = VBox([*map(_by_keyboard, self.controls.values()), self.picture])
        for control in self.controls.values():
            control.layout.max_width = "100%"  # a phone is narrower than a slider
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

    return HBox([control, step(-1), step(+1)], layout=Layout(flex_flow="row wrap"))


def live(widget: Widget, html: str, text: str) -> dict[str, Any]:
    """A widget for front ends that have widgets, HTML for those that have none, text for a terminal."""
    model = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": model, "text/html": html, "text/plain": text}
