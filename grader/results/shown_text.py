"""Text that a learner or a learner's code wrote, made safe to show to others.

Escaping for HTML or CSV is done where the text is written out. Here: characters that hide or reorder what stands around
them (controls, direction overrides, zero-width characters, towers of accents) become visible, and length has a bound.
Unicode's report 36 and CVE-2021-42574 ("Trojan Source") say what they are used for.
"""

from __future__ import annotations

import re
import unicodedata

MAX_CHARACTERS = 20000
MAX_LINES = 400
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")  # control, format, surrogate, private use, line and paragraph separators
# Drawn as nothing, and of no category that says so: Unicode's Default_Ignorable_Code_Point, and an empty Braille cell.
BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0") | frozenset(
    map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)
_NOTHING = BLANK - {"\ufe0e", "\ufe0f"}  # these two say whether the sign before them is shown in colours
_TOWER = re.compile(r"([\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u0610-\u061a\u064b-\u065f\u1ab0-\u1aff\u1dc0-\u1dff"
                    r"\u20d0-\u20ff\ufe20-\ufe2f]{3})[\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u0610-\u061a\u064b-\u065f"
                    r"\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]+")  # fmt: skip


def shown(text: str, max_characters: int = MAX_CHARACTERS, max_lines: int = MAX_LINES) -> str:
    """`text` with hidden characters written as ‹U+202E›, and its middle left out where it is too long."""
    text = _shorter(text, max_characters, max_lines)
    text = _TOWER.sub(r"\1", text.replace("\r\n", "\n").replace("\r", "\n"))
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(_visible(character) for character in text)


def shown_line(text: str, max_characters: int = 300) -> str:
    """The text of `shown` on one line."""
    return " ".join(shown(text, max_characters).split())


def fenced(text: str) -> str:
    """`text` as a Markdown cell that shows it as it was typed; what is fenced already stays."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if _inside(text) is not None:
        return text
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)  # nothing in the text can close it
    return f"{fence}\n{text}\n{fence}"


def unfenced(text: str) -> str:
    """What stands in the fence that `fenced` made; other text as it is."""
    inside = _inside(text)
    return text if inside is None else inside


def _inside(text: str) -> str | None:
    fence = text[: len(text) - len(text.lstrip("`"))]
    inside = text[len(fence) + 1 : -len(fence) - 1]
    whole = len(fence) >= 3 and text == f"{fence}\n{inside}\n{fence}" and fence not in inside
    return inside if whole else None


def _visible(character: str) -> str:
    hidden = unicodedata.category(character) in _HIDDEN or character in _NOTHING
    if character in "\n\t" or not hidden:
        return character
    return f"‹U+{ord(character):04X}›"


def _shorter(text: str, max_characters: int, max_lines: int) -> str:
    """Head and tail, because the error that ended a program stands at the end of what it printed."""
    if len(text) > max_characters:
        part = max_characters // 2
        text = f"{text[:part]}\n… {len(text) - 2 * part} characters left out …\n{text[-part:]}"
    lines = text.split("\n")
    if len(lines) > max_lines + 1:
        part = max_lines // 2
        left_out = f"… {len(lines) - 2 * part} lines left out …"
        text = "\n".join([*lines[:part], left_out, *lines[-part:]])
    return text
