"""The first code cell of every notebook of the course, generated: it makes `inferlab` available where it is not."""

from __future__ import annotations

import json


def bootstrap_source(install_url: str | None = None) -> str:
    """Source of the cell. install_url: what pip installs; None takes it from chapters/course.yaml.

    The cell does nothing where the course is installed. pip keeps the torch, numpy and triton that are there, because
    the course's own requirements are lower bounds.
    """
    if install_url is None:
        from grader.manifest import load_course

        install_url = load_course().install_url
    return f"""\
# Makes `inferlab` available; does nothing where it is installed.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("reference_impl") is None:
    subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", {json.dumps(install_url)}])"""
