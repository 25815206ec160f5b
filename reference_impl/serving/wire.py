"""Commands and reports of an engine on another machine, as bytes: JSON, in which what JSON lacks has a tag.

Nothing is unpickled, and nothing but these few types is made of what comes in.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from reference_impl.features.handover.progress import Progress
from reference_impl.interfaces import SamplingParams, TokenLogprobs
from reference_impl.serving.runner import Message

_CLASSES: dict[str, Any] = {each.__name__: each for each in (SamplingParams, TokenLogprobs, Progress)}
_TAG = "~"  # the name of a type, in an object that is one


def encode(message: Message) -> bytes:
    """TypeError for what is none of the types."""
    return json.dumps(_plain(message), separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case Mapping():
            return {_TAG: "dict", "value": [[_plain(key), _plain(each)] for key, each in value.items()]}
        case SamplingParams() | TokenLogprobs() | Progress():
            return {_TAG: type(value).__name__} | {
                field.name: _plain(getattr(value, field.name)) for field in fields(value)
            }
    raise TypeError(f"expected what can be sent to an engine elsewhere, got {type(value).__name__}")


def decode(content: bytes) -> Message:
    """A message, with lists for all sequences in it. ValueError for anything that `encode` does not make."""
    try:
        found = _made(json.loads(content))
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise ValueError(f"a message of an engine elsewhere cannot be read: {error}") from None
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise ValueError(f"expected a message, which begins with its kind, got {str(found)[:100]}")
    return tuple(found)


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return [_made(each) for each in value]
    if not isinstance(value, dict):
        return value
    match value.pop(_TAG, None), value:
        case "bytes", {"value": str(text)}:
            return base64.b64decode(text, validate=True)
        case "dict", {"value": list(pairs)}:
            return {_made(key): _made(each) for key, each in pairs}
        case str(name), inside if name in _CLASSES:
            return _CLASSES[name](**{str(field): _tuples(_made(each)) for field, each in inside.items()})
        case name, _:
            raise ValueError(f"expected one of bytes, dict, {', '.join(_CLASSES)}, got {name!r}")


def _tuples(value: Any) -> Any:
    """With tuples for lists, as these classes have them."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
