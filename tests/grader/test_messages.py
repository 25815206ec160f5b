"""What the command says to somebody who typed something wrong: one line, one beginning, what was expected and came."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from grader.cli import app, messages

ROOT = Path(__file__).parents[2]


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    assert messages.run(app, list(arguments)) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("inferlab: error: ")
    return err.removeprefix("inferlab: error: ").rstrip("\n")


# What was typed -> what is said, as somebody wrote it who had tried each.
USAGE = {
    "generat": "there is no command generat. Did you mean generate or grade? See: inferlab --help",
    "lab chek": "there is no command chek. Did you mean check? See: inferlab lab --help",
    "--verson": "there is no option --verson. Did you mean --version? See: inferlab --help",
    "serve --model target": "there is no option --model; the model is written without it: inferlab serve MODEL. See: "
    "inferlab serve --help",
    "lab check --lab 02": "there is no option --lab; the lab is written without it: inferlab lab check LAB. See: "
    "inferlab lab check --help",
    "serve --prot 8000": "there is no option --prot. Did you mean --port or --router or --role? See: inferlab serve "
    "--help",
    "profile --phase x": "--phase: expected decode or prefill, got 'x'",
    "generate hi --dtype int3": "--dtype: expected one of float32, bfloat16, float16, float64, got 'int3'",
    "lab check": "LAB is missing. See: inferlab lab check --help",
    "lab hint 02": "CHECK is missing. See: inferlab lab hint --help",
    "grade new-course": "FOLDER is missing. See: inferlab grade new-course --help",
    "generate hello world": "there is no place for world: a text with spaces stands in quotes. See: inferlab generate "
    "--help",
    "generate hi --max-tokens 0": "--max-tokens: expected 1 or more, got '0'. See: inferlab generate --help",
    "generate hi --max-tokens=x": "--max-tokens: expected a whole number, got 'x'. See: inferlab generate --help",
    "generate hi --temperature -1": "--temperature: expected 0 or more, got '-1'. See: inferlab generate --help",
    "generate hi --temperature warm": "--temperature: expected a number, got 'warm'. See: inferlab generate --help",
    "generate hi --trace nope/x.json": "--trace: there is no folder nope, got 'nope/x.json'. See: inferlab generate "
    "--help",
    "serve --port 99999": "--port: expected 65535 or less, got '99999'. See: inferlab serve --help",
    "serve --port 80x": "--port: expected a whole number, got '80x'. See: inferlab serve --help",
    "serve --max-num-seqs 0": "--max-num-seqs: expected 1 or more, got '0'. See: inferlab serve --help",
    "learn --port 0": "--port: expected 1 or more, got '0'. See: inferlab learn --help",
    "quiz --minutes 5": "--minutes: it is the time of an interview: inferlab quiz --interview --minutes 5. See: "
    "inferlab quiz ask --help",
    "quiz --interview --minutes x": "--minutes: expected a whole number, got 'x'. See: inferlab quiz ask --help",
    "bench serve --base-url foo": "--base-url: expected http://HOST:PORT, got 'foo'. See: inferlab bench serve --help",
}


@pytest.mark.parametrize("typed", USAGE)
def test_what_is_typed_wrongly_is_told_with_its_option_and_its_value(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, *typed.split()) == USAGE[typed]


def test_of_an_unknown_command_all_that_there_are_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there are: check, diff, hint, reset, start" in said(capsys, "lab", "qqqq")


def test_the_version_is_told_with_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert messages.run(app, ["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("inferlab ")
    assert f"Python {sys.version.split()[0]}" in out


def test_a_model_that_is_not_there_is_told_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, "generate", "hi", "--model", "nope", status=1)
    assert line.startswith("nope/config.json: no such file")
    assert "target and draft" in line


def test_an_export_makes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "my pages" / "quiz.html"
    line = said(capsys, "quiz", "export", "02", "--html", str(page), status=1)
    assert f"mkdir -p {shlex.quote(str(page.parent))}" in line
    assert not page.parent.exists()
    (tmp_path / "file").touch()
    line = said(capsys, "quiz", "export", "02", "--html", str(tmp_path / "file" / "x.html"), status=1)
    assert "is a file and no folder" in line


def test_a_port_that_is_taken_is_told_without_a_number_of_the_system() -> None:
    from reference_impl.serving.server import _bind

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port}: another program listens there") as found:
            _bind("127.0.0.1", port)
    assert "Errno" not in str(found.value)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.ENOENT, errno.EISDIR, errno.EIO])
def test_errors_of_the_system_are_told_in_words_with_their_file(number: int) -> None:
    text = messages.described(OSError(number, os.strerror(number), "/there/x"))
    assert text.startswith("/there/x: ")
    assert "Errno" not in text
    assert str(number) not in text


def test_what_installs_an_extra_fits_this_python() -> None:
    command = shlex.split(messages.install("grade"))
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[-1].endswith("[grade]")


def test_a_reader_that_closes_early_ends_the_command_quietly() -> None:
    program = "import sys; from grader.cli import main; sys.argv[1:] = ['lab', '--help']; main()"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert "Traceback" not in done.stderr


def test_ctrl_c_before_the_command_runs_ends_it_quietly() -> None:
    program = (
        "import builtins, grader.entry\n"
        "usual = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'grader.cli': raise KeyboardInterrupt\n"
        "    return usual(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "grader.entry.command()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_jupyterlab_is_imported_ends_it_quietly() -> None:
    program = (
        "import importlib\n"
        "from grader.study import jupyter_start\n"
        "def interrupted(name): raise KeyboardInterrupt\n"
        "importlib.import_module = interrupted\n"
        "jupyter_start.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_installed_command_is_the_one_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"]["inferlab"] == "grader.entry:command"


@pytest.mark.parametrize("path", [".ci/install.py", "grader/__init__.py"])
def test_an_old_python_is_told_that_it_is_old(path: str) -> None:
    """The grammar of Python 2.7 has none of these; every Python since reads what has none of them."""
    import ast

    tree = ast.parse((ROOT / path).read_text("utf-8"))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.JoinedStr | ast.AnnAssign | ast.NamedExpr | ast.Match | ast.AsyncFunctionDef)
        if isinstance(node, ast.FunctionDef):
            assert node.returns is None
            assert not any(argument.annotation for argument in node.args.args)
            assert not node.args.kwonlyargs
        if isinstance(node, ast.ImportFrom):
            assert node.module != "__future__"
    text = (ROOT / path).read_text("utf-8")
    assert text.isascii()
    early = text.replace("sys.version_info < (3, 11)", "sys.version_info < (99,)")
    done = subprocess.run([sys.executable, "-c", early], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith("inferlab: error: Python 3.11 or later is needed, and this is 3.")
    assert done.stderr.count("\n") == 1
