"""A number as a learner types it: a guess, or an answer to a quiz. Widgets and grader both ask here."""

from __future__ import annotations

import math
import re

NUMBERS = "written like 1234, 12.5 or 2e9"  # the ways to type a number; says nothing about which one is right

# 1234 · 1,234.5 · 1 234 · 1_234 · .5 · 2e9, and then perhaps the unit. "1,5" is none: it could mean 1.5 or 15.
_NUMBER = re.compile(
    r"([+-]?(?:\d{1,3}(?:[, _\u00a0\u202f]\d{3})+(?!\d)|\d+)?(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(.*)", re.ASCII
)
_COMMA = re.compile(r"([+-]?\d+),(\d+)\b", re.ASCII)


def parse_number(text: str, unit: str) -> float:
    """The number in `text`, with or without its unit. Raises ValueError for what is none, or could be two."""
    text = text.strip()
    found = _NUMBER.fullmatch(text)
    digits, rest = (re.sub(r"[, _\u00a0\u202f]", "", found[1]), found[2]) if found else ("", text)
    if rest and rest.casefold() != unit.casefold():
        digits = ""  # another unit would be another number
    try:
        value = float(digits)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        either = _COMMA.match(text)
        which = f": it could be {either[1]}.{either[2]} or {either[1]}{either[2]}" if either else ""
        in_unit = f" ({unit})" if unit else ""
        raise ValueError(f"expected a number{in_unit}, {NUMBERS}, got {text!r}{which}")
    return value
