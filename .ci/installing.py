"""What `.ci/install.py` does, once the Python is new enough."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
SHOWN = 20  # last lines of the log, where pip failed
LOWEST_TORCH = (2, 8)

VERSIONS = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("torch", "triton"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def main(extra: str) -> None:
    make_venv()
    stamp, wanted = VENV / f".installed-{extra}", fingerprint()
    if stamp.exists() and stamp.read_text("utf-8") == wanted:
        return
    stamp.unlink(missing_ok=True)
    LOG.write_text("", "utf-8")
    if not usable(versions(PYTHON)):
        install_torch()
    say("Installing the course and what it needs, a few minutes ...")
    pip("install", "-c", str(constraints_around(versions(PYTHON))), "-e", f"{ROOT}[{extra}]")
    say("Compiling to bytecode, so that the first start is fast ...")
    compile_all()
    stamp.write_text(wanted, "utf-8")
    say(f"Installed. What pip said: {LOG}")


def make_venv() -> None:
    working = PYTHON.exists() and not quiet(PYTHON, "-m", "pip", "--version")
    if working:
        return
    say(f"Making {VENV} ...")
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if usable(versions(Path(sys.executable))):
        say("torch is already installed beside this Python; .venv will use it")
        command.insert(3, "--system-site-packages")
    if subprocess.run(command).returncode:
        sys.exit("inferlab: error: .venv could not be made. On Debian and Ubuntu: apt-get install python3-venv")


def install_torch() -> None:
    index = os.environ.get("TORCH_INDEX")
    if sys.platform == "linux" and not index and not has_nvidia_gpu():
        say(
            "No NVIDIA GPU was found here. The default torch for Linux brings CUDA with it: several GB to download.\n"
            "A CPU build is about 200 MB. To choose it, stop (Ctrl-C) and say where it is: make learn TORCH_INDEX=URL\n"
            "(the install page of pytorch.org shows the URL: Linux, pip, CPU). Going on with the default."
        )
    say(f"Installing torch {pin('torch')}, the longest download ...")
    pip("install", *(["--index-url", index] if index else []), f"torch=={pin('torch')}")


def constraints_around(installed: dict[str, str]) -> Path:
    """constraints.txt; where another torch is kept, with its version and its triton's in place of the pinned ones."""
    constraints = ROOT / "constraints.txt"
    if installed["torch"].split("+")[0] == pin("torch"):
        return constraints
    lines = [
        line for line in constraints.read_text("utf-8").splitlines() if line.split("==")[0] not in ("torch", "triton")
    ]
    lines += [f"{name}=={version}" for name, version in installed.items()]
    path = VENV / "constraints.txt"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def pin(name: str) -> str:
    found = re.search(rf"^{name}==([^\s;]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    if not found:
        sys.exit(f"inferlab: error: constraints.txt does not pin {name}")
    return found.group(1)


def versions(python: Path) -> dict[str, str]:
    """Versions of torch and triton that this Python sees."""
    result = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True)
    return json.loads(result.stdout) if result.returncode == 0 else {}


def usable(installed: dict[str, str]) -> bool:
    """Whether there is a torch in the supported range."""
    numbers = re.findall(r"\d+", installed.get("torch", "0.0"))
    return tuple(map(int, numbers[:2])) >= LOWEST_TORCH


def has_nvidia_gpu() -> bool:
    return bool(shutil.which("nvidia-smi")) or Path("/proc/driver/nvidia/version").exists()


def fingerprint() -> str:
    """Changes when an install would change: dependencies, packaging, pins, Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    asked = [project["build-system"], project["project"], project["tool"]["hatch"], sys.version]
    text = json.dumps(asked, sort_keys=True) + (ROOT / "constraints.txt").read_text("utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def compile_all() -> None:
    """To bytecode, by all cores at once: pip would take one, and half of the time of an installation. What does not
    compile (templates, Python 2) is left as it is, as pip leaves it."""
    quiet(PYTHON, "-m", "compileall", "-q", "-j", "0", VENV / "lib")


def pip(*arguments: str) -> None:
    environment = {"PIP_ROOT_USER_ACTION": "ignore", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ}
    command = [PYTHON, "-m", "pip", *arguments, "--no-compile", "--progress-bar", "off"]
    with LOG.open("a", encoding="utf-8") as log:
        failed = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if failed:
        tail = "\n".join(LOG.read_text("utf-8", "replace").splitlines()[-SHOWN:])
        sys.exit(
            f"{tail}\ninferlab: error: this failed: pip {' '.join(arguments)}\n"
            f"The lines above, the last of {LOG}, say why; then run it again."
        )


def say(line: str) -> None:
    print(line, flush=True)


def quiet(*command: object) -> int:
    return subprocess.run([str(part) for part in command], capture_output=True).returncode
