"""The chunk-size explorer: every control at both ends, the formula's times, and a reason where there is no time."""

import itertools
import re

import pytest
from matplotlib.colors import to_rgba

from chapters.widgets import chunk_size
from chapters.widgets.chunk_size import (
    BUDGETS,
    CONTEXT,
    DECODES,
    MACHINES,
    PROMPTS,
    _time_line,
    deployment,
    draw,
    reading,
)
from chapters.widgets.figure import BLUE, SKY, figure


@pytest.mark.usefixtures("painted")
def test_every_corner_of_the_controls_gives_a_picture() -> None:
    view = chunk_size()
    ends = {"machine": list(MACHINES), "prompt": PROMPTS, "decodes": DECODES, "budget": BUDGETS}
    for values in itertools.product(*((options[0], options[-1]) for options in ends.values())):
        shown = draw(*values)
        assert "nan" not in shown.alt
        assert ("never read" in shown.alt) != ("TTFT" in shown.alt), shown.alt
    for name, options in ends.items():
        for value in (options[0], options[-1]):
            view.controls[name].value = value
            assert re.search(r'<img [^>]*alt="[^"]{20,}"', view.picture.value)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_prompt_in_one_step_takes_what_the_formula_says(machine: str) -> None:
    where = deployment(machine)
    whole = reading(machine, 8192, 0, 131_072)
    assert whole is not None
    assert whole.steps == (where.prefill_seconds(8192),)
    beside = reading(machine, 8192, 16, 512)
    assert beside is not None
    assert len(beside.steps) == -(-8192 // (512 - 16))
    assert beside.steps[0] == where.step_seconds([*[1] * 16, 496], [*[CONTEXT] * 16, 0])
    assert beside.longest_gap < whole.longest_gap
    assert beside.ttft > whole.ttft


@pytest.mark.parametrize(("decodes", "kinds"), [(32, ["prefill", "decode"]), (0, ["prefill"])])
def test_the_time_line_says_prefill_and_decode_beside_their_colours(decodes: int, kinds: list[str]) -> None:
    chosen = reading("Llama-3-8B on one H100", 8192, decodes, 512)
    assert chosen is not None
    ax = figure().subplots()
    _time_line(ax, chosen, decodes)
    assert [label.get_text() for label in ax.get_yticklabels()] == kinds
    assert [len(strip.get_paths()) for strip in ax.collections] == [len(chosen.steps)] * len(kinds)
    colours = [tuple(strip.get_facecolor()[0]) for strip in ax.collections]
    assert colours == [to_rgba({"prefill": BLUE, "decode": SKY}[kind]) for kind in kinds]
    assert [bool(strip.get_hatch()) for strip in ax.collections] == [kind == "prefill" for kind in kinds]


def test_decodes_that_use_up_the_budget_leave_no_prompt_to_read() -> None:
    assert reading("Llama-3-8B on one H100", 512, 256, 256) is None
    assert "never read" in draw("Llama-3-8B on one H100", 512, 256, 256).alt


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="llama-3-70b"):
        chunk_size("gpt-2")
