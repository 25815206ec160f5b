"""Finds out whether a chat template takes a message's content as a list of parts, or as a text only."""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

_GO_THROUGH = ("map", "selectattr", "rejectattr", "select", "reject")


def goes_through_content(tree: nodes.Template) -> bool:
    """Whether the template iterates over a message's content, in a loop or a filter, so it can take a list of parts."""
    through: list[nodes.Node] = [loop.iter for loop in tree.find_all(nodes.For)]
    through += [f.node for f in tree.find_all(nodes.Filter) if f.name in _GO_THROUGH and f.node is not None]
    return any("content" in name for node in through for name in _last_names(node))


def _last_names(node: nodes.Node) -> Iterator[str]:
    """Yields the last name in an expression: "content" for content, message.content, message["content"] and also
    messages[0].content[1:]."""
    match node:
        case nodes.Name():
            yield node.name
        case nodes.Getattr():
            yield node.attr
        case nodes.Getitem(arg=nodes.Const(value=str(name))):
            yield name
        case nodes.Getitem() | nodes.Filter() if node.node is not None:
            yield from _last_names(node.node)
