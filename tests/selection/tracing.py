"""In each process of a test: the functions of the project that it enters, the files it reads, the folders it lists.

Every Python of a run that records loads this at its start (`run.py` puts a line into site-packages). Modules of the
project are then compiled with a mark at the head of each function, `entered[number] = 1`, where `entered` is a file in
memory: a killed process loses nothing, and what a test starts writes to the same file. (A trace function, coverage.py's
too, makes Python 3.11 twice as slow, and Triton's interpreter far more; sys.monitoring needs Python 3.12.)

INFERLAB_TRACE names two files: NAME for lines of text, NAME.map for the marks.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import fcntl
import hashlib
import json
import marshal
import mmap
import os
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType
from typing import Any

TRACE = "INFERLAB_TRACE"
MARKS = "_inferlab_entered"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/"
CODE = ROOT + ".venv/.traced/"  # compiled modules, and the table
TABLE = CODE + "table.json"  # path -> number of the module's mark; those of its functions follow in their order
EACH = 256  # numbers that a module has; further functions share the last
HOOK = (  # a line of site-packages for every Python of a run that records
    "import os, sys; os.environ.get({variable!r}, '').startswith({folder!r}) and exec(\"import importlib.util as u; "
    "s = u.spec_from_file_location('inferlab_tracing', {code!r}); m = u.module_from_spec(s); "
    'sys.modules[s.name] = m; s.loader.exec_module(m)")\n'
)
_SHOWING = ("/traceback.py", "/warnings.py")  # a line of source for a message: nothing depends on it
_file = -1
_seen: set[tuple[str, str]] = set()
_table: dict[str, int] = {}


def switch(path: str) -> None:
    """From now on write to these files, also what was written to others before."""
    global _file
    if _file >= 0:
        os.close(_file)
        _file = -1
    os.environ[TRACE] = path
    _seen.clear()
    with contextlib.suppress(OSError):  # in a sandbox that does not show it
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # High: a process that closes what it inherited and opens files must not find ours under a low number.
        _file = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 900)
        os.close(opened)
        with open(f"{path}.map", "a+b") as marks:
            marks.truncate(len(_table) * EACH)
            setattr(builtins, MARKS, mmap.mmap(marks.fileno(), len(_table) * EACH))


def start() -> None:
    """Follow this process, its threads and its forks."""
    if any("learner_side" in word for word in sys.orig_argv):
        return  # a learner's process runs copies of what the test has read
    with open(TABLE, encoding="utf-8") as table:
        _table.update(json.load(table))
    setattr(builtins, MARKS, bytearray(len(_table) * EACH))
    switch(os.environ[TRACE])
    SourceFileLoader.get_code = _get_code  # type: ignore[method-assign]
    sys.addaudithook(_happens)
    for word in sys.orig_argv[1:]:
        if word.endswith(".py"):
            _asked_for("reads", word)


def _get_code(loader: SourceFileLoader, name: str, _usual: Any = SourceFileLoader.get_code) -> CodeType | None:
    path = loader.get_filename(name)
    number = _table.get(path[len(ROOT) :]) if path.startswith(ROOT) else None
    if number is None:
        found: CodeType | None = _usual(loader, name)
        return found
    with open(path, "rb") as file:
        content = file.read()
    kept = CODE + hashlib.sha256(f"{sys.version} {path} {number} ".encode() + content).hexdigest()[:32]
    with contextlib.suppress(OSError, ValueError, EOFError), open(kept, "rb") as file:
        made: CodeType = marshal.load(file)
        return made
    made = compile(_marked(ast.parse(content, path), number), path, "exec", dont_inherit=True)
    with contextlib.suppress(OSError):  # another user's process
        with open(f"{kept}.{os.getpid()}", "wb") as file:
            marshal.dump(made, file)
        os.replace(f"{kept}.{os.getpid()}", kept)
    return made


def functions(parent: ast.AST, prefix: str = "") -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Those of a module and its classes, by name; what is defined inside a function is part of it."""
    found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((prefix + node.name, node))
        elif not isinstance(node, ast.expr):
            found += functions(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)
    return found


def _marked(tree: ast.Module, number: int) -> ast.Module:
    """Marks come after a docstring and imports from __future__, which have to be first."""
    for count, node in enumerate([tree, *(node for _, node in functions(tree))]):
        first = 0 if ast.get_docstring(node, clean=False) is None else 1
        while first < len(node.body) and getattr(node.body[first], "module", "") == "__future__":
            first += 1
        mark = ast.parse(f"{MARKS}[{number + min(count, EACH - 1)}] = 1").body[0]
        line = node.body[min(first, len(node.body) - 1)].lineno if node.body else 1
        for each in ast.walk(mark):
            ast.copy_location(each, ast.Pass(lineno=line, col_offset=0, end_lineno=line, end_col_offset=0))
        node.body.insert(first, mark)
    return tree


def _write(kind: str, path: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_file, f"{kind} {path}\n".encode())


def tests_are_in(path: str) -> None:
    """A file that pytest compiles, asserts rewritten: without marks, so all of it is needed."""
    if path.startswith(ROOT):
        _write("tests", path[len(ROOT) :])


def _happens(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: for all processes that this one starts, and for files and folders of the project."""
    if event == "open":
        path, mode, flags = arguments
        writes = not set(mode).isdisjoint("wax+") if mode else flags & os.O_ACCMODE != os.O_RDONLY
        if not writes:
            _asked_for("reads", path)
    elif event in ("os.listdir", "os.scandir"):
        _asked_for("lists", "." if arguments[0] is None else arguments[0])
    elif event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        words, environment = (arguments[1], arguments[3]) if event == "subprocess.Popen" else arguments[1:3]
        if isinstance(words, list | tuple) and "ls-files" in words:
            _write("lists", "")
        if isinstance(environment, dict) and TRACE in os.environ:
            environment.setdefault(TRACE, os.environ[TRACE])


def _asked_for(kind: str, path: object) -> None:
    if not isinstance(path, str | bytes | os.PathLike):
        return
    try:
        name = os.path.abspath(os.fsdecode(path))
    except OSError:  # the current folder is gone
        return
    if not f"{name}/".startswith(ROOT) or name.startswith(ROOT + ".venv/") or (kind, name) in _seen:
        return
    frame: FrameType | None = sys._getframe(2)
    while frame:
        file = frame.f_code.co_filename
        if file == __file__ or file.startswith("<frozen importlib") or (kind == "reads" and file.endswith(_SHOWING)):
            return
        if "/_pytest/" in file:
            return  # it collects
        if file.startswith(ROOT) and "/.venv/" not in file:
            break
        frame = frame.f_back
    _seen.add((kind, name))
    _write(kind, name[len(ROOT) :])


if __name__ == "inferlab_tracing":
    start()
