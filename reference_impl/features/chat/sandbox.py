"""A Jinja environment for chat templates: what `transformers` gives them, and a limit to what they may compute.

A chat template comes with a model's weights, from anywhere. Jinja's sandbox keeps it from files and Python's internals,
but not from loops without end or texts without bound. Here all that takes time or memory is counted in steps, and at
`MAX_STEPS` rendering ends. Steps are the same on every machine, so that what is refused is refused everywhere; a limit
of seconds would not be, and a process of its own, which a kernel could limit, would cost every notebook one.

A step is a pass of a loop, a call, a filter, an operator, an item of a list that is made, or `CHARACTERS` characters of
a text that is made or looked at. An operation whose result could be longer than its operands ("x" * n, replace, join,
indent, formats, ...) is asked for a bound before it runs: see growth.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from types import CodeType, GeneratorType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from reference_impl.features.chat.growth import growth, growth_of_operator
from reference_impl.features.chat.messages import Arguments
from reference_impl.features.chat.parts import goes_through_content

MAX_STEPS = 4_000_000  # some seconds; 1,000 messages of 800 characters take some 50,000
CHARACTERS = 64  # that are a step
# Filters that look at no more than an item.
_CHEAP = {"length", "count", "first", "last", "default", "d", "abs", "int", "float", "attr"}

_COMPARING = {"sort", "unique", "groupby", "dictsort", "max", "min", "sum", "index", "count"}
_BY_PATTERNS = {"pprint", "title", "urlize", "wordcount", "wordwrap", "striptags"}  # some ten times as slow
_HOLD: Any = (list, tuple, dict, set, type({}.keys()), type({}.values()), type({}.items()))  # other values
_LONG: Any = (*_HOLD, range)
_COMPARING_TESTS = ("eq", "==", "equalto", "ne", "!=", "gt", ">", "greaterthan", "ge", ">=", "lt", "<", "lessthan",
                    "le", "<=", "in")  # fmt: skip


class ChatTemplateError(ValueError):
    """A template that cannot be read or rendered, or refuses a conversation: which one, the line, and why."""


class _Refusal(TemplateError):
    """What a template says by raise_exception()."""


class _TooLong(TemplateError):
    """More than MAX_STEPS."""


def render(source: str, variables: Mapping[str, Any], where: str, max_steps: int = MAX_STEPS) -> str:
    """The text of a chat template. where: what errors call it. Raises ChatTemplateError."""
    sandbox, code = Sandbox(max_steps), check(source, where)
    try:
        sandbox.know(variables)
        template = Template.from_code(sandbox, code, sandbox.make_globals(None))
        return "".join(template.root_render_func(template.new_context(dict(variables))))
    except Exception as error:  # whatever a template's Python does
        raise ChatTemplateError(f"{where}, line {_line_of(error)}: {_reason(error)}") from None


def check(source: str, where: str) -> CodeType:
    """A chat template, compiled. Raises ChatTemplateError where it is no Jinja."""
    try:
        return _compile(source)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(f"{where}, line {error.lineno}: no Jinja template: {error.message}") from None
    except Exception as error:  # brackets too deep, a template that extends another, ...
        raise ChatTemplateError(f"{where}: no Jinja template: {type(error).__name__}: {error}") from None


@functools.lru_cache(maxsize=64)
def reads_parts(source: str) -> bool:
    """The template can take a list of parts as a message's content."""
    try:
        return goes_through_content(Sandbox(MAX_STEPS).parse(source))
    except (TemplateError, RecursionError):
        return False  # rendering says what is wrong


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> CodeType:
    return Sandbox(MAX_STEPS).compile(source)


def _line_of(error: BaseException) -> int:
    """The template's line that ran last."""
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
    if isinstance(error, _TooLong):
        return str(error)
    if isinstance(error, (RecursionError, MemoryError)):
        return f"the chat template nests too deeply, or makes too much: {type(error).__name__}"
    return f"the chat template fails: {type(error).__name__}: {error}"


class _Generator(CodeGenerator):
    """Compiles a template so that each pass, list and text tells the sandbox of itself."""

    def blockvisit(self, body: Any, frame: Frame) -> None:
        outputs = [node for node in body if isinstance(node, nodes.Output)]
        literal = sum(len(d.data) for o in outputs for d in o.nodes if isinstance(d, nodes.TemplateData))
        self.writeline(f"environment.spend({1 + literal // CHARACTERS})")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # runs for items that the body never sees
            spent = nodes.Call(nodes.EnvironmentAttribute("passed"), [], [], None, None, lineno=node.lineno)
            node.test = nodes.And(spent, node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def _told(self, how: str, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{how}(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._told("made", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._told("made", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._told("made", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._told("made", super().visit_Concat, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._told("made", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._compared(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        words = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in",
                 "notin": "not in"}  # fmt: skip
        self.write(f" {words[node.op]} ")
        self._compared(node.expr, frame)

    def _compared(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
        else:
            self._told("compared", self.visit, node, frame)


class _Generation(Extension):
    """{% generation %}: marks what the assistant has written, for training. Here its text is what it is without."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return caller()


class _Namespace(Namespace):
    """namespace(), without names that begin with an underscore: they would lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=...) works, as Jinja's
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # Jinja's shows all that is in it, which could be without end


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace: a name may not begin with an underscore, got {name!r}")


class _Dict:
    """dict(), without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Sandbox(ImmutableSandboxedEnvironment):
    """For one rendering: it counts."""

    code_generator_class = _Generator
    intercepted_binops = frozenset("+ - * / // ** %".split())

    def __init__(self, max_steps: int):
        # Not optimized: constants would be computed by the compiler, where nothing counts.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self._shown,
            extensions=[_Generation, loopcontrols],
        )  # fmt: skip
        self.steps, self.max_steps = 0, max_steps
        self._kept: dict[int, tuple[Any, int]] = {}  # by id: a value, and its size
        self.filters["tojson"] = self._tojson
        self.filters = {name: self._counting(name, function) for name, function in self.filters.items()}
        tests: dict[str, Any] = self.tests
        self.tests |= {name: self._comparing(tests[name]) for name in _COMPARING_TESTS}
        self.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        self.globals |= {"dict": _Dict(), "namespace": _Namespace}

    def know(self, value: Any) -> None:
        """What a template is given costs nothing to make."""
        self._size(value, counted=False)

    def _size(self, value: Any, counted: bool = True) -> int:
        """Characters and items. A list in it counts as often as it occurs: printed, it would be that long.

        counted: what is new in it costs a step for each item. Lists and dicts are kept, and looked at once; no template
        can change one.
        """
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return value.bit_length()
        if not isinstance(value, _HOLD):
            return 1
        if id(value) in self._kept:
            return self._kept[id(value)][1]
        items = [*value, *value.values()] if isinstance(value, dict) else value
        if counted:
            self.spend(1 + len(items))
        size = len(items) + sum(self._size(item, counted) for item in items)
        if isinstance(value, Arguments):  # which a template may write as their text
            size = max(size, len(str(value)))
        if isinstance(value, dict):  # its names have been looked at, to their ends
            self.spend(sum(self._size(name) // CHARACTERS for name in value if isinstance(name, tuple)))
        if size > self.max_steps * CHARACTERS // 4:
            self.spend(self.max_steps)
        self._kept[id(value)] = value, size
        return size

    # --- what compiled templates call ---------------------------------------------------------------------------------

    def spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > self.max_steps:
            raise _TooLong(f"the chat template does not end within {self.max_steps:,} steps, which is the limit")

    def passed(self) -> bool:
        return True  # the call has been counted

    def made(self, value: Any) -> Any:
        """A value that an operation has made."""
        size = self._size(value)
        is_held = isinstance(value, _HOLD) and not isinstance(value, Arguments)
        self.spend(1 if is_held else 1 + size // CHARACTERS)
        return value

    def compared(self, value: Any) -> Any:
        """A value that an operation looks at to its end."""
        self.spend(1 + self._size(value) // CHARACTERS)
        return value

    @pass_context
    def _shown(self, context: Context, value: Any) -> Any:
        return self.made(value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        own = (owner,) if isinstance(owner, (str, int, list, tuple, dict)) else ()
        name = getattr(method, "__name__", "")
        args = _listed(name, args)
        self._before(name, (*own, *args), kwargs)
        return self.made(super().call(context, function, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """No bytes: no template needs them, and all that is counted of texts would have to be counted of them."""
        return attr not in ("encode", "to_bytes") and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            self.compared(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._allow(growth_of_operator(operator, left, right, self._size))
        return self.made(super().call_binop(context, operator, left, right))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        own = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            args = _listed(name, args)
            if name in _CHEAP:
                self.spend(1)
            else:
                self._before(name, args[own:], kwargs)
            return self.made(function(*args, **kwargs))

        return run

    def _comparing(self, test: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            return test(*map(self.compared, args))

        return run

    def _before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a filter or a method."""
        for value in (*args, *kwargs.values()):
            if name in _COMPARING or isinstance(value, (str, tuple)):
                self.compared(value)
            elif isinstance(value, _LONG):
                self._allow(self._size(value))
                self.spend(len(value))
            if name in _BY_PATTERNS:
                self.spend(self._size(value) // 4)
        self._allow(growth(name, args, kwargs, self._size))

    def _allow(self, characters: int) -> None:
        """Before an operation that makes at most this many."""
        if characters // CHARACTERS > self.max_steps - self.steps:
            self.spend(characters // CHARACTERS)

    def _tojson(
        self, value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        """As json.dumps: the order stays, and HTML is not escaped, other than by Jinja's own filter."""
        if separators is not None:
            self.spend(sum(map(len, separators)))
        options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
        pieces = []
        for piece in json.JSONEncoder(sort_keys=sort_keys, **options).iterencode(value):
            self.spend(1 + len(piece) // CHARACTERS)
            pieces.append(piece)
        return "".join(pieces)


def _listed(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """join and sum take all of what they are given; how much that is, only a list says."""
    return tuple(list(a) if isinstance(a, GeneratorType) else a for a in args) if name in ("join", "sum") else args


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
