"""How long a result can be, known before it is computed: for the operations whose result can outgrow their operands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_AS_WIDE_AS_ASKED = ("center", "ljust", "rjust", "zfill", "batch", "slice", "round")
Size = Callable[[Any], int]
_OTHER = 32  # characters of a number
_MANY_BITS = 1 << 20


def growth(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], size: Size) -> int:
    """At most this many characters or items come of a filter, or of a method, of this name.

    args: first what it is applied to. size: characters and items of a value. 0: no more than a small multiple of what
    goes in.
    """
    subject, given = args[0] if args else None, (*args[1:], *kwargs.values())
    asked = max((abs(value) for value in given if isinstance(value, int)), default=0)
    texts = [len(value) for value in given if isinstance(value, str)]
    text = subject if isinstance(subject, str) else ""
    if name in _AS_WIDE_AS_ASKED:
        return asked
    match name:
        case "replace":
            return _replaced(text, given)
        case "join":
            return max([0, len(text), *texts]) * max(map(_length, (subject, *given)))
        case "format" | "format_map":
            return _formatted(text, given, size)
        case "translate":
            return len(text) * sum(map(size, given))
        case "expandtabs":
            return (text.count("\t") + 1) * asked
        case "indent":
            return (text.count("\n") + 1) * (asked + sum(texts))
        case "wordwrap":
            return len(text) * (1 + sum(texts))
        case "tojson":  # of one line, in a thousand brackets
            return 1000 * (asked + sum(texts))
        case "sum":  # of lists: each is copied into the next
            return _length(subject) ** 2 if given else 0
        case "generate_lorem_ipsum":
            return 100 * max(1, subject if isinstance(subject, int) else 1) * max(100, asked) ** 2
    return 0


def growth_of_operator(operator: str, left: Any, right: Any, size: Size) -> int:
    """As `growth`."""
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, int) and isinstance(other, (str, list, tuple)):
                return len(other) * max(0, one)
    if operator in ("*", "//", "%") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right.bit_length()  # what it takes to compute
        return bits if bits > _MANY_BITS else 0
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * max(0, right) * 1000  # its digits take the square of its length to compute
    if operator == "%" and isinstance(left, str):
        return _formatted(left, right if isinstance(right, tuple) else (right,), size)
    return 0


def _replaced(text: str, given: tuple[Any, ...]) -> int:
    old, new = [*(value for value in given if isinstance(value, str)), "", ""][:2]
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _formatted(text: str, values: tuple[Any, ...], size: Size) -> int:
    """Every field could show all values, as wide as any number in the text, or among them where a field says so."""
    fields = text.count("%") + text.count("{")
    widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", text))
    taken = "*" in text or re.search(r"{[^{}]*{", text) is not None  # %*d, {:{}}: a width is a value
    widest = max((abs(value) for value in values if isinstance(value, int)), default=0) if taken else 0
    return len(text) + widths + fields * (_OTHER + sum(map(size, values)) + widest)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict, range)) else 0
