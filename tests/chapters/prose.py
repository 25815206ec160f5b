"""What the prose of a notebook says, against its code: does a cell show anything, do names exist, are numbers proven.

Nothing here runs a notebook: `silent_cells` and `unprinted_numbers` take one that was run, the rest is about text. A
paragraph may carry marks, HTML comments that a notebook does not show:

    <!-- tested: tests/claims/test_chapter_05.py::test_name -->   that test has its numbers
    <!-- stands: datasets/traces/agents.yaml -->                  that file of ours, code or data, has them
    <!-- printed: cell -->                                        what that cell of the notebook prints has them
    <!-- source: who, what, when -->                              facts of others, which no test of ours can know
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import itertools
import json
import keyword
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
Notebook = Mapping[str, Any]


def read_notebook(path: Path) -> dict[str, Any]:
    """A notebook as it is stored, with each cell's source in one string."""
    notebook: dict[str, Any] = json.loads(path.read_text("utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


# ---------------------------------------------------------------- a cell that shows, shows

_SHOWS = {"print", "show", "table", "display", "show_source", "predict", "reveal", "quiz"}
# Calls that a cell may end in and whose value is None.
_IN_PLACE = {"append", "extend", "update", "clear", "manual_seed", "set_num_threads", "sort", "assert_close"}


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _shows(statements: Iterable[ast.stmt], absent: Collection[str]) -> bool:
    """Whether these statements print or display; not in functions, nor under a condition that is false here."""
    for node in statements:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                continue
            case ast.If():
                names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
                inside = node.orelse if names & set(absent) else [*node.body, *node.orelse]
            case ast.For() | ast.While() | ast.Try():
                inside = [*node.body, *node.orelse]
            case ast.With():
                inside = node.body
            case _:
                if any(_called(n) in _SHOWS for n in ast.walk(node)):
                    return True
                continue
        if _shows(inside, absent):
            return True
    return False


def _sources_shown(tree: ast.Module) -> tuple[list[ast.expr], list[ast.expr]]:
    """What `inspect.getsource` is asked for and what is printed of it: (whole, cut out).

    A name that was given a source, or a piece of one, counts as that source. What becomes tokens is not shown.
    """
    holding: dict[str, list[ast.expr]] = {}

    def asked(node: ast.AST) -> list[ast.expr]:
        found = []
        for inner in ast.walk(node):
            if _called(inner) == "getsource":
                found += inner.args  # type: ignore[attr-defined]
            elif isinstance(inner, ast.Name):
                found += holding.get(inner.id, [])
        return found

    whole: list[ast.expr] = []
    cut: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and not any(_called(n) == "encode" for n in ast.walk(node)):
            for target in node.targets:
                if isinstance(target, ast.Name) and (found := asked(node.value)):
                    holding[target.id] = found
    for node in ast.walk(tree):
        if _called(node) == "print":
            for argument in node.args:  # type: ignore[attr-defined]
                (whole if _called(argument) == "getsource" else cut).extend(asked(argument))
    return whole, cut


def shown_text(cell: Mapping[str, Any]) -> str:
    """What a cell has put out, as text."""
    return "\n".join(
        output["text"] if output["output_type"] == "stream" else output.get("data", {}).get("text/plain", "")
        for output in cell.get("outputs", ())
    )


def silent_cells(executed_notebook: Notebook, absent: Collection[str] = ()) -> list[str]:
    """Cells that print, show a figure or a source, or end in an expression, and put out nothing but blanks; why.

    absent: names that are false on this machine (has_triton, on_gpu): what stands under an `if` of one need not show.
    A source that is printed whole must show its def, class or @triton.jit; a piece cut out of one, a line of our code.
    """
    faults = []
    for cell in executed_notebook["cells"]:
        if cell["cell_type"] != "code" or cell["id"] == "bootstrap":
            continue
        tree = ast.parse(cell["source"])
        last = tree.body[-1] if tree.body else None
        ends = isinstance(last, ast.Expr) and not isinstance(last.value, ast.Constant)
        if isinstance(last, ast.Expr) and (_called(last.value) in _IN_PLACE or cell["source"].rstrip().endswith(";")):
            ends = False
        if not ends and not _shows(tree.body, absent):
            continue
        lines = [line.strip() for line in shown_text(cell).splitlines()]
        whole, cut = _sources_shown(tree)
        if not any(lines):
            faults.append(f"{cell['id']}: puts out nothing")
        elif whole and not any(re.match(r"(async )?def |class |@triton\.jit", line) for line in lines):
            faults.append(f"{cell['id']}: shows a source without def, class or @triton.jit")
        elif cut and not any(line in source_lines() or line.endswith(returned()) for line in lines if line):
            faults.append(f"{cell['id']}: shows no line of the source that it cuts a piece from")
    return faults


def absent_here() -> frozenset[str]:
    """Names that chapters ask what a machine has, and that are false on this one.

    Not on_gpu: most learners have none, so a cell that shows something with a GPU shows something without.
    """
    import torch

    gpu, triton = torch.cuda.is_available(), importlib.util.find_spec("triton") is not None
    has = {"has_triton": triton, "interpreted": triton and not gpu, "fp8_here": triton}
    return frozenset(name for name, there in has.items() if not there)


@functools.cache
def source_lines() -> frozenset[str]:
    """The lines of our code, without indentation; those too short to be told from other text are left out."""
    text = "\n".join(text for text, _ in parsed().values())
    return frozenset(line for raw in text.splitlines() if len(line := raw.strip()) >= 12)


@functools.cache
def returned() -> tuple[str, ...]:
    """What stands behind `return` on the lines of our code, and is long enough to be known again."""
    return tuple({line.removeprefix("return ") for line in source_lines() if re.match(r"return .{10}", line)})


# ---------------------------------------------------------------- names

_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_NAME = re.compile(r"(?<![\w.\-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\.py\b)?(?![\w\-])")
_MATHS = re.compile(r"[a-zA-Z]_\w+|[a-zA-Z]\d*|[a-z]+_[a-z]")  # s_j, d_in, sum_i: a letter or a sum with an index


@functools.cache
def parsed() -> dict[Path, tuple[str, ast.Module]]:
    """{file of the engine, the grader or the widgets: its text and its tree}."""
    found = {}
    for folder in ("reference_impl", "grader", "chapters/widgets"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            found[path] = text, ast.parse(text)
    return found


def names_of(tree: ast.AST) -> set[str]:
    """Names that code defines or uses, and strings that are one name (keys, options, values of a Literal)."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found |= {*name.split("."), other or name}
            case ast.Constant(value=str(text)) if text.isidentifier():
                found.add(text)
    return found


@functools.cache
def engine_names() -> frozenset[str]:
    found: set[str] = set()
    for path in parsed():
        found |= _module_names(path) | {path.stem}
    return frozenset(found)


def _code(notebook: Notebook) -> str:
    return "\n\n".join(cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code")


def stands_as_word(name: str, text: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text))


def spans(text: str) -> list[str]:
    """Code spans of a markdown text; a line break in one counts as a blank."""
    return [" ".join(span.split()) for span in _SPAN.findall(_FENCE.sub("", text))]


def names_in(span: str) -> list[str]:
    """The names in a code span that should exist: dotted or with underscores, CamelCase, called, or the span's all.

    `s_j` and `d_in` are mathematics, and so are words of a formula such as `reserved − used`.
    """
    if re.fullmatch(r"-{1,2}[a-z][\w-]*", span):
        return [span]
    names = []
    for match in _NAME.finditer(re.sub(r"\"[^\"]*\"|'[^']*'", "", span)):
        name = match[0]
        whole, called = match.span() == (0, len(span)) and len(name) > 2, span[match.end() :].startswith("(")
        camel = re.fullmatch(r"(?:[A-Z][a-z0-9]+){2,}[A-Z]*", name)
        if (whole or called or camel or re.search(r"\w_\w|\w\.\w\w", name)) and not _MATHS.fullmatch(name):
            names.append(name)
    return names


def _resolves(name: str) -> bool:
    """Whether an installed package has a dotted name: looked up in its files, because importing torch takes seconds."""
    first, *rest = name.split(".")
    spec = importlib.util.find_spec(first)
    if spec is None or not spec.submodule_search_locations:
        return False
    folder = Path(spec.submodule_search_locations[0])
    while rest and (folder / rest[0]).is_dir():
        folder /= rest.pop(0)
    files = [
        folder / "__init__.py",
        folder / "__init__.pyi",
        folder / "_C/_VariableFunctions.pyi",
        folder / "functional.py",
    ]
    if rest and (folder / f"{rest[0]}.py").is_file():
        files = [folder / f"{rest.pop(0)}.py"]
    text = "\n".join(file.read_text("utf-8") for file in files if file.is_file()) if rest else ""
    defined = r"\s*(?:def|class) {0}\b|\s*{0}\b\s*[:=,]|.*\bimport .*\b{0}\b|.*\bas {0}\b|.*\"{0}\""
    lines = [line for line in text.splitlines() if any(part in line for part in rest)]
    return all(any(re.match(defined.format(part), line) for line in lines) for part in rest)


@functools.cache
def _module_names(path: Path) -> frozenset[str]:
    return frozenset(names_of(parsed()[path][1]))


def _of_our_module(parts: list[str]) -> bool | None:
    """Whether the name exists in a module of ours that the first parts are, or None where they are none."""
    for cut in range(len(parts), 0, -1):
        tail, found = "/".join(parts[:cut]), []
        for path in parsed():
            at = path.with_suffix("").as_posix().removesuffix("/__init__")
            if at.endswith("/" + tail) and (cut > 1 or len(parts) > 1):
                found.append(set(parts[cut:]) <= _module_names(path))
        if found:
            return any(found)
    return None


def exists(name: str, own: Collection[str], foreign: Collection[str] = ()) -> bool:
    """Whether a name is one of ours, of the notebook's, of Python, of torch, or listed as another's."""
    if name.startswith("-"):
        return name in foreign or name in our_options()
    if name in foreign or name in own or keyword.iskeyword(name) or hasattr(builtins, name) or hasattr(math, name):
        return True
    parts = name.split(".")
    if parts[0] == "torch" or (parts[0] == "np" and "np" in own):
        return _resolves(name.replace("np.", "numpy.", 1))
    if set(parts) <= set(own):  # first, since a name of the notebook's may be a module's, too
        return True
    if len(parts) > 1 and (found := _of_our_module(parts)) is not None:
        return found
    return set(parts) <= engine_names() | set(own)


def is_path(span: str) -> bool:
    return bool(re.fullmatch(r"[a-z_]\w[\w.\-]*(?:/[\w.\-]+)*/?|\d\d_\w+/\w+", span, re.ASCII)) and "/" in span


def _is_there(path: str, folder: Path) -> bool:
    places = (ROOT / path, folder / path, ROOT / "chapters" / path)
    return any(place.exists() or place.with_suffix(".ipynb").exists() for place in places)


def commands(text: str) -> list[str]:
    """Command lines of the course's own tools, in code spans and code blocks."""
    lines = [line for block in _FENCE.findall(text) for line in block.splitlines()] + spans(text)
    return [line for line in lines if re.match(r"inferlab |python -m (?:reference_impl|grader)\b", line)]


@functools.cache
def _cli() -> Any:
    import typer

    from grader.cli import app

    return typer.main.get_command(app)


def _options(command: Any) -> set[str]:
    found = {"--help"} | {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    if command.context_settings.get("ignore_unknown_options"):  # a bench, which has a parser of its own
        source = (ROOT / "reference_impl" / "bench" / f"{command.name}.py").read_text("utf-8")
        found |= set(re.findall(r'"(--[\w-]+)"', source))
    return found


@functools.cache
def our_options() -> frozenset[str]:
    """Options of all commands of `inferlab`."""
    found, commands = set(), [_cli()]
    while commands:
        command = commands.pop()
        found |= _options(command)
        commands += getattr(command, "commands", {}).values()
    return frozenset(found)


def command_fault(line: str) -> str | None:
    """What is wrong with a command line of `inferlab` or `python -m`: an unknown subcommand, module or option."""
    words = line.split("#")[0].split()
    if words[0] == "python":
        return None if _resolves(words[2]) else f"no module {words[2]}"
    command = _cli()
    for word in words[1:]:
        if not hasattr(command, "commands") or word.startswith("-"):
            break
        if word not in command.commands:
            return f"no command {word!r}"
        command = command.commands[word]
    options = _options(command)
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in options]
    return f"no option {', '.join(unknown)}" if unknown else None


def unknown_names(notebook: Notebook, foreign: Collection[str], folder: Path = ROOT) -> list[str]:
    """Names in code spans of the prose that exist nowhere, as "cell: name"; also paths, options, commands."""
    own = names_of(ast.parse(_code(notebook))) | {cell["id"] for cell in notebook["cells"] if cell.get("id")}
    own |= {path.stem for path in folder.glob("*.py")}
    text_of_code, faults = _code(notebook), []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        where = cell.get("id", "?")
        faults += [f"{where}: {line}: {fault}" for line in commands(cell["source"]) if (fault := command_fault(line))]
        for span in spans(cell["source"]):
            if span in foreign or span in commands(cell["source"]) or stands_as_word(span, text_of_code):
                continue
            if is_path(span):
                faults += [] if _is_there(span, folder) else [f"{where}: {span}"]
                continue
            faults += [f"{where}: {name}" for name in names_in(span) if not exists(name, own, foreign)]
    return faults


def used_names(notebook: Notebook) -> set[str]:
    """All spans, and names in spans, of the prose: what a list of foreign names is for."""
    found: set[str] = set()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            for span in spans(cell["source"]):
                found |= {span, *names_in(span)}
    return found


# ---------------------------------------------------------------- above and below

_LISTING = re.compile(r"\b(?:source|code|loop|listing|function)s? (?:above|below)\b|\b(?:above|below) is the source\b")
_CELL = re.compile(r"\bcell (above|below)\b")
_PLACE = re.compile(r"\b(?:above|below)\b", re.IGNORECASE)


@functools.cache
def shown_source(code: str) -> str:
    """The sources that a cell prints, found without running it: of every name that `inspect.getsource` is asked for."""
    tree = ast.parse(code)
    asked = [node for part in _sources_shown(tree) for node in part]
    names = [n for node in asked for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)]
    # In a loop over methods the name is the loop's; the methods stand in the cell.
    if any(isinstance(n, ast.Name) for n in asked):
        names += [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    wanted = {ast.unparse(n).removesuffix(".fn") for n in names}
    module = any(_called(node) == "getmodule" for node in asked)
    found: list[str] = []
    for name in sorted(wanted):
        parts = name.split(".")  # Class.method, or module.function
        found += _definitions(module).get(".".join(parts[-2:]), ()) or _definitions(module).get(parts[-1], ())
    return "\n".join(found)


@functools.cache
def _definitions(module: bool) -> dict[str, list[str]]:
    """{name: the sources of the functions and classes of that name, or of the modules that define it}."""
    found: dict[str, list[str]] = {}
    for text, tree in parsed().values():
        lines = text.splitlines()
        classes = [n for n in tree.body if isinstance(n, ast.ClassDef)]
        named = [(n.name, n) for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        named += [(f"{c.name}.{n.name}", n) for c in classes for n in c.body if isinstance(n, ast.FunctionDef)]
        for name, node in named:
            piece = text if module else "\n".join(lines[node.lineno - 1 : node.end_lineno])
            found.setdefault(name, []).append(piece)
    return found


def misplaced_names(notebook: Notebook) -> list[str]:
    """Names that the prose puts above or below, and that do not stand there, as "cell: name".

    "The source above" is what the nearest earlier cell shows that shows one: all names of that paragraph stand there.
    "The cell above" is that cell, for the names of that sentence. Where a sentence only says "above", its names have to
    stand in some earlier cell.
    """
    cells, faults = notebook["cells"], []
    for at, cell in enumerate(cells):
        if cell["cell_type"] != "markdown":
            continue
        for paragraph in _FENCE.sub("", cell["source"]).split("\n\n"):
            listing = _LISTING.search(paragraph)
            pieces = [paragraph] if listing else re.split(r"(?<=[.:?!])\s+", paragraph)
            for piece in (p for p in pieces if _PLACE.search(p)):
                nearest = _CELL.search(piece)
                above = not re.search(r"\bbelow\b", piece, re.IGNORECASE)
                both = not above and bool(re.search(r"\babove\b", piece, re.IGNORECASE))
                side = cells[:at][::-1] if above else cells[at + 1 :]
                code = [c for c in (cells if both else side) if c["cell_type"] == "code" and c["id"] != "bootstrap"]
                if listing and not both:
                    code = next(([c] for c in code if shown_source(c["source"])), code[:1])
                elif nearest and not both:
                    code = code[:1]
                text = "\n".join(f"{c['id']}\n{c['source']}\n{shown_source(c['source'])}" for c in code)
                for span in spans(piece):
                    whole = re.fullmatch(r"[\w.\- ]{2,}", span)
                    for name in [span] if whole else names_in(span):
                        if not stands_as_word(name, text):
                            faults.append(f"{cell['id']}: {name}")
    return faults


# ---------------------------------------------------------------- numbers

MARK = re.compile(r"<!--\s*(tested|stands|printed|source):\s*(.+?)\s*-->", re.DOTALL)
DATED = re.compile(r"^As of (?:[A-Z][a-z]+ )?20\d\d(?:-\d\d)?\b", re.MULTILINE)
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_SCALES: dict[str, tuple[float, ...]] = {
    "%": (1, 0.01), "percent": (1, 0.01), "k": (1, 1e3, 1024), "million": (1, 1e6), "billion": (1, 1e9),
    "x": (1,), "times": (1,), "s": (1,), "seconds": (1,), "FLOP": (1,), "bytes": (1,), "bits": (1,), "bit": (1,),
    "ms": (1, 1e-3), "us": (1, 1e-6), "µs": (1, 1e-6), "ns": (1, 1e-9),
    "KB": (1, 1e3), "MB": (1, 1e6), "GB": (1, 1e9, 1e-3), "TB": (1, 1e12, 1e3), "KiB": (1, 1024), "MiB": (1, 2**20),
    "GiB": (1, 2**30), "GFLOP": (1, 1e9), "TFLOP": (1, 1e12), "PFLOP": (1, 1e15),
}  # fmt: skip
_UNITS = "|".join(sorted(map(re.escape, _SCALES), key=len, reverse=True))
NUMBER = re.compile(
    rf"(?<![\w.,/^_-])(?P<value>{_NUMBER})(?![\d\w]*[A-Z_])(?:[ -]?(?P<unit>{_UNITS})(?:/s)?(?!\w))?(?!\w)"
)
# What is not a quantity: replaced by blanks before numbers are looked for.
_NO_QUANTITY = re.compile(
    "|".join((
        r"<!--.*?-->", r"^```.*?^```", r"(?<!`)`[^`]+`", r"\]\([^)]*\)", r"<https?:[^>]*>",
        r"\$\$.*?\$\$", r"\$[^$\n]*[\\^_{][^$\n]*\$",  # formulas, and not prices
        r"^#+ .*$", r"^ *\d+\. ",  # headings, items of lists
        r"\(?E\d\d\.\d+(?:, E\d\d\.\d+)*\)?",
        r"\b(?:[Cc]hapters?|[Ss]ections?|[Pp]arts?|[Ll]abs?|[Ll]ayers?|[Rr]equests?|[Ss]teps?|versions?|phases?|[Nn]umbers?|lines?"
        r"|keys?|blocks?|Request) \[?\d+[a-d]?\b(?:(?:,? (?:and|to|or) |, )\d+[a-d]?\b)*",
        r"\((?:\d\d[a-d]?(?:,\s| and )?)+\)", r"\b0\d[a-d]?\b",  # chapters by number
        r"\b(?:19[5-9]\d|20[0-3]\d)(?:-\d\d|s)?\b(?! (?:tokens|FLOP|bytes))",  # years
        r"\barXiv\s+\d+\.\d+", r"\(\d{4}\.\d{5}\)", r"\b\d{4}\.\d{5}\b",
        r"\b(?:About|about|another) \d+ minutes", r"\babout \d+ minutes", r"which take about \d+\b",
        # names of models, machines, versions
        r"\b(?:Llama|Gemma|Qwen|NVLink|PCIe|RTX|TPU v|V|Version|version|cuDNN|GPT|FlashAttention|CUDA|Gemini|CUTLASS"
        r"|compute capability)[ -]?v?\d+(?:\.\d+)?(?:-\d+B)?(?: and \d\b)?",
        r"\b[A-Za-z]+[-.]?\d[\w.-]*(?:-\d+[BM])?\b", r"\b\d+(?:\.\d+)?[BM]\b",
        r"\bp\d\d\b", r"\b\d+:\d+\b", r"\b(?:fp|bf|int)\d+\b", r"10[⁰-⁹]+",
    )),
    re.DOTALL | re.MULTILINE,
)  # fmt: skip
_QUOTED = re.compile(r'"[^"]*"')
# A sentence about what a cell put out: its numbers are looked for there, not in all code.
_SAYS_PRINTED = re.compile(r"\b(?:prints|printed)\b(?!\s+on\b)")


def paragraphs(text: str) -> list[str]:
    """Cut at blank lines and between items of a list; a mark in a paragraph of its own belongs to the one before it."""
    parts: list[str] = []
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if parts and not MARK.sub("", part).strip():
            parts[-1] += "\n" + part
        else:
            parts.append(part)
    return parts


def numbers(paragraph: str) -> list[re.Match[str]]:
    """The quantities of a paragraph: with a unit, with decimals or of two digits; no dates, names, numbers of chapters.

    Where an erratum is told (E05.1), what stands in quotation marks is somebody else's and wrong.
    """
    if re.search(r"\bE\d\d\.\d+", paragraph):
        paragraph = _QUOTED.sub(lambda m: " " * len(m[0]), paragraph)
    text = _NO_QUANTITY.sub(lambda m: " " * len(m[0]), paragraph)
    return [m for m in NUMBER.finditer(text) if m["unit"] or len(m["value"].lstrip("0")) > 1]


_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: lambda a, b: a**b if abs(b) < 64 else 0,
}  # fmt: skip


def _value(node: ast.AST) -> float | None:
    """What an expression of constants comes to; None where it has names in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value if abs(node.value) < 1e30 else None
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if left is not None and right is not None and not (right == 0 and isinstance(node.op, ast.Div | ast.FloorDiv)):
            return _OPERATORS[type(node.op)](left, right)
    return None


def _evaluated(tree: ast.AST) -> Iterator[float]:
    """Numbers of code: constants, those in strings, and what arithmetic of constants comes to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from numbers_of_text(node.value)
        elif isinstance(node, ast.Constant | ast.BinOp) and (value := _value(node)) is not None:
            yield float(value)


def numbers_of_text(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(rf"(?<![\d.]){_NUMBER}(?:e-?\d+)?", text)]


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def stands_in(match: re.Match[str], evidence: Collection[float]) -> bool:
    """Whether a number of prose, rounded as it is written, is one of these."""
    value = float(match["value"].replace(",", ""))
    ulp = 10.0 ** -len(match["value"].partition(".")[2])
    for scale in _SCALES.get(match["unit"] or "", (1,)):
        for found in evidence:
            exact = float(found).is_integer() and scale == 1 and ulp == 1
            if abs(found - value * scale) <= (1e-9 if exact else 0.5000001 * ulp * scale):
                return True
    return False


@functools.cache
def _register() -> dict[str, dict[str, Any]]:
    raw = yaml.load((ROOT / "tests/claims/register.yaml").read_text("utf-8"), yaml.CSafeLoader)
    return {row["id"]: row for row in (*raw["errata"], *raw["values"])}


@functools.cache
def numbers_of_file(path: Path) -> frozenset[float]:
    if not path.is_file():
        return frozenset()
    return frozenset(_evaluated(_tree(path)) if path.suffix == ".py" else numbers_of_text(path.read_text("utf-8")))


@functools.cache
def numbers_of_test(node: str) -> frozenset[float]:
    """Numbers of a test, "path::name", with the constants of its file; none where there is no such test."""
    path, _, name = node.partition("::")
    if not (ROOT / path).is_file():
        return frozenset()
    body = _tree(ROOT / path).body
    functions = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == name]
    constants = [n for n in body if isinstance(n, ast.Assign | ast.AnnAssign)] if functions else []
    return frozenset(value for n in (*functions, *constants) for value in _evaluated(n))


@functools.cache
def numbers_of_erratum(row_id: str) -> frozenset[float]:
    """Numbers of the tests that the register names for an erratum, and of its title."""
    row = _register().get(row_id, {})
    tests = row.get("test", [])
    tests = [tests] if isinstance(tests, str) else tests
    return frozenset(numbers_of_text(row.get("title", ""))).union(*map(numbers_of_test, tests))


def said_to_be_printed(paragraph: str, at: int) -> bool:
    """Whether the sentence around a position says that something was printed."""
    text = MARK.sub(lambda m: " " * len(m[0]), paragraph)
    ends = [0, *(m.end() for m in re.finditer(r"[.:?!]\*{0,2}\s+(?=\S)", text)), len(text)]
    begin, end = next((a, b) for a, b in itertools.pairwise(ends) if a <= at < b)
    # "The end of section 5 printed it: 64 KiB": what follows a colon belongs to it.
    if begin and text[:begin].rstrip().endswith(":"):
        begin = ends[ends.index(begin) - 1]
    return bool(_SAYS_PRINTED.search(text[begin:end]))


def marks(paragraph: str) -> list[tuple[str, str]]:
    return [(kind, " ".join(target.split())) for kind, target in MARK.findall(paragraph)]


def _is_test(node: str) -> bool:
    path, _, name = node.partition("::")
    functions = (
        [n for n in _tree(ROOT / path).body if isinstance(n, ast.FunctionDef)] if (ROOT / path).is_file() else []
    )
    return name.startswith("test_") and name in [n.name for n in functions]


def mark_faults(notebook: Notebook) -> list[str]:
    """Marks that name no test or no cell, and comments that are no mark but look like one."""
    code, faults = {c.get("id") for c in notebook["cells"] if c["cell_type"] == "code"}, []
    for cell in (c for c in notebook["cells"] if c["cell_type"] == "markdown"):
        if len(MARK.findall(cell["source"])) != cell["source"].count("<!--"):
            faults.append(f"{cell['id']}: a comment that is no mark")
        for kind, target in marks(cell["source"]):
            there = {
                "tested": kind == "tested" and _is_test(target),
                "stands": (ROOT / target).is_file() and not target.startswith("tests/"),
                "printed": target in code,
                "source": len(target.split()) > 2,
            }
            if not there[kind]:
                faults.append(f"{cell['id']}: {target} does not exist")
    return faults


def unproven_numbers(notebook: Notebook, printed: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """{cell: numbers of its prose that stand in no code of the notebook and in no test that the paragraph names}.

    A paragraph names tests by a mark, or by an erratum (E05.1) of the register. What it marks with a source, and a cell
    that says from when it is ("As of November 2026"), are facts of others. A number in the code of the notebook may be
    there for another reason: the rule finds what nothing speaks for, not what is wrong. But a sentence that says what a
    cell "printed" has its numbers in the output of the cell that the paragraph's mark names, and nowhere else.

    printed: {cell: what it has put out}. Without it, a mark that names a cell is believed.
    """
    code = frozenset(_evaluated(ast.parse(_code(notebook))))
    found: dict[str, list[str]] = {}

    def outputs(cell: str) -> list[float]:
        return numbers_of_text((printed or {}).get(cell, ""))

    for cell in notebook["cells"]:
        if cell["cell_type"] != "markdown" or DATED.search(cell["source"]):
            continue
        for paragraph in paragraphs(cell["source"]):
            kinds = marks(paragraph)
            if any(kind == "source" or (kind == "printed" and printed is None) for kind, _ in kinds):
                continue
            evidence = code
            for row_id in re.findall(r"E\d\d\.\d+", paragraph):
                evidence |= numbers_of_erratum(row_id)
            for kind, target in kinds:
                if kind == "tested":
                    evidence |= numbers_of_test(target)
                elif kind == "stands":
                    evidence |= numbers_of_file(ROOT / target)
            shown = frozenset(value for kind, cell in kinds if kind == "printed" for value in outputs(cell))
            for match in numbers(paragraph):
                if not stands_in(match, shown if said_to_be_printed(paragraph, match.start()) else evidence | shown):
                    found.setdefault(cell["id"], []).append(match[0].strip())
    return found


def unprinted_numbers(executed_notebook: Notebook) -> list[str]:
    """Numbers whose mark names a cell that does not print them, as "cell: number"."""
    printed = {cell["id"]: shown_text(cell) for cell in executed_notebook["cells"] if cell["cell_type"] == "code"}
    believed = unproven_numbers(executed_notebook)
    return [
        f"{cell}: {number}"
        for cell, values in unproven_numbers(executed_notebook, printed).items()
        for number in values
        if number not in believed.get(cell, [])
    ]
