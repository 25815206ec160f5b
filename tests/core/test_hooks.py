"""Hooks: a feature's own and those that it inherits are called, in the order of the features; others are not."""

from __future__ import annotations

from reference_impl.core.hooks import Hooks


class Kind:
    def first(self) -> str:
        raise AssertionError("does nothing, and is not called")

    def second(self) -> str:
        raise AssertionError("does nothing, and is not called")


class One(Kind):
    def first(self) -> str:
        return type(self).__name__


class Inherits(One):
    pass


def test_hooks_are_called_in_the_order_of_the_features_also_those_that_are_inherited() -> None:
    hooks = Hooks(Kind)
    features = [Inherits(), Kind(), One()]
    for feature in features:
        hooks.add(feature)
    assert [hook() for hook in hooks["first"]] == ["Inherits", "One"]
    assert hooks["second"] == []
    assert hooks.features == features
