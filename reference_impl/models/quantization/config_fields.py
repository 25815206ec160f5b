"""Typed access to the fields of config.json's quantization_config, with errors that name them."""

from __future__ import annotations

import re
from typing import Any

from reference_impl.models.config_reader import ConfigError
from reference_impl.models.json_file import shown


class Fields:
    """Reads fields of an object. raw: the object. where: the file, as errors call it."""

    def __init__(self, raw: dict[str, Any], where: str):
        self.raw, self.where = raw, where

    def error(self, name: str, expected: str, found: object) -> ConfigError:
        field = "quantization_config" + (f".{name}" if name else "")
        return ConfigError(f"{self.where}: {field}: expected {expected}, found {shown(found)}")

    def one_of(self, name: str, allowed: tuple[Any, ...], hint: str = "", needed: bool = False) -> Any:
        """One of the allowed values, the first where there is none (needed: an error)."""
        found = self.raw.get(name)
        if found is None and not needed:
            return allowed[0]
        if not any(type(found) is type(one) and found == one for one in allowed):
            raise self.error(name, " or ".join(map(str, allowed)) + hint, found)
        return found

    def boolean(self, name: str, default: bool) -> bool:
        found = self.raw.get(name)
        if not isinstance(found, bool | None):
            raise self.error(name, "true or false", found)
        return default if found is None else found

    def size(self, name: str) -> int | None:
        """A number of inputs; -1 is None: all of them."""
        found = self.raw.get(name)
        if type(found) is not int or (found < 1 and found != -1):
            raise self.error(name, "a number of inputs, or -1 for all", found)
        return None if found == -1 else found

    def mapping(self, name: str) -> dict[str, Any]:
        found = self.raw.get(name)
        if not isinstance(found, dict | None):
            raise self.error(name, "an object", found)
        return found or {}

    def sequence(self, name: str) -> list[Any]:
        found = self.raw.get(name)
        if not isinstance(found, list | None):
            raise self.error(name, "a list", found)
        return found or []

    def names(self, found: object, name: str) -> tuple[str, ...]:
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self.error(name, "a list of names", found)
        return tuple(found)

    def expression(self, found: str, name: str) -> str:
        try:
            re.compile(found)
        except (re.error, OverflowError, RecursionError) as wrong:
            raise self.error(name, f"a regular expression ({wrong})", found) from None
        return found
