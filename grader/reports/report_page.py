"""The report of a lab as one HTML page: no script, nothing loaded, everything escaped, as on the feedback page."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from grader.courses.recorded import state
from grader.reports.report import NO_PROOF, Report
from grader.reports.similarity import MAX_CODE
from grader.results.shown_text import shown, shown_line

MAX_PAIRS = 50


def report_page(report: Report) -> str:
    """The report as one static page."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"line": shown_line, "shown": shown, "points": lambda value: f"{value:.4g}"}
    text = Path(__file__).with_name("report.html").read_text("utf-8")
    graded = len(report.totals)
    bins = [
        {"low": number * 10, "high": number * 10 + 10, "count": count, "width": 100 * count / max(report.histogram)}
        for number, count in enumerate(report.histogram)
    ] if graded else []  # fmt: skip
    return environment.from_string(text).render(
        report=report, state=state, graded=graded, bins=bins, no_proof=NO_PROOF, max_pairs=MAX_PAIRS, max_code=MAX_CODE
    )


def report_json(report: Report) -> str:
    """The report as JSON, without the submissions' own results, which are in `results/` already."""
    data = asdict(report)
    data["rows"] = [
        {
            "student": score.student,
            "score": score.score,
            "late_penalty": score.late_penalty,
            "total": score.total,
            "status": state(score.student, result, report.damaged),
            "seconds": result.seconds if result else None,
        }
        for score, result in report.rows
    ]
    return json.dumps(data, indent=1, default=_plain, ensure_ascii=False) + "\n"


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} in a report")
