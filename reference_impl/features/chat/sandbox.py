"""A Jinja environment for chat templates, as `transformers` gives them one, and what their errors say.

A chat template comes with a model's weights, from anywhere. Jinja's sandbox keeps it from files and Python's internals;
the process in which this runs bounds its time and its memory: see renderer.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from types import CodeType
from typing import Any

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reference_impl.features.chat.messages import tried
from reference_impl.features.chat.parts import goes_through_content
from reference_impl.features.chat.renderer import ChatTemplateError, TooLong


class _Refusal(TemplateError):
    """The error of a template's raise_exception()."""


def render(source: str, variables: Mapping[str, Any], where: str) -> str:
    """The text that a chat template makes, without limits. where: what errors call it. Raises ChatTemplateError with
    the first failure, if no form of the calls works."""
    code = _compiled(source, where)
    failed: Exception | None = None
    for messages in tried(variables.get("messages", []), source):
        try:
            template = Template.from_code(_sandbox(), code, _sandbox().make_globals(None))
            return "".join(template.root_render_func(template.new_context({**variables, "messages": messages})))
        except Exception as error:  # whatever a template's Python does
            failed = failed or error
            if isinstance(error, (TooLong, RecursionError, MemoryError)):
                break
    assert failed is not None
    raise ChatTemplateError(f"{where}, line {_line_of(failed)}: {_reason(failed)}")


def check(source: str, where: str) -> None:
    """Raises ChatTemplateError if the source is not a Jinja template. where: what errors call it."""
    _compiled(source, where)


def reads_parts(source: str, where: str) -> bool:
    """Whether the template can take a list of parts as a message's content."""
    try:
        return goes_through_content(_sandbox().parse(source))
    except (TemplateError, RecursionError):
        return False  # rendering says what is wrong


def _compiled(source: str, where: str) -> CodeType:
    try:
        return _compile(source)
    except TooLong as error:
        raise ChatTemplateError(f"{where}: {error}") from None
    except TemplateSyntaxError as error:
        raise ChatTemplateError(f"{where}, line {error.lineno}: no Jinja template: {error.message}") from None
    except Exception as error:  # brackets too deep, a template that extends another, ...
        raise ChatTemplateError(f"{where}: no Jinja template: {type(error).__name__}: {error}") from None


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> CodeType:
    return _sandbox().compile(source)


def _line_of(error: BaseException) -> int:
    """The line of the template that ran last."""
    line, frame = 1, error.__traceback__
    while frame is not None:
        template = frame.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            line = template.get_corresponding_lineno(frame.tb_lineno)
        frame = frame.tb_next
    return line


def _reason(error: Exception) -> str:
    if isinstance(error, _Refusal):
        return f"the chat template refuses these messages: {error}"
    if isinstance(error, TooLong):
        return str(error)
    if isinstance(error, (RecursionError, MemoryError)):
        return f"the chat template nests too deeply, or makes too much: {type(error).__name__}"
    return f"the chat template fails: {type(error).__name__}: {error}"


class _Generation(Extension):
    """The tag {% generation %}, which marks for training what the assistant has written. Here it leaves the text as it
    is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return caller()


@functools.cache
def _sandbox() -> ImmutableSandboxedEnvironment:
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )  # fmt: skip
    sandbox.filters["tojson"] = _tojson
    sandbox.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return sandbox


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The value by json.dumps: unlike in Jinja's own filter, keys keep their order and HTML is not escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
