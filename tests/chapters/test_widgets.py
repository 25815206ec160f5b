"""Widgets render at both ends of every control, without a front end, with alt text, and store guesses safely."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.text import Text
from traitlets.config import Config

from chapters.widgets import kv_memory, predict, reveal, savings, show, table, timeline
from chapters.widgets.entry import one_line
from chapters.widgets.figure import DPI, PAGE, PHONE, SMALLEST, View, figure
from chapters.widgets.predictions import data_folder, predictions, store
from chapters.widgets.timeline import Segment, segments
from reference_impl.interfaces import Row
from reference_impl.observe.trace import RequestArrived, RequestFinished, StepDone, Trace


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERLAB_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def bundle(shown: Any) -> dict[str, Any]:
    result: dict[str, Any] = shown._repr_mimebundle_()
    return result


def a_trace() -> Trace:
    """a: prompt 6 in two pieces, 3 outputs. b: arrives with it, waits, is preempted in step 4, comes back, ends."""
    trace = Trace([RequestArrived(10.0, "a", 6), RequestArrived(10.5, "b", 2)])
    plan: list[tuple[tuple[Row, ...], tuple[str, ...]]] = [
        ((Row("a", 0, 4, False),), ()),
        ((Row("a", 4, 2, True), Row("b", 0, 2, True)), ()),
        ((Row("a", 6, 1, True), Row("b", 2, 1, True)), ()),
        ((Row("a", 7, 1, True),), ("b",)),
        ((Row("b", 0, 3, True),), ()),
    ]
    for i, (rows, preempted) in enumerate(plan):
        trace.add(StepDone(i + 1, 11.0 + i, 11.9 + i, rows, preempted, int(i in (0, 3)), 2, 5 - i))
    trace.add(RequestFinished(15.0, "a", "length", 3))
    trace.add(RequestFinished(16.0, "b", "length", 3))
    return trace


# ---------------------------------------------------------------- views


def ends(control: Any) -> tuple[Any, Any]:
    if hasattr(control, "options"):
        values = [value for _, value in control._options_full]
        return values[0], values[-1]
    return control.min, control.max


def views() -> dict[str, View]:
    return {
        "kv_memory": kv_memory(),
        "savings": savings(),
        "timeline": timeline(a_trace()),
        "empty": timeline(Trace()),
    }


@pytest.mark.parametrize("name", ["kv_memory", "savings", "timeline", "empty"])
def test_every_control_works_at_both_ends(name: str) -> None:
    view = views()[name]
    for control in view.controls.values():
        for value in ends(control):
            control.value = value
            assert re.search(r'<img [^>]*alt="[^"]{20,}"', view.picture.value), (control.description, value)
            assert "nan" not in view.shown.alt.lower()
    for low_or_high in (0, 1):  # all controls at the same end together
        for control in view.controls.values():
            control.value = ends(control)[low_or_high]
    assert view.shown.alt


@pytest.mark.parametrize("name", ["kv_memory", "savings", "timeline"])
def test_a_view_has_a_picture_for_pages_without_widgets_and_text_for_terminals(name: str) -> None:
    data = bundle(views()[name])
    assert "<img " in data["text/html"]
    assert len(data["text/plain"]) > 20
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"]


def test_moving_a_slider_changes_the_picture() -> None:
    view = kv_memory()
    before = view.picture.value
    view.controls["requests"].value = 64
    assert view.picture.value != before
    assert "64 requests" in view.shown.alt


def test_a_figure_without_alt_text_is_refused() -> None:
    with pytest.raises(ValueError, match="alt"):
        show(figure(), " ")


def test_alt_text_is_escaped() -> None:
    assert 'alt="a &lt; &quot;b&quot;"' in show(figure(1, 1), 'a < "b"').html


def test_a_picture_brings_the_style_that_adapts_it_to_a_dark_page_and_keeps_a_width_on_a_phone() -> None:
    page = show(figure(7.8, 1), "a figure of some width").html
    for dark in ('body[data-jp-theme-light="false"]', "html[theme=dark]", "body.vscode-dark"):
        assert f"{dark} img.inferlab-figure" in page
    assert "invert(" in page
    assert "overflow-x: auto" in page
    assert f"min-width:{PHONE}px" in page
    assert 'style="min-width:220px"' in show(figure(2, 1), "a small figure").html  # never larger than it is


@pytest.mark.parametrize("width", [4, 7.8, 12])
def test_no_text_of_a_picture_is_smaller_than_can_be_read_on_a_page_of_900_pixels(width: float) -> None:
    fig = figure(width, 2)
    ax = fig.subplots()
    ax.plot([0, 1], [0, 1], label="line")
    ax.tick_params(labelsize=3)
    ax.set_xlabel("x", fontsize=4)
    ax.legend(fontsize=2)
    fig.text(0.5, 0.5, "small", fontsize=1)
    fig.text(0.5, 0.9, "large", fontsize=20)
    show(fig, "text of many sizes")
    shown = min(1.0, PAGE / (width * DPI))  # a picture wider than the page is made smaller
    sizes = [text.get_fontsize() / 72 * DPI * shown for text in fig.findobj(Text) if text.get_text()]
    assert min(sizes) >= SMALLEST - 1e-6
    assert max(sizes) == pytest.approx(20 / 72 * DPI * shown)


# ---------------------------------------------------------------- tables


def test_a_table_is_html_with_its_numbers_to_the_right_and_text_for_a_terminal() -> None:
    shown = table(
        [["H100", 80, 3.35, "989 TFLOP/s"], ["A <b>", 1_234_567, 2.0, "–"]], ["GPU", "n", "TB/s", "16 bit"], "T"
    )
    data = bundle(shown)
    page = data["text/html"]
    assert "<td>A &lt;b&gt;</td>" in page
    assert '<td class="number">1,234,567</td>' in page
    assert '<td class="number">–</td>' in page
    assert "<caption>T</caption>" in page
    assert "overflow-x: auto" in page
    assert data["text/plain"].splitlines() == [
        "T",
        "GPU            n  TB/s       16 bit",
        "H100          80  3.35  989 TFLOP/s",
        "A <b>  1,234,567     2            –",
    ]


def test_a_table_without_rows_has_its_headers_and_one_of_another_length_is_refused() -> None:
    assert repr(table([], ["a", "b"])) == "a  b"
    with pytest.raises(ValueError, match="row 2: expected 2 cells, one for each header, got 1"):
        table([[1, 2], [3]], ["a", "b"])


def test_the_calculator_shows_the_formula_of_theory() -> None:
    alt = kv_memory("llama-3-70b", context=8192, requests=1).shown.alt
    assert "2.68 GB" in alt
    assert "usable 288 GB, 144 GB left; 54 requests" in alt
    assert "24.9 GB too much; 54 requests" in kv_memory("llama-3-70b", context=8192, requests=64).shown.alt


def test_no_time_is_given_for_weights_that_do_not_fit() -> None:
    assert "no time" in savings("llama-3-70b").shown.alt


def test_importing_widgets_imports_no_torch() -> None:
    code = "import chapters.widgets, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- timeline


def test_segments_tell_waiting_prefill_decode_preempted_and_recompute_apart() -> None:
    found = segments(a_trace())
    assert [s for s in found if s.request_id == "a"] == [
        Segment("a", "prefill", 0, 1, 4),
        Segment("a", "prefill", 1, 2, 2),
        Segment("a", "decode", 2, 3, 1),
        Segment("a", "decode", 3, 4, 1),
    ]
    assert [s for s in found if s.request_id == "b"] == [
        Segment("b", "waiting", 0, 1),
        Segment("b", "prefill", 1, 2, 2),
        Segment("b", "decode", 2, 3, 1),
        Segment("b", "preempted", 3, 4),
        Segment("b", "recompute", 4, 5, 3),
    ]


def test_segments_in_seconds_start_at_the_first_arrival() -> None:
    found = segments(a_trace(), by="seconds")
    first = next(s for s in found if s.request_id == "a")
    assert (first.kind, first.start, round(first.end, 6)) == ("waiting", 0.0, 1.0)
    assert round(max(s.end for s in found), 6) == 5.9


def test_a_request_still_waiting_when_the_trace_ends_is_drawn_to_the_end() -> None:
    trace = a_trace()
    trace.events.insert(2, RequestArrived(10.7, "c", 5))
    assert [s for s in segments(trace) if s.request_id == "c"] == [Segment("c", "waiting", 0, 5)]


def test_a_step_beyond_the_trace_is_clamped_and_an_unknown_axis_refused() -> None:
    view = timeline(a_trace())
    assert "Step 5 of 5" in view.draw(by="step", step=99).alt
    with pytest.raises(ValueError, match="by"):
        segments(a_trace(), by="hours")


# ---------------------------------------------------------------- predictions


def test_a_guess_is_stored_and_shown_beside_the_answer(data: Path) -> None:
    box = predict("t-1", "How many?", "GB")
    box.field.value = "5"
    box.button.click()
    assert predictions()["t-1"].guess == 5.0
    assert "You guessed 5" in repr(reveal("t-1", 2.5))
    assert predictions()["t-1"].answer == 2.5
    assert "Your guess so far: 5" in predict("t-1", "How many?", "GB").text


def test_a_guess_without_a_unit_is_asked_for_and_shown_without_one() -> None:
    box = predict("t-7", "How many times?", "", guess=3)
    assert box.field.description == "Guess"
    assert box.text == "Stored: 3. The answer comes further down."
    assert predict("t-7", "How many times?", "").text == "Your guess so far: 3."
    assert repr(reveal("t-7", 6)).startswith("Computed: 6. You guessed 3.")
    box.field.value = "several"
    box.button.click()
    assert box.text.startswith("Not stored: expected a number, written like")


def test_a_guess_needs_no_buttons() -> None:
    assert "Stored" in predict("t-2", "How many?", "GB", guess=3).text
    assert predictions()["t-2"].guess == 3


@pytest.mark.parametrize("cell", ["reveal('t-8', 6)", "reveal('t-8', 6)\n1", "if True:\n    reveal('t-8', 6)"])
def test_an_answer_is_shown_once_wherever_in_a_cell_it_stands(
    data: Path, cell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook shows the value of a cell's last line alone."""
    predict("t-8", "How many?", "GB", guess=3)
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    shell.run_cell("from chapters.widgets import reveal")
    assert shell.run_cell(cell).success
    assert capsys.readouterr().out.count("You guessed 3.") == 1


def test_without_a_guess_the_answer_is_shown_and_nothing_is_stored() -> None:
    assert "no guess" in repr(reveal("t-3", 1.0))
    assert predictions() == {}


def test_a_line_that_a_crash_cut_short_costs_only_itself_wherever_it_was_cut(data: Path) -> None:
    store("t-4", guess=1.0)
    path = data / "predictions.jsonl"
    before = path.read_bytes()
    store("t-5", guess=9.0)
    whole = path.read_bytes()
    for end in range(len(before), len(whole)):  # every byte at which the write of t-5 may stop
        path.write_bytes(whole[:end])
        store("t-6", guess=2.0)
        assert {p.id: p.guess for p in predictions().values()} == {"t-4": 1.0, "t-6": 2.0}
        assert json.loads(path.read_text().splitlines()[-1])["id"] == "t-6"


def test_a_file_whose_lines_end_with_a_line_break_is_read_and_continued(data: Path) -> None:
    path = data / "predictions.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"id": "t-4", "time": 1.0, "guess": 1.0}\n')  # as earlier versions of the course wrote it
    store("t-6", guess=2.0)
    assert {p.id: p.guess for p in predictions().values()} == {"t-4": 1.0, "t-6": 2.0}


def test_the_latest_guess_counts() -> None:
    for value in (1.0, 2.0):
        store("t-7", guess=value)
    assert predictions()["t-7"].guess == 2.0


def test_a_box_that_was_not_touched_is_no_guess_of_zero() -> None:
    box = predict("t-11", "How many?", "GB")
    assert box.field.value == ""
    for value in ("", "  "):
        box.field.value = value
        box.button.click()
        assert "nothing is stored" in box.text
    assert predictions() == {}
    box.field.value = "0"
    box.button.click()
    assert predictions()["t-11"].guess == 0


@pytest.mark.parametrize(
    ("typed", "value"),
    [("3", 3), (" 3.5 ", 3.5), ("1e6", 1e6), ("2,000", 2000), ("2 000", 2000), ("-.5", -0.5), ("12 GB", 12)],
)
def test_enter_stores_what_is_typed_and_again_replaces_it(typed: str, value: float) -> None:
    box = predict("t-12", "How many?", "GB", guess=77)

    async def press() -> None:
        box.field._handle_custom_msg({"event": "submit"}, [])  # the key comes before the text, as from a browser
        box.field.value = typed

    asyncio.run(press())
    assert predictions()["t-12"].guess == value
    assert f"Stored: {value:,.10g} GB" in box.text
    assert predict("t-12", "How many?", "GB").field.value == f"{value:,.10g}"


@pytest.mark.parametrize(
    ("typed", "said"),
    [("1,5", "it could be 1.5 or 15"), ("2,00", "2.00 or 200"), ("many", "expected a number"), ("3 MB", "(GB)")],
)
def test_what_is_no_number_or_could_be_two_is_refused_with_the_reason(typed: str, said: str) -> None:
    box = predict("t-13", "How many?", "GB")
    box.field.value = typed
    box.button.click()
    assert said in box.text
    assert predictions() == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_guess_that_is_no_number_is_refused(value: float) -> None:
    box = predict("t-8", "How many?", "GB")
    box.guess(value)
    assert "finite" in box.text
    assert predictions() == {}


def test_a_folder_that_cannot_be_written_is_said_and_does_no_harm(data: Path) -> None:
    data.write_text("a file where the folder should be")
    assert "not stored" in predict("t-9", "How many?", "GB", guess=1).text
    assert predictions() == {}


def test_the_data_folder_is_the_users_own_unless_given(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_folder() == data
    monkeypatch.delenv("INFERLAB_DATA")
    assert "inferlab" in str(data_folder())


def test_a_prediction_box_has_text_for_pages_without_widgets() -> None:
    data = bundle(predict("t-10", "How <many>?", "GB"))
    assert "How &lt;many&gt;?" in data["text/html"]
    assert "guess=" in data["text/plain"]


def test_a_menu_has_buttons_that_step_through_it_because_jupyterlab_takes_its_arrow_keys() -> None:
    view = kv_memory()
    menu = view.controls["device_name"]
    back, forth = next(row.children[1:] for row in view.box.children if menu in getattr(row, "children", ()))
    first, last = menu.options[0], menu.options[-1]
    menu.value = last
    forth.click()
    assert menu.value == first
    assert first in view.shown.alt
    back.click()
    assert menu.value == last
    assert "Device" in forth.tooltip


# ---------------------------------------------------------------- Enter in a field


def test_enter_takes_the_whole_text_in_whichever_order_key_and_text_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chapters.widgets.entry.TOGETHER", 0)
    entered: list[str] = []
    field = one_line("A number", lambda: entered.append(field.value))

    def key() -> None:
        field._handle_custom_msg({"event": "submit"}, [])

    async def presses() -> None:
        key()
        assert entered == []  # the text is still on its way
        field.value = "1"
        assert entered == ["1"]
        await asyncio.sleep(0.01)
        assert entered == ["1"]  # one key, one answer
        field.value = "2"  # the learner left the field
        assert entered == ["1"]
        for times in (1, 2):  # and comes back: the key alone is sent
            key()
            await asyncio.sleep(0.01)
            assert entered == ["1"] + times * ["2"]
        field.value = "3"
        assert entered == ["1", "2", "2"]  # no key is left over from before
        key()
        await asyncio.sleep(0.01)
        assert entered == ["1", "2", "2", "3"]

    asyncio.run(presses())
