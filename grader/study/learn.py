"""Starts JupyterLab in the learner's workspace."""

from __future__ import annotations

import errno
import importlib.util
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import NoReturn

from grader.links import START
from grader.saying import install
from grader.study.workspace import WorkspaceError, course_files

# What the course sets beside a user's own settings, whose files it leaves alone: no question about news, no look-up of
# new versions, no instructor's panels, errors only in the terminal, Ctrl-C stops at once, and a kernel that has been
# idle for an hour ends, since each holds half a gigabyte. START.ipynb says so.
SETTINGS = Path(__file__).parent / "jupyter"


def serve(folder: Path, port: int, ip: str) -> NoReturn:
    """Replaces this process by JupyterLab on the first free port from `port` on.

    Raises WorkspaceError if JupyterLab is not installed or no port is free.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise WorkspaceError(f"JupyterLab is not installed here. Install it: {install('learn')}")
    port = free_port(port, ip)
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(16)
    page = first_page(folder)
    trust(folder)
    host = "127.0.0.1" if ip in ("0.0.0.0", "::", "*") else ip
    print(f"JupyterLab: http://{host}:{port}{page}?token={token}")
    if not has_display():
        tunnel = f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"
        print(f"No display here. From another machine: {tunnel}, then open the address.")
    print("Stop with Ctrl-C.", flush=True)
    command = jupyter_command(folder, port, ip, page)
    os.execve(command[0], command, jupyter_environment(token))


def trust(folder: Path) -> None:
    """Signs the course's notebooks where they are as they came, as JupyterLab signs what its user saves: their code is
    this package's, which a kernel imports anyway. What somebody else wrote is not signed."""
    import nbformat
    from nbformat.sign import NotebookNotary

    notary = NotebookNotary()
    for relative, source in course_files():
        there = folder / relative
        if there.suffix == ".ipynb" and there.is_file() and there.read_bytes() == source.read_bytes():
            notebook = nbformat.reads(source.read_text("utf-8"), as_version=4)
            if not notary.check_signature(notebook):
                notary.sign(notebook)


def jupyter_command(folder: Path, port: int, ip: str, page: str) -> list[str]:
    # -P: the current folder does not shadow packages
    command = [sys.executable, "-P", "-m", "grader.study.jupyter_start"]
    command += [f"--ServerApp.root_dir={folder}", f"--ServerApp.ip={ip}", f"--ServerApp.port={port}"]
    command += ["--ServerApp.port_retries=0", f"--LabApp.default_url={page}"]
    if not has_display():
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    return command


def jupyter_environment(token: str) -> dict[str, str]:
    environment = dict(os.environ, JUPYTER_TOKEN=token)  # not on the command line, where other users see it
    environment["JUPYTER_PREFER_ENV_PATH"] = "1"  # the kernel of this environment, not of ~/.local
    for name in ("JUPYTER_CONFIG_PATH", "JUPYTER_PATH"):  # these come before all other folders
        environment[name] = os.pathsep.join(filter(None, [str(SETTINGS), os.environ.get(name)]))
    local = [name for name in os.environ.get("NO_PROXY", "").split(",") if name]
    environment["NO_PROXY"] = environment["no_proxy"] = ",".join(dict.fromkeys([*local, "127.0.0.1", "localhost"]))
    return environment


def has_display() -> bool:
    """Whether a browser opened from here would be seen."""
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def free_port(first: int, ip: str) -> int:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    address = "" if ip == "*" else ip
    for port in range(first, min(first + 100, 65536)):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
                return port
            except PermissionError:
                continue
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise WorkspaceError(f"cannot listen on {ip}: {error.strerror}. Try --ip 127.0.0.1") from None
    raise WorkspaceError(f"no free port from {first} on. Name another one to start from: inferlab learn --port 9000")


def first_page(folder: Path) -> str:
    """Address path of START, or of JupyterLab itself where it is not there."""
    return f"/lab/tree/{START}" if (folder / START).is_file() else "/lab"
