"""What the course sets of JupyterLab, as JupyterLab itself reads it, and what stays the user's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from grader.study import learn
from grader.study.workspace import prepare


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user with settings of their own, and folders of JupyterLab that are not this machine's."""
    mine = tmp_path / "user"
    mine.mkdir()
    user = {"MappingKernelManager": {"cull_interval": 7}, "ServerApp": {"max_body_size": 1234567}}
    (mine / "jupyter_server_config.json").write_text(json.dumps(user))
    environment = learn.jupyter_environment("token") | {"JUPYTER_CONFIG_DIR": str(mine)}
    return environment | {"JUPYTER_DATA_DIR": str(tmp_path / "data"), "JUPYTER_RUNTIME_DIR": str(tmp_path / "run")}


def shown(tmp_path: Path, environment: dict[str, str]) -> dict[str, Any]:
    command = [*learn.jupyter_command(tmp_path, 8888, "127.0.0.1", "/lab"), "--show-config-json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_jupyterlab_takes_the_courses_settings_and_keeps_the_users_others(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    config = shown(tmp_path, environment)
    kernels = config["MappingKernelManager"]
    assert kernels["cull_idle_timeout"] == 3600
    assert kernels["cull_connected"] is True, "a notebook that is open holds its memory, too"
    assert kernels["cull_busy"] is False
    assert config["LabApp"]["news_url"] is None
    assert config["ServerApp"]["max_body_size"] == 1234567
    extensions = config["ServerApp"]["jpserver_extensions"]
    assert not any(on for name, on in extensions.items() if name.startswith("nbgrader"))


def test_start_says_after_how_long_a_kernel_ends() -> None:
    config = json.loads((learn.SETTINGS / "jupyter_server_config.json").read_text("utf-8"))
    assert config["MappingKernelManager"]["cull_idle_timeout"] == 60 * 60
    text = (Path(__file__).parents[2] / "START.ipynb").read_text("utf-8")
    assert re.search(r"not run anything\s+for an hour", text.replace('\\n",\n    "', " ")), "START: for an hour"


def test_no_news_are_asked_for_and_an_instructors_panels_are_off(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JUPYTER_CONFIG_PATH", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, environment[name])
    from jupyterlab.commands import get_app_dir
    from jupyterlab_server.config import get_page_config
    from jupyterlab_server.settings_utils import _get_overrides

    overrides, error = _get_overrides(os.path.join(get_app_dir(), "settings"))
    assert not error
    assert overrides["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    assert get_page_config([], get_app_dir())["disabledExtensions"] == ["@jupyter/nbgrader"]


def test_the_kernel_is_this_environments_and_says_only_errors(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jupyter_client.kernelspec import KernelSpecManager

    monkeypatch.setenv("JUPYTER_PATH", environment["JUPYTER_PATH"])
    spec = KernelSpecManager().get_kernel_spec("python3")
    assert spec.argv[0] == "python", "which jupyter_client replaces by the Python that runs it"
    assert "--log-level=ERROR" in spec.argv


def test_the_courses_notebooks_are_trusted_and_what_somebody_changed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbformat.sign import NotebookNotary

    monkeypatch.setenv("INFERLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    home = prepare().home
    changed = home / "labs/02_kv_cache/kv_cache.ipynb"
    changed.write_text(changed.read_text("utf-8").replace("import math", "import math  # and more"), "utf-8")
    learn.trust(home)
    notary = NotebookNotary()
    notebooks = sorted(home.rglob("*.ipynb"))
    trusted = [path for path in notebooks if notary.check_signature(nbformat.read(path, as_version=4))]
    assert trusted == [path for path in notebooks if path != changed]
    assert len(trusted) > 10
