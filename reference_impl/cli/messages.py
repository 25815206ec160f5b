"""What a command says when it cannot do what was asked: one line with one beginning, whatever found the fault.

Exit status 2 for what was typed wrongly, 1 for what went wrong, 130 for Ctrl-C.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

PREFIX = "inferlab: error:"
# A parameter of Python's, whose option has the same name.
_FIELD = re.compile(r"^(?:(?:EngineConfig|SamplingParams)\.(?=\w+: )|(?=\w+: expected ))(\w+): ")
_SYSTEM = {
    errno.EADDRINUSE: "another program uses it",
    errno.EADDRNOTAVAIL: "this machine does not have that address",
    errno.EROFS: "that file system is read-only",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.ENOSPC: "the disk is full",
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a part of the path is a file and no folder",
    errno.EISDIR: "it is a folder, and a file is needed",
    errno.EEXIST: "it exists already",
}
# What the parser of options says -> what is expected.
_EXPECTED = (
    (r"Input should be greater than or equal to (\S+)", r"expected \1 or more"),
    (r"Input should be less than or equal to (\S+)", r"expected \1 or less"),
    (r"Input should be greater than (\S+)", r"expected more than \1"),
    (r"Input should be less than (\S+)", r"expected less than \1"),
    (r"Input should be a valid integer.*", "expected a whole number"),
    (r"Input should be a valid number.*", "expected a number"),
    (r"Input should be a valid boolean.*", "expected true or false"),
    (r"Input should be a finite number.*", "expected a finite number"),
)


def say(message: object) -> None:
    """Prints one line on stderr, red on a terminal."""
    typer.secho(f"{PREFIX} {message}", fg="red", err=True)


def why(error: OSError) -> str:
    """The reason why the system refused, in words and without a number."""
    return _SYSTEM.get(error.errno or 0) or error.strerror or str(error)


def described(error: Exception) -> str:
    """An exception's text; for the system's, also which file it was about."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename}: {why(error)}" if error.filename else why(error)
    return _FIELD.sub(lambda found: f"--{found.group(1).replace('_', '-')}: ", str(error))


def is_usage(error: Exception) -> bool:
    """Whether an option had a value that it cannot have."""
    return isinstance(error, ValueError) and _FIELD.match(str(error)) is not None


def versions() -> str:
    """The versions of the course and of what it runs on, for --version. Raises nothing."""
    found = []
    for name in ("inferlab", "torch"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name}: not installed")
    return f"{', '.join(found)}, Python {sys.version.split()[0]}"


def run(app: typer.Typer, arguments: list[str] | None = None) -> int:
    """Runs a command, says in one line what was wrong, and returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        done = app(arguments, standalone_mode=False, prog_name="inferlab")
        sys.stdout.flush()
        return done if isinstance(done, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("", err=True)
        return 130
    except BrokenPipeError:  # `inferlab ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno is None:
            raise
        say(described(error))
        return 1
    except Exception as error:
        # typer brings a copy of click of its own, whose classes have no public name.
        if not hasattr(error, "exit_code") or not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            say(usage(error, arguments))
        return int(error.exit_code)


def usage(error: Any, arguments: list[str]) -> str:
    """A line that says what was typed wrongly: where, what was expected, what came, and how to see what there is."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    path = context.command_path if context is not None else "inferlab"
    text = str(getattr(error, "message", "") or "").strip()
    hint = getattr(error, "param_hint", None)
    kind = type(error).__name__
    if kind == "MissingParameter":
        text = f"{_name(parameter, hint)} is missing"
    elif kind == "NoSuchOption" or text.startswith("No such option"):
        text = _no_option(getattr(error, "option_name", "") or text.split(": ", 1)[-1], context)
    elif match := re.match(r"No such command '([^']*)'", text):
        text = _unknown("command", match.group(1), list(getattr(context.command, "commands", {})) if context else [])
    elif parameter is not None or hint:
        for pattern, words in _EXPECTED:
            text = re.sub(pattern, words, text)
        given = _given(parameter, arguments)
        text = f"{_name(parameter, hint)}: {text.rstrip('.')}" + (f", got {given!r}" if given is not None else "")
    elif match := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", text):
        text = f"there is no place for {match.group(1)}: a text with spaces stands in quotes"
    return f"{text if text.endswith('?') else text.rstrip('.') + '.'} See: {path} --help"


def _name(parameter: Any, hint: Any) -> str:
    if hint:
        return hint if isinstance(hint, str) else " or ".join(hint)
    options = [option for option in getattr(parameter, "opts", ()) if option.startswith("-")]
    return max(options, key=len) if options else str(getattr(parameter, "name", "an argument")).upper()


def _given(parameter: Any, arguments: list[str]) -> str | None:
    """What was typed as the value of an option."""
    for option in getattr(parameter, "opts", ()):
        for place, word in enumerate(arguments):
            if word == option and option.startswith("-") and place + 1 < len(arguments):
                return arguments[place + 1]
            if option.startswith("--") and word.startswith(f"{option}="):
                return word.partition("=")[2]
    return None


def _no_option(name: str, context: Any) -> str:
    """A line about an unknown option: the options like it, or how to write it without one, since other programs have
    --model where this one has MODEL."""
    words = [word for p in getattr(getattr(context, "command", None), "params", ()) for word in p.opts]
    argument = name.removeprefix("--")
    if argument in words:
        usage = f"{context.command_path} {argument.upper()}"
        return f"there is no option {name}; the {argument} is written without it: {usage}"
    return _unknown("option", name, [word for word in words if word.startswith("-")])


def _unknown(what: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 3, 0.5)
    if close:
        return f"there is no {what} {name}. Did you mean {' or '.join(close)}?"
    commands = f"; there are: {', '.join(sorted(known))}" if what == "command" and known else ""
    return f"there is no {what} {name}{commands}"


def install(extra: str) -> str:
    """The command that adds an extra of this project to the Python that runs now, to be pasted into a shell."""
    import shlex

    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"{shlex.quote(sys.executable)} -m pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(f'inferlab[{extra}]')}"
