"""The engine at work: after every step the texts so far, what each request computed in it, and who holds which block.

It draws what it is given after each step, and computes nothing. Colours are the page's own, so it is readable on a dark
one; a request is told by its letter, not by its colour alone.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from IPython.display import display
from ipywidgets import HTML, IntSlider, VBox

from chapters.widgets.figure import BLUE, Shown, live
from reference_impl.interfaces.events import StepDone

COLOURS = (BLUE, "#AA4B00", "#007A58")  # red and green of the palette, darker: white letters stand on them
LETTERS = "ABC"
_STYLE = """<style>
.inferlab-answering { color: var(--jp-ui-font-color1, inherit); font-size: 13px; line-height: 1.5 }
.inferlab-answering pre { margin: 0 0 8px 0; padding: 6px 10px; white-space: pre-wrap; min-height: 5.2em;
  background: var(--jp-layout-color2, rgba(128, 128, 128, 0.15)); color: inherit; font-size: 13px; line-height: 1.35 }
.inferlab-answering .asked { opacity: 0.7 }
.inferlab-answering .blocks { max-width: 384px; line-height: 0 }
.inferlab-answering .block { display: inline-block; width: 22px; height: 22px; margin: 1px; text-align: center;
  line-height: 22px; font-size: 11px; color: white; box-sizing: border-box;
  vertical-align: top }
.inferlab-answering .free { border: 1px solid var(--jp-border-color1, #999999) }
</style>"""


@dataclass(frozen=True)
class Answer:
    """One request after a step. done: why it has ended, or "". blocks: of the KV cache, which it holds now."""

    prompt: str
    text: str
    num_tokens: int  # of the text
    done: str
    blocks: tuple[int, ...]
    computed: int = 0  # tokens, in the step


@dataclass(frozen=True)
class Frame:
    """What one step left."""

    step: int
    answers: tuple[Answer, ...]
    num_blocks: int


def draw(frame: Frame) -> Shown:
    """The picture of one step, as HTML and as text."""
    batch = [(LETTERS[i], answer.computed) for i, answer in enumerate(frame.answers) if answer.computed]
    share = ", ".join(f"{letter} {_count(n, 'token')}" for letter, n in batch) or "nothing"
    head = f"Step {frame.step}. In this batch: {share}."
    rows, lines = [], [head]
    for i, answer in enumerate(frame.answers):
        state = _state(answer)
        rows.append(
            f"<div>{_block(i)} {html.escape(state)}</div>"
            f'<pre><span class="asked">{html.escape(answer.prompt)}</span><b>{html.escape(answer.text)}</b></pre>'
        )
        lines.append(f"{LETTERS[i]}, {state}:\n{answer.prompt}{answer.text}")
    owner = {block: i for i, answer in enumerate(frame.answers) for block in answer.blocks}
    blocks = "".join(_block(owner.get(block)) for block in range(frame.num_blocks))
    below = f"KV cache: {len(owner)} of {_count(frame.num_blocks, 'block')} in use"
    lines.append(below)
    page = (
        f'<div class="inferlab-answering"><div>{head}</div>{"".join(rows)}<div>{below}</div>'
        f'<div class="blocks">{blocks}</div></div>'
    )
    return Shown(_STYLE + page, "\n".join(lines))


def _block(owner: int | None) -> str:
    if owner is None:
        return '<span class="block free"></span>'
    return f'<span class="block" style="background:{COLOURS[owner % len(COLOURS)]}">{LETTERS[owner]}</span>'


def _state(answer: Answer) -> str:
    if answer.done:
        return f"done, {_count(answer.num_tokens, 'token')}, its blocks are free again"
    if not answer.blocks:
        return "waiting"
    return f"{_count(answer.num_tokens, 'token')} so far, {_count(len(answer.blocks), 'block')}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


class Answering:
    """The picture, which redraws as the engine steps; afterwards a slider goes back to any step."""

    def __init__(self, num_blocks: int, pause: float):
        self.pause, self.num_blocks = pause, num_blocks
        self.frames: list[Shown] = [Shown("", "no step yet")]
        self.picture = HTML()
        self.box = VBox([self.picture])

    def add(self, frame: Frame) -> None:
        self.frames.append(draw(frame))
        self.picture.value = self.frames[-1].html
        time.sleep(self.pause)

    def finish(self) -> None:
        last = len(self.frames) - 1
        slider = IntSlider(value=last, min=min(1, last), max=last, description="step")
        slider.observe(lambda change: setattr(self.picture, "value", self.frames[change["new"]].html), "value")
        self.box.children = [self.picture, slider]

    def __repr__(self) -> str:
        return self.frames[-1].alt

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return live(self.box, self.frames[-1].html, self.frames[-1].alt)


@contextmanager
def _shown(view: Answering) -> Iterator[None]:
    """Shows the view at once and, for pages without widgets, its last picture at the end."""
    handle = display(view, display_id=True)
    try:
        yield
    finally:
        view.finish()
        if handle is not None:  # outside a notebook there is none
            handle.update(view)


def answering(llm: Any, prompts: Sequence[str], sampling: Any, *, every: int = 4, pause: float = 0.1) -> None:
    """Shows an `LLM` answering prompts, of which another arrives `every` steps. pause: seconds after each step.

    At most three prompts. What it leaves behind is an engine without requests, also when it is interrupted.
    """
    if not 1 <= len(prompts) <= len(LETTERS):
        raise ValueError(f"prompts: expected 1 to {len(LETTERS)}, got {len(prompts)}")
    engine = llm.engine
    view = Answering(engine.num_blocks, pause)
    started: list[Any] = []
    texts = [""] * len(prompts)
    step = 0
    with _shown(view):
        try:
            while len(started) < len(prompts) or engine.has_work():
                if len(started) < len(prompts) and step >= every * len(started):
                    started.append(llm.start(prompts[len(started)], sampling))
                llm.step()
                step += 1
                done = next(event for event in reversed(engine.trace.events) if isinstance(event, StepDone))
                computed = {row.request_id: row.num_tokens for row in done.rows}
                answers = []
                for i, generation in enumerate(started):
                    texts[i] += generation.take()
                    request = generation.request
                    answers.append(
                        Answer(
                            prompts[i],
                            texts[i],
                            len(request.output_tokens),
                            generation.finish_reason or "",
                            tuple(request.block_table),
                            computed.get(request.id, 0),
                        )
                    )
                view.add(Frame(step, tuple(answers), view.num_blocks))
        finally:
            for generation in started:
                llm.leave(generation)
