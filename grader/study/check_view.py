"""What a check found, as HTML for a notebook, and the same as text where there is no HTML.

Styles stand at the elements: JupyterLab removes <style> from a notebook that it does not trust. Colours are the
theme's own, except in badges, which have a background of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from grader.results.result import WORDS, CheckResult
from grader.study.lab_hints import Step

GREEN, AMBER, GREY = "#2e7d32", "#9a5200", "#5f6368"  # white text on each has a contrast of 5 or more
_FAINT = "color:var(--jp-content-font-color2,inherit)"
_LINE = "var(--jp-border-color1,#9e9e9e)"
_EXPECTED = re.compile(
    r"(?:(?P<input>.+?): )?(?P<about>[^:]*?)\bexpected (?P<expected>.+?),? saw (?P<saw>.+)", re.DOTALL
)
_SAW = re.compile(r"(?P<expected>.+?), saw (?P<saw>.+)", re.DOTALL)
MAX_LINES = 24  # of one message; the end of a traceback is what says what happened


@dataclass(frozen=True)
class Shown:
    """A view for IPython's display: HTML, and its twin for terminals."""

    html: str
    text: str

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.text}


def shortened(text: str) -> str:
    lines = text.split("\n")
    return text if len(lines) <= MAX_LINES else "\n".join([lines[0], "...", *lines[-MAX_LINES + 2 :]])


def findings(check: CheckResult) -> list[tuple[str, str]]:
    """What a check that did not pass says, in order: the property, the input, what was expected, what came."""
    rows = [("Property", check.property)] if check.property else []
    message = shortened(check.message.strip())
    if check.status == "failed" and (found := _EXPECTED.fullmatch(message) or _SAW.fullmatch(message)):
        parts = found.groupdict()
        about = (parts.get("about") or "").strip()
        rows += [("Input", parts["input"])] if parts.get("input") else []
        rows.append(("Expected", f"{about} {parts['expected']}".strip()))
        rows.append(("Came", parts["saw"]))
    elif message:
        rows.append(("Seen" if check.status == "failed" else "Why", message))
    return rows


def check_text(check: CheckResult, steps: Sequence[Step] = (), ask: str = "") -> str:
    """A check as text. ask: what to type for a hint."""
    lines = [f"{_state(check)}: {check.grade_id}"]
    if check.status != "passed":
        lines += [f"  {name}: {text}" for name, text in findings(check)]
        if steps and ask:
            lines.append(f"  For a hint: {ask}")
    return "\n".join(lines)


def check_html(check: CheckResult, steps: Sequence[Step] = ()) -> str:
    """One check: a badge, its points and name; where it did not pass, its findings, and its hints, folded."""
    colour = {"passed": GREEN, "not written": GREY, "not run": GREY}.get(check.status, AMBER)
    badge = (
        f'<span style="background:{colour};color:#fff;border-radius:3px;padding:1px 8px;white-space:nowrap">'
        f"{escape(('✓ ' if check.status == 'passed' else '') + WORDS[check.status])}</span>"
    )
    head = (
        f'{badge} <b style="margin:0 .5em">{escape(_points(check))}</b> <span style="{_FAINT}">{escape(check.grade_id)}'
    )
    body = "" if check.status == "passed" else _rows(findings(check)) + _hints(steps)
    return (
        f'<div style="border-left:4px solid {colour};padding:4px 0 4px 12px;margin:4px 0;max-width:60em;'
        f'line-height:1.5;font-family:var(--jp-ui-font-family,sans-serif);color:var(--jp-content-font-color1,inherit)">'
        f"<div>{head}</div>{body}</div>"
    )


def running_html(name: str, seconds: float) -> str:
    return (
        f'<div style="border-left:4px solid {GREY};padding:4px 0 4px 12px;margin:4px 0;'
        f'font-family:var(--jp-ui-font-family,sans-serif);{_FAINT}">{escape(running_text(name, seconds))}</div>'
    )


def running_text(name: str, seconds: float) -> str:
    return f"{name} is running, {seconds:.0f} s"


def checks_html(score: str, panels: Sequence[str], lines: Sequence[str]) -> str:
    """A whole lab: panels of what did not pass, what else is to be said, and the score."""
    below = "".join(
        f'<div style="margin:4px 0;white-space:pre-wrap;overflow-wrap:anywhere">{escape(x)}</div>' for x in lines
    )
    return (
        f'<div style="max-width:60em;font-family:var(--jp-ui-font-family,sans-serif);'
        f'color:var(--jp-content-font-color1,inherit)">{"".join(panels)}{below}'
        f'<div style="margin:4px 0"><b>{escape(score)}</b></div></div>'
    )


def grouped(checks: Sequence[CheckResult]) -> list[tuple[CheckResult, list[str]]]:
    """Checks with, beside each, the names of later ones that have the same to say: what hangs once is said once."""
    found: list[tuple[CheckResult, list[str]]] = []
    first: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        key = (check.status, check.message)
        if check.message and check.status not in ("passed", "failed") and key in first:
            first[key].append(check.grade_id)
            continue
        found.append((check, first.setdefault(key, [])))
    return found


def together(checks: Sequence[CheckResult], steps: Mapping[str, Sequence[Step]]) -> list[str]:
    """Panels for all of these checks."""
    return [
        check_html(_named(check, more), () if more else steps.get(check.grade_id, ()))
        for check, more in grouped(checks)
    ]


def _named(check: CheckResult, more: Sequence[str]) -> CheckResult:
    return replace(check, grade_id=", ".join([check.grade_id, *more]), property="") if more else check


def _state(check: CheckResult) -> str:
    return f"{WORDS[check.status]}, {_points(check)}"


def _points(check: CheckResult) -> str:
    amount = f"{check.points:g} point" + ("" if check.points == 1 else "s")
    return amount if check.status == "passed" else f"0 of {amount}"


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    """A name and a text side by side; on a phone, one below the other."""
    made = []
    code = "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px)"
    beside = "flex:1 1 15em;min-width:0;white-space:pre-wrap;overflow-wrap:anywhere"
    for name, text in rows:
        style = beside if name == "Property" else f"{beside};{code}"
        made.append(
            f'<div style="display:flex;flex-wrap:wrap;gap:0 12px;margin-top:4px"><span style="flex:0 0 5.5em;{_FAINT}">'
            f'{name}</span><span style="{style}">{escape(text)}</span></div>'
        )
    return "".join(made)


def _hints(steps: Sequence[Step]) -> str:
    """The hints, folded, the next one inside the one before: none is read before it is asked for, nor out of order."""
    inner = ""
    for step in reversed(steps):
        if step.opens:
            inner = f'<div style="{_FAINT};margin-top:4px">{step.title}: {escape(step.opens)}.</div>'
            continue
        inner = (
            f'<details style="margin-top:4px;border-top:1px solid {_LINE};padding-top:4px">'
            f'<summary style="cursor:pointer">{step.title}</summary>'
            f'<div style="margin:4px 0;overflow-wrap:anywhere">{escape(step.text)}</div>{inner}</details>'
        )
    return inner
