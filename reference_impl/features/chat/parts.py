"""Which chat templates take a message's content as a list of parts, and which as a text only."""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

_GO_THROUGH = ("map", "selectattr", "rejectattr", "select", "reject")


def goes_through_content(tree: nodes.Template) -> bool:
    """It goes through a message's content, by a loop or a filter: then it can take a list of parts."""
    through: list[nodes.Node] = [loop.iter for loop in tree.find_all(nodes.For)]
    through += [f.node for f in tree.find_all(nodes.Filter) if f.name in _GO_THROUGH and f.node is not None]
    return any("content" in name for node in through for name in _last_names(node))


def _last_names(node: nodes.Node) -> Iterator[str]:
    """content, message.content and message["content"] end in content; messages[0].content[1:] does too."""
    match node:
        case nodes.Name():
            yield node.name
        case nodes.Getattr():
            yield node.attr
        case nodes.Getitem(arg=nodes.Const(value=str(name))):
            yield name
        case nodes.Getitem() | nodes.Filter() if node.node is not None:
            yield from _last_names(node.node)
