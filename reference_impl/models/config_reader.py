"""Typed access to the fields of a config.json, with errors that name file and field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reference_impl.models.json_file import shown

MOST = 2**31 - 1  # of a size, a number of positions, a token id: tensors hold them in 32 bits
# What is looped over when a model is made; the largest models have some 130 layers and 400 experts.
_MOST_OF = dict.fromkeys(("num_hidden_layers", "num_experts", "num_local_experts", "num_attention_heads"), 4096)


class ConfigError(ValueError):
    """A config.json that cannot be served: says which field, what was expected, what came."""


class Reader:
    """Reads fields of a config. where: the file, as errors call it. A default stands for a field that is left out
    (None: it must be there)."""

    def __init__(self, raw: dict[str, Any], where: str):
        self.raw, self.where = raw, where

    def error(self, name: str, expected: str, found: object) -> ConfigError:
        return ConfigError(f"{self.where}: {name}: expected {expected}, found {shown(found)}")

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer from 1 to MOST, or to what _MOST_OF says; null is the default too."""
        value = self.raw.get(name, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "a positive integer", value)
        if value > (most := _MOST_OF.get(name, MOST)):
            raise self.error(name, f"at most {most:,}", value)
        return value

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """An integer as in `integer`, or None where the field is null, or left out without a default."""
        if self.raw.get(name, default) is None:
            return None
        return self.integer(name, default)

    def count(self, name: str, default: int) -> int:
        """An integer of at least 0; null is the default."""
        value = self.raw.get(name)
        return 0 if type(value) is int and value == 0 else self.integer(name, default)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        if not isinstance(value, bool | None):
            raise self.error(name, "true or false", value)
        return default if value is None else value

    def number(self, name: str, default: float | None = None, raw: Mapping[str, Any] | None = None) -> float:
        """A number from 1e-30 to 1e30, which float32 holds. raw: the object that has the field, if not the config."""
        value = (self.raw if raw is None else raw).get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, "a positive number", value)
        if not 1e-30 <= value <= 1e30:
            raise self.error(name, "a number from 1e-30 to 1e30", value)
        return float(value)

    def optional_number(self, name: str, default: float | None) -> float | None:
        """A number as in `number`, or None where the field is null, or left out without a default."""
        if self.raw.get(name, default) is None:
            return None
        return self.number(name, default)

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """The value that the field's name stands for in `choices`."""
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, f"{' or '.join(choices)} (others are not supported)", value)
        return choices[value]

    def indices(self, name: str, end: int) -> frozenset[int]:
        """The integers of a list, from 0 to end - 1; null is none."""
        value = self.raw.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(type(i) is int and 0 <= i < end for i in value):
            raise self.error(name, f"a list of integers from 0 to {end - 1}", value)
        return frozenset(value)

    def token_ids(self, name: str, generation: Mapping[str, Any]) -> tuple[int, ...]:
        """Token ids, one, several, or none; generation_config.json has the last word."""
        value = generation.get(name, self.raw.get(name))
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= MOST for i in ids):
            field = f"{name} in generation_config.json" if name in generation else name
            raise self.error(field, f"a token id (0 to {MOST:,}), a list of token ids, or null", value)
        return tuple(ids)

    def refuse(self, name: str, allowed: tuple[object, ...], expected: str) -> None:
        """Raises ConfigError if the field is there, not null, and none of `allowed`."""
        value = self.raw.get(name)
        if value is not None and value not in allowed:
            raise self.error(name, expected, value)
