"""JSON files of a model folder, which anybody may have written: read within bounds, with errors that name the file."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxlong = 4, 12, 12, 120, 60


def shown(value: object) -> str:
    """A value as text for an error: of what is long or deep only the beginning."""
    return _SHORT.repr(value)


def read_json(path: Path, error: type[ValueError], most_bytes: int) -> Any:
    """The JSON in a file. Raises `error` for a longer file, and for one that is no JSON."""
    if (size := path.stat().st_size) > most_bytes:
        raise error(f"{path}: expected at most {most_bytes:,} bytes of JSON, found {size:,}: not the file of a model")
    try:
        return json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise error(f"{path}: not valid JSON (brackets nested too deep): write or download it again") from None
    except ValueError as wrong:  # no JSON, no UTF-8, or a number of thousands of digits
        raise error(f"{path}: not valid JSON ({wrong}): write or download it again") from None


def read_object(path: Path, error: type[ValueError], most_bytes: int) -> dict[str, Any]:
    """The JSON object in a file. Raises `error` for a longer file, and for one that has something else in it."""
    raw = read_json(path, error, most_bytes)
    if not isinstance(raw, dict):
        raise error(f"{path}: expected a JSON object, found {type(raw).__name__}: write or download it again")
    return raw
