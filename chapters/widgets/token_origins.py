"""A stream of tokens, each coloured by where it came from: a draft that was kept, what stood in a wrong one's place,
the token after drafts that were all right, or a step without drafts."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ipywidgets import IntSlider

from chapters.widgets.figure import Shown, View
from reference_impl.interfaces import StepDone

ORIGINS = {  # kind: (what it says, background, line below it): the line says without colour what the colour says
    "draft": ("a draft that was kept", "#0072B230", "3px solid #0072B2"),
    "instead": ("in place of a wrong draft", "#D55E0030", "3px dashed #D55E00"),
    "bonus": ("bonus: after drafts that were all kept", "#009E7330", "3px double #009E73"),
    "plain": ("without drafts", "transparent", "3px dotted #B8B8B8"),
}


@dataclass(frozen=True)
class Origin:
    """kind: of ORIGINS. step: which of the request's steps gave it, from 0. nth: of a draft, its place in the row."""

    kind: str
    step: int
    nth: int = 0


def origins(steps: Iterable[StepDone], request_id: str) -> list[Origin]:
    """Of a request's output tokens where each came from, read from the steps of a trace."""
    found: list[Origin] = []
    number = 0
    for step in steps:
        for row, new in zip(step.rows, step.num_new_tokens, strict=True):
            if row.request_id != request_id or not new:
                continue
            found += [Origin("draft", number, nth) for nth in range(new - 1)]
            last = "plain" if not row.num_drafts else "bonus" if new == row.num_drafts + 1 else "instead"
            found.append(Origin(last, number, new - 1))
            number += 1
    return found


def draw(pieces: Sequence[str], found: Sequence[Origin], steps: int) -> Shown:
    """The text of the first `steps` steps; a thin bar stands between two steps."""
    shown = [(piece, origin) for piece, origin in zip(pieces, found, strict=True) if origin.step < steps]
    counts = Counter(origin.kind for _, origin in shown)
    summary = f"{len(shown)} tokens of {steps} steps: " + ", ".join(
        f"{counts[kind]} {said}" for kind, (said, _, _) in ORIGINS.items() if counts[kind]
    )
    spans, before = [], 0
    for piece, origin in shown:
        if origin.step != before:
            spans.append('<span style="opacity:0.45">│</span>')
            before = origin.step
        _, background, line = ORIGINS[origin.kind]
        spans.append(f'<span style="background:{background};border-bottom:{line}">{html.escape(piece)}</span>')
    legend = " &nbsp; ".join(
        f'<span style="background:{background};border-bottom:{line}">{said}</span>'
        for said, background, line in ORIGINS.values()
    )
    colour = "color:var(--jp-content-font-color1, inherit)"
    text = "".join(spans)
    page = (
        f'<div style="{colour}"><div>{html.escape(summary)}.</div><div style="margin:6px 0">{legend}</div>'
        f'<pre style="{colour};line-height:1.9;white-space:pre-wrap">{text}</pre></div>'
    )
    marks = {"draft": "", "instead": "~", "bonus": "+", "plain": "."}
    plain = "".join(f"{'|' if origin.nth == 0 else ''}{piece}{marks[origin.kind]}" for piece, origin in shown)
    return Shown(page, f"{summary}.\n(| begins a step; after a token: ~ instead, + bonus, . without drafts)\n{plain}")


def token_origins(
    steps: Iterable[StepDone], request_id: str, tokens: Sequence[int], spell: Callable[[int], str]
) -> View:
    """Follow a request's stream step by step. tokens: its output; spell: a token id -> its text."""
    found = origins(steps, request_id)
    if len(found) != len(tokens):
        raise ValueError(
            f"request {request_id!r}: expected the trace of all {len(tokens)} output tokens, got steps with "
            f"{len(found)}; give the steps from its first on, and its output without the prompt"
        )
    pieces = [spell(token) for token in tokens]
    last = found[-1].step + 1 if found else 0
    wide, layout = {"description_width": "90px"}, {"width": "480px"}
    return View(
        {"steps": IntSlider(last, 0, last, description="Steps", style=wide, layout=layout, continuous_update=False)},
        lambda steps: draw(pieces, found, steps),
    )
