"""In each process of a test: the functions of the project that it enters, the files it reads, the folders it lists.

Every Python of a run that records loads this at its start (`run.py` puts a line into site-packages), and takes modules
of the project from a folder in which each function begins with a mark: `line in seen or note(line)`. A line is written
when it is first noted, so a killed process loses nothing, and what a test starts writes to the same file, which
INFERLAB_TRACE names. (A trace function, coverage.py's too, makes Python 3.11 twice as slow, and Triton's interpreter
far more; sys.monitoring needs Python 3.12.)

    0 reference_impl/core/engine.py     imported; 3 instead of 0: its third function entered
    reads PATH, lists PATH              by code of the project, or by what that calls
    tests PATH                          a module that pytest compiled itself, so that it has no marks
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import marshal
import os
import re
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType
from typing import Any

TRACE = "INFERLAB_TRACE"
SEEN, NOTE = "_inferlab_seen", "_inferlab_note"  # builtins
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/"
MARKED = ROOT + ".venv/.marked/"
HOOK = (  # a line of site-packages for every Python of a run that records
    "import os, sys; os.environ.get({variable!r}, '').startswith({folder!r}) and exec(\"import importlib.util as u; "
    "s = u.spec_from_file_location('inferlab_tracing', {code!r}); m = u.module_from_spec(s); "
    'sys.modules[s.name] = m; s.loader.exec_module(m)")\n'
)
# What asks for files on which no outcome depends: imports, which have marks; pytest, when it collects; a line of source
# for a message; hypothesis, for numbers to try; the grader, for a hash by which its workers know that they are alike.
_FOR_NOTHING = re.compile(
    r"<frozen importlib|.*(/_pytest/|/traceback\.py|/warnings\.py|/hypothesis/.*/constants_ast\.py"
    r"|/grader/examination/worker\.py versions$)"
)
_file = -1
_seen: set[str] = set()


def switch(path: str) -> None:
    """From now on write to this file, also what was written to another before."""
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


def note(line: str) -> None:
    _seen.add(line)
    with contextlib.suppress(OSError):
        os.write(_file, f"{line}\n".encode())


def start() -> None:
    """Follow this process, its threads and its forks."""
    if any("learner_side" in word for word in sys.orig_argv):
        return  # a learner's process runs copies of what the test has read
    setattr(builtins, SEEN, _seen)
    setattr(builtins, NOTE, note)
    switch(os.environ[TRACE])
    SourceFileLoader.get_code = _get_code  # type: ignore[method-assign]
    sys.addaudithook(_happens)
    for word in sys.orig_argv[1:]:
        if word.endswith(".py"):
            _asked_for("reads", word)


def marked(path: str) -> str:
    """Where the marked code of a module lies; its path is relative to the root."""
    return MARKED + path.replace("/", ":")


def _get_code(loader: SourceFileLoader, name: str, _usual: Any = SourceFileLoader.get_code) -> CodeType | None:
    path = loader.get_filename(name)
    if path.startswith(ROOT):
        with contextlib.suppress(FileNotFoundError), open(marked(path[len(ROOT) :]), "rb") as file:
            made: CodeType = marshal.load(file)
            return made
    found: CodeType | None = _usual(loader, name)
    return found


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
            note("lists ")
        if isinstance(environment, dict) and TRACE in os.environ:
            environment.setdefault(TRACE, os.environ[TRACE])


def _asked_for(kind: str, path: object) -> None:
    if not isinstance(path, str | bytes | os.PathLike):
        return
    try:
        name = os.path.abspath(os.fsdecode(path))
    except OSError:  # the current folder is gone
        return
    line = f"{kind} {name[len(ROOT) :] or '.'}"
    if not f"{name}/".startswith(ROOT) or name.startswith(ROOT + ".venv/") or line in _seen:
        return
    frame: FrameType | None = sys._getframe(2)
    while frame:
        file = frame.f_code.co_filename
        if file == __file__ or _FOR_NOTHING.match(f"{file} {frame.f_code.co_name}"):
            return
        if file.startswith(ROOT) and "/.venv/" not in file:
            break
        frame = frame.f_back
    note(line)


if __name__ == "inferlab_tracing":
    start()
