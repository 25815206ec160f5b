from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import click
import pytest
import typer.main

from grader.cli import app
from grader.study import learn
from grader.study.workspace import WorkspaceError

Found = TypeVar("Found")
HEAVY = ("torch", "transformers", "triton", "jupyterlab", "nbgrader", "matplotlib", "IPython", "numpy")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy between us and this machine
INFERLAB = [sys.executable, "-P", "-c", "from grader.cli import main; main()"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*INFERLAB, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from commands(child, (*path, name))
    else:
        yield " ".join(path), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_help_answers_without_importing_anything_heavy() -> None:
    code = (
        "import sys; sys.argv = ['inferlab', '--help']\n"
        "from grader.cli import main\n"
        "try: main()\n"
        f"except SystemExit: print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=600)
    assert "HEAVY []" in result.stdout, result.stdout + result.stderr
    assert "learn" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_says_what_it_does_and_gives_an_example(name: str) -> None:
    command = COMMANDS[name]
    text = f"{command.help} {command.epilog}"
    assert command.help, name
    assert f"inferlab {name}" in text, f"no example `inferlab {name} …` in: {text}"


def test_an_unknown_subcommand_fails() -> None:
    assert run("no-such-command").returncode == 2


def test_prepare_only_copies_and_stops(tmp_path: Path) -> None:
    result = run("learn", "--prepare-only", INFERLAB_HOME=str(tmp_path / "work"))
    assert result.returncode == 0, result.stderr
    assert f"Workspace: {tmp_path / 'work'}" in result.stdout
    assert (tmp_path / "work" / "chapters").is_dir()


def test_a_workspace_that_cannot_be_used_fails_with_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("learn", "--prepare-only", INFERLAB_HOME=str(tmp_path / "file"))
    assert result.returncode == 1
    assert "is a file" in result.stderr
    assert "Traceback" not in result.stderr


def test_jupyterlab_runs_as_root_only_for_root_and_opens_a_browser_only_on_a_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flags() -> set[str]:
        return set(learn.jupyter_command(tmp_path, 8888, "127.0.0.1", "/lab")) & {"--allow-root", "--no-browser"}

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert flags() == set()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert flags() == {"--allow-root"}
    monkeypatch.delenv("DISPLAY")
    assert flags() == {"--allow-root", "--no-browser"}


def test_the_next_free_port_is_taken() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < learn.free_port(port, "127.0.0.1") < port + 100


def test_an_address_that_is_not_ours_is_refused_with_a_way_out() -> None:
    with pytest.raises(WorkspaceError, match="cannot listen on 192.0.2.1"):
        learn.free_port(8888, "192.0.2.1")


def test_the_token_is_kept_off_the_command_line_and_the_proxy_off_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    environment = learn.jupyter_environment("secret")
    assert environment["JUPYTER_TOKEN"] == "secret"
    assert environment["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert not any("secret" in part for part in learn.jupyter_command(tmp_path, 1, "127.0.0.1", "/lab"))


def test_learn_without_a_display_prints_an_address_that_answers_and_keeps_serving(
    tmp_path: Path, reserved_port: int
) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "JUPYTER_TOKEN")}
    environment |= {"INFERLAB_HOME": str(tmp_path / "work"), "PYTHONUNBUFFERED": "1"}
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        environment[name] = str(tmp_path / name)
    log = tmp_path / "log"
    with log.open("w") as file:
        command = [*INFERLAB, "learn", "--port", str(reserved_port)]
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        pattern = r"http://127\.0\.0\.1:\d+/lab\S*\?token=\w+"
        address = wait_for(lambda: re.search(pattern, log.read_text()), server, log)
        page = wait_for(lambda: fetch(address.group(0)), server, log)
        assert "jupyter-config-data" in page
        assert server.poll() is None
        with pytest.raises(urllib.error.HTTPError, match="403"):
            DIRECT.open(address.group(0).split("/lab")[0] + "/api/contents", timeout=600)
    finally:
        server.terminate()
        assert server.wait(600) is not None


def fetch(address: str) -> str | None:
    try:
        return DIRECT.open(address, timeout=600).read().decode()
    except urllib.error.URLError:
        return None


def wait_for(condition: Callable[[], Found | None], server: subprocess.Popen[bytes], log: Path) -> Found:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if found := condition():
            return found
        assert server.poll() is None, log.read_text()
        time.sleep(0.2)
    raise AssertionError(f"nothing after 600 s: {log.read_text()}")
