"""The command `inferlab`. Subcommands live beside what they command; this file mounts them.

Nothing heavy (torch, Jupyter, nbgrader) is imported before a subcommand runs, so that --help answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from grader.commands import grade_cli, lab_cli, progress_cli
from grader.grader_bench import grader
from grader.quiz import cli as quiz_cli
from grader.study.manifest import ManifestError
from grader.study.workspace import Prepared, WorkspaceError, prepare
from grader.widget_bench import widgets
from reference_impl import cli as engine_cli
from reference_impl.cli import messages

app = typer.Typer(
    name="inferlab",
    help="Understand LLM inference: read chapters, build parts of an engine in labs, have them graded.",
    epilog="Start with: inferlab learn. Where you are, and what to do next: inferlab progress",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _say_versions(wanted: bool) -> None:
    if wanted:
        typer.echo(messages.versions())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_versions, help="Say the version, and stop.")
    ] = False,
) -> None:
    del version


@app.command(epilog="Example: inferlab learn --update")
def learn(
    update: Annotated[
        bool, typer.Option("--update", help="Bring new versions of chapters and labs; what you wrote or ran is kept.")
    ] = False,
    prepare_only: Annotated[bool, typer.Option("--prepare-only", help="Copy the files and stop.")] = False,
    port: Annotated[int, typer.Option(help="First port to try; the next free one is taken.", min=1, max=65535)] = 8888,
    ip: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 inside a container.")] = "127.0.0.1",
) -> None:
    """Open the course: copy chapters and labs to your workspace and start JupyterLab there.

    The workspace is ~/inferlab, or the folder named by INFERLAB_HOME.
    Without a display the address is printed and the server keeps running until Ctrl-C.
    """
    prepared = prepare(update)
    _say_what_was_prepared(prepared)
    if not prepare_only:
        from grader.study.learn import serve

        serve(prepared.home, port, ip)


@app.command(epilog="Example: inferlab doctor")
def doctor() -> None:
    """Say what this machine has, then generate a line of text with the engine and time it."""
    from grader.doctor import run

    raise typer.Exit(run())


def _say_what_was_prepared(prepared: Prepared) -> None:
    def count(paths: list[str]) -> str:
        return f"{len(paths)} file" + ("" if len(paths) == 1 else "s")

    print(f"Workspace: {prepared.home}")
    for old, new in prepared.renamed.items():
        print(f"{old} is called {Path(new).name} now; what you wrote and ran in it is unchanged")
    if prepared.copied:
        print(f"Copied {count(prepared.copied)}.")
    if prepared.updated:
        print(f"Updated {count(prepared.updated)} you had not changed.")
    for path, aside in prepared.kept.items():
        print(f"Updated {path}, which you had only run; that copy, with its outputs, is {aside}")
    for path, beside in prepared.beside.items():
        print(f"You changed {path}; it is kept, and its new version is {beside}")
    for path, reason in prepared.blocked.items():
        print(f"Left alone {path}: {reason}")
    if prepared.outdated:
        print(f"{count(prepared.outdated)} of yours have a newer version. To get them: inferlab learn --update")


for group, mounted in ((None, progress_cli), ("lab", lab_cli), ("grade", grade_cli), ("quiz", quiz_cli)):
    app.add_typer(mounted.app, name=group)
app.add_typer(engine_cli.app)
engine_cli.bench_app.command(epilog="Example: inferlab bench widgets --rounds 5")(widgets)
engine_cli.bench_app.command(epilog="Example: inferlab bench grader --submissions 500 --stock 20")(grader)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character, a "·" or "²", shows a question mark
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        sys.exit(messages.run(app))
    except (WorkspaceError, ManifestError) as error:
        messages.say(error)
        sys.exit(1)
