"""Enter in the fields of a notebook, pressed in a real browser: what the messages are that a front end sends."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import websocket

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PATIENCE = 120  # seconds that a part of this may take before it counts as hanging

CELL = """from chapters.widgets.entry import one_line
from ipywidgets import HTML, VBox
said = HTML("nothing")
entered = []
def enter():
    entered.append(field.value)
    said.value = "entered: " + "|".join(entered)
field = one_line("A number", enter)
VBox([field, said])"""


class Page:
    """A page of a browser, over its debugging port."""

    def __init__(self, address: str):
        self._socket = websocket.create_connection(address, timeout=PATIENCE, suppress_origin=True)
        self._ids = itertools.count(1)

    def call(self, method: str, **params: Any) -> Any:
        id = next(self._ids)
        self._socket.send(json.dumps({"id": id, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv())).get("id") != id:
            pass
        return answer["result"]

    def value(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        code = {"Enter": 13, "Backspace": 8}.get(key, ord(key[0].upper()))
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        for letter in text:
            self.press(letter, letter)

    def close(self) -> None:
        self._socket.close()


def wait(for_what: str, ready: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := ready():
            return found
        time.sleep(0.2)
    raise AssertionError(f"{for_what}: not within {PATIENCE} seconds")


def ended(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """JupyterLab with a notebook of one cell, which has been run, in a browser."""
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": CELL, "outputs": [], "execution_count": None}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "one.ipynb").write_text(json.dumps(notebook))
    for name in ("RUNTIME", "CONFIG", "DATA"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    token = secrets.token_hex(8)
    options = [
        f"--IdentityProvider.token={token}",
        "--no-browser",
        "--port=0",
        "--allow-root",
        f"--notebook-dir={tmp_path}",
    ]
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--remote-debugging-port=0",
    ]
    processes: list[subprocess.Popen[Any]] = []
    with (tmp_path / "log").open("w") as log:
        try:
            lab = [sys.executable, "-m", "jupyterlab", *options]
            processes.append(subprocess.Popen(lab, cwd=tmp_path, stdout=log, stderr=log, env=dict(os.environ)))
            [server] = wait("JupyterLab", lambda: list((tmp_path / "runtime").glob("jpserver-*.json")))
            url = wait("its address", lambda: server.read_text() and json.loads(server.read_text())["url"])
            profile = tmp_path / "profile"
            address = f"{url}doc/tree/one.ipynb?token={token}"
            command = [
                browser,
                *flags,
                f"--user-data-dir={profile}",
                "--window-size=1000,800",
                address,
            ]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            port_file = profile / "DevToolsActivePort"
            wait("the browser", lambda: port_file.exists() and "\n" in port_file.read_text())
            port = port_file.read_text().splitlines()[0]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

            def pages() -> list[str]:
                listed = json.load(opener.open(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE))
                return [one["webSocketDebuggerUrl"] for one in listed if one["type"] == "page"]

            page = Page(wait("a page", pages)[0])
            wait("the notebook", lambda: page.value("!!document.querySelector('.jp-CodeCell .cm-content')"))
            wait(
                "the kernel",
                lambda: page.value("!!document.querySelector('[data-status=idle], .jp-Notebook-ExecutionIndicator')"),
            )

            def run() -> Any:
                page.value("document.querySelector('.jp-CodeCell .cm-content').focus()")
                common = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 8}
                page.call("Input.dispatchKeyEvent", type="rawKeyDown", **common)
                page.call("Input.dispatchKeyEvent", type="keyUp", **common)
                time.sleep(3)
                return page.value("!!document.querySelector('.widget-text input')")

            wait("the field", run)
            yield page
            page.close()
        finally:
            for process in reversed(processes):
                ended(process)


def test_enter_is_heard_at_the_first_time_after_the_field_was_left_and_again(page: Page) -> None:
    field = "document.querySelector('.widget-text input')"
    said = "document.querySelector('.widget-html-content').textContent"

    def heard(*texts: str) -> None:
        wait(f"entered {texts}, page: {page.value(said)}", lambda: page.value(said) == "entered: " + "|".join(texts))

    page.value(f"{field}.focus()")
    page.type("12")
    page.press("Enter", "\r")
    heard("12")
    page.type("3")
    page.value(f"{field}.blur()")
    page.value(f"{field}.focus()")
    page.press("Enter", "\r")  # nothing has changed since the field was left
    heard("12", "123")
    page.press("Enter", "\r")
    heard("12", "123", "123")
    page.press("Backspace")
    page.press("Enter", "\r")
    heard("12", "123", "123", "12")
