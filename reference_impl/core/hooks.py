"""What plugs into a part of the core: objects that have some of the methods that the part calls, its hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class Hooks(dict[str, list[Callable[..., Any]]]):
    """The hooks of all features that were added: {name: functions, in the features' order}. kind: the class whose
    methods are the hooks and do nothing. A method that a feature does not override is not called."""

    def __init__(self, kind: type):
        super().__init__({name: [] for name, hook in vars(kind).items() if inspect.isfunction(hook)})
        self.kind, self.features = kind, list[Any]()

    def add(self, feature: Any) -> None:
        self.features.append(feature)
        for name, hooks in self.items():
            if getattr(type(feature), name) is not getattr(self.kind, name):
                hooks.append(getattr(feature, name))
