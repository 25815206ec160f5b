"""Rows of the tables of models, devices and links by what a person types: in any case of letters, or a beginning."""

from __future__ import annotations

import difflib
from dataclasses import replace

from reference_impl.theory.hardware import DEVICES, Device
from reference_impl.theory.links import LINKS, Link
from reference_impl.theory.mixtures import known_models
from reference_impl.theory.model_shapes import MODELS, ModelShape

# Later models whose config.json has the same sizes as one of the table, with a context of 131,072 tokens.
_SAME_SIZES = {"llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "llama-3.3-70b": "llama-3-70b"}
_LONGER = 131072


def find_model(name: str) -> ModelShape:
    """A model of the table, or one with the same sizes, in any case of letters. ValueError with the nearest names."""
    found = _nearest("model", name, _all_models())
    if found in _SAME_SIZES:
        return replace(MODELS[_SAME_SIZES[found]], name=found, max_context=_LONGER)
    return MODELS[found]


def find_device(name: str) -> Device:
    """A device, in any case of letters, or by the beginning of its name. ValueError with the nearest names."""
    return DEVICES[_nearest("GPU", name, list(DEVICES))]


def find_link(name: str | Link) -> Link:
    """A link that connects GPUs, as `find_device`. ValueError with the nearest names."""
    if isinstance(name, Link):
        return name
    return LINKS[_nearest("link", name, [row.name for row in LINKS.values() if row.alpha is not None])]


def _nearest(what: str, name: str, known: list[str]) -> str:
    folded = {each.casefold(): each for each in known}
    if name.casefold() in folded:
        return folded[name.casefold()]
    begin = [each for key, each in folded.items() if key.startswith(name.casefold())] if name else []
    if len(begin) == 1:
        return begin[0]
    close = _close(name, known)
    nearest = f"nearest: {' or '.join(close or begin)}; " if close or begin else ""
    raise ValueError(f"there is no {what} {name!r}; {nearest}known: {', '.join(known)}")


def nearest_models(name: str) -> list[str]:
    """Names of the table that are most like one, at most two."""
    return _close(name, _all_models())


def _all_models() -> list[str]:
    return sorted([*known_models(), *_SAME_SIZES])


def _close(name: str, known: list[str]) -> list[str]:
    folded = {each.casefold(): each for each in known}
    return [folded[key] for key in difflib.get_close_matches(name.casefold(), folded, 2, 0.4)]
