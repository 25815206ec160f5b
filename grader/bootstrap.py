"""The first code cell of every notebook of the course, generated: it makes `inferlab` available where it is not.

pip runs inside a kernel that has torch and numpy loaded. Their versions are given to it as constraints, so that it adds
packages and replaces none of these: no restart, no second torch. What pip says is shown only where it failed, because
front ends differ in what they show of a child process.
"""

from __future__ import annotations

import json

FIRST_LINE = "# Makes `inferlab` available; does nothing where it is installed."

_CELL = """\
import importlib.util

if importlib.util.find_spec("reference_impl") is None:
    import contextlib
    import importlib.metadata
    import os
    import subprocess
    import sys
    import tempfile

    def install(url):
        if not url:
            raise RuntimeError(
                "this copy of the course does not say where to install from. Put its wheel (in the repository: "
                "pip wheel --no-deps .) where this kernel can read it, for example on your Drive, then run: "
                "import os; os.environ['INFERLAB_INSTALL_URL'] = '/path/of/the/wheel.whl', and this cell again."
            )
        if sys.version_info < (3, 11):
            raise RuntimeError(
                f"the course needs Python 3.11 or later, and this kernel runs {sys.version.split()[0]}. Choose another "
                "kernel; on Colab: Runtime, Change runtime type, the latest version."
            )
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as keep:  # versions that pip may not change
            for name in ("torch", "numpy", "triton", "ipykernel"):
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    print(f"{name}=={importlib.metadata.version(name)}", file=keep, flush=True)
            print("Installing inferlab: about half a minute ...", flush=True)
            command = [sys.executable, "-m", "pip", "install", "--constraint", keep.name, url]
            done = subprocess.run(command, capture_output=True, text=True)
        importlib.invalidate_caches()  # the kernel looks again at folders that it has listed before
        if done.returncode == 0 and importlib.util.find_spec("reference_impl") is not None:
            print("Installed.")
            return
        said = (done.stdout + done.stderr).splitlines()[-20:]  # pip says last why it stopped; --quiet would hide it
        print(f"pip install {url}: exit status {done.returncode}", *said, sep="\\n")
        raise RuntimeError(
            "inferlab could not be installed; what pip said is above. If it found or reached nothing: is there a "
            "network? Connect, then run this cell again. If it names a conflict with torch, numpy, triton or "
            "ipykernel: this machine has an older one than the course needs; choose a newer runtime. If it reports "
            "success: restart the kernel, then run this cell again."
        )

    install(os.environ.get("INFERLAB_INSTALL_URL") or %s)"""


def bootstrap_source(install_url: str | None = None) -> str:
    """Source of the cell. install_url: what pip installs; None takes it from chapters/course.yaml, "" is nowhere.

    INFERLAB_INSTALL_URL in the kernel's environment comes first. The cell does nothing where the course is installed,
    and raises RuntimeError, with what to do, where it cannot be.
    """
    if install_url is None:
        from grader.study.manifest import load_course

        install_url = load_course().install_url
    return f"{FIRST_LINE}\n{_CELL % json.dumps(install_url)}"
