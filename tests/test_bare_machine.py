"""A machine that lacks what ours has, with a user who has set up everything otherwise: no test fails, no command does.

The tests are some of those that ask their surroundings most, in a copy of the tree, where possible in namespaces of
their own: without a network, and with nothing in place of the programs that they have to do without.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHOSEN = (
    "tests/test_packaging.py",
    "tests/test_bootstrap.py::test_without_a_network_the_learner_is_told_what_to_do",
    "tests/test_bootstrap.py::test_a_course_that_needs_a_newer_torch_is_refused_and_torch_stays",
    "tests/grader/test_cli.py",
    "tests/grader/test_doctor.py",
    "tests/grader/test_workspace.py",
    "tests/grader/test_examiner.py::test_the_reference_earns_all_points",
    "tests/grader/test_examiner.py::test_a_killed_warm_process_is_replaced_for_the_next_submission",
    "tests/serving/test_observability.py::test_the_page_shows_it_in_a_browser",
)
MASKED = ("bwrap", "chromium", "chromium-browser", "google-chrome")
# What is not kept by git, where there is no git to say so.
LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", ".work", ".ipynb_checkpoints", "build", "dist")

# Of a process in its own namespaces: covers programs by an empty file, and makes 127.0.0.1 answer (SIOCSIFFLAGS: up,
# running), which is all that there is of a network.
ENTER = """
import fcntl, os, socket, struct, subprocess, sys
end = sys.argv.index("--")
for path in sys.argv[2:end]:
    subprocess.run(["mount", "--bind", sys.argv[1], path], check=True)
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 0x41))
os.execv(sys.argv[end + 1], sys.argv[end + 1:])
"""
COMMANDS = """
import sys
from grader.cli import main
for command in sys.argv[1].splitlines():
    sys.argv[1:] = command.split()
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(f"{command}: {end.code}")
"""


def programs(names: tuple[str, ...]) -> list[Path]:
    """Where these programs are, in all folders in which programs are looked for."""
    folders = os.environ["PATH"].split(os.pathsep)
    found = {Path(folder, name).resolve() for folder in folders for name in names if Path(folder, name).exists()}
    return sorted(found)


def without(masked: list[Path], folder: Path) -> str:
    """A PATH on which all programs are found but these."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for path in Path(place).iterdir() if os.path.isdir(place) else ():
            if path.resolve() not in masked and not (folder / path.name).is_symlink():
                (folder / path.name).symlink_to(path)
    return str(folder)


def namespaces(nothing: Path, masked: list[Path]) -> list[str]:
    """The beginning of a command that runs in namespaces of its own; none where this is not allowed."""
    enter = [sys.executable, "-P", "-c", ENTER, str(nothing), *map(str, masked), "--"]
    for words in (["unshare", "--mount", "--net"], ["unshare", "--map-root-user", "--mount", "--net"]):
        if shutil.which("unshare"):
            tried = subprocess.run([*words, *enter, sys.executable, "--version"], capture_output=True, timeout=600)
            if tried.returncode == 0:
                return [*words, *enter]
    return []


def copied(folder: Path) -> Path:
    """The tree as a clone would have it, with what is not committed yet."""
    words = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, capture_output=True, text=True, timeout=600) if shutil.which("git") else None
    if listed is None or listed.returncode:
        return Path(shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT)))
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # and not deleted, which is not committed either
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def python_of(clone: Path, venv: Path) -> Path:
    """A Python with the packages of the one that runs this, and with the course as the clone has it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=600)
    site = next(venv.glob("lib/python*/site-packages"))
    packages = [path for path in map(Path, sys.path) if path.name in ("site-packages", "dist-packages")]
    (site / "0packages.pth").write_text("\n".join(map(str, packages)), "utf-8")  # read first
    for path in (found for folder in packages for found in folder.glob("_editable_impl_inferlab*")):
        (site / path.name).write_text(path.read_text("utf-8").replace(str(ROOT), str(clone)), "utf-8")
    (venv / "share").symlink_to(Path(sys.prefix) / "share")  # JupyterLab's pages
    return venv / "bin" / "python"


def hostile(folder: Path) -> dict[str, str]:
    """An environment in which a user, a company and an operating system have said much that is not so."""
    constraints, config = folder / "constraints.txt", folder / "pip.conf"
    constraints.write_text("torch==0.0.1\npackaging==0.0.1\n", "utf-8")
    config.write_text(f"[global]\nindex-url = https://nowhere.invalid/\nconstraint = {constraints}\n", "utf-8")
    (folder / "home").mkdir()
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    return {
        "PATH": os.environ["PATH"], "HOME": str(folder / "home"), "LC_ALL": "POSIX", "TZ": "Asia/Kathmandu",
        "PIP_CONFIG_FILE": str(config), "PIP_CONSTRAINT": str(constraints), "PYTHONOPTIMIZE": "", "NO_COLOR": "1",
        "PYTHONDONTWRITEBYTECODE": "1", "TERM": "dumb", "COLUMNS": "40", "GIT_DIR": str(folder / "home"),
        "SSL_CERT_FILE": str(folder / "home"), "JUPYTER_TOKEN": "mine", "OMP_NUM_THREADS": "1", **nowhere,
    }  # fmt: skip


def last_section(said: str) -> Iterator[str]:
    yield from said.rpartition("what did not run")[2].splitlines()


def test_on_a_bare_machine_the_tests_pass_and_say_what_they_could_not_try(tmp_path: Path) -> None:
    masked, environment = programs(MASKED), hostile(tmp_path)
    (tmp_path / "nothing").touch(mode=0o644)
    start = namespaces(tmp_path / "nothing", masked)
    if not start:
        environment["PATH"] = without(masked, tmp_path / "bin")
    clone = copied(tmp_path / "clone")
    words = [str(python_of(clone, tmp_path / "venv")), "-P", "-m", "pytest", "-p", "no:cacheprovider", *CHOSEN]
    done = subprocess.run(
        [*start, *words], cwd=clone, env=environment, umask=0o077, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed", done.stdout.splitlines()[-1])
    skipped = [line.partition(".")[0] for line in last_section(done.stdout) if "To have them run: apt-get" in line]
    assert [line.partition(" ")[0] for line in skipped] == ["browser:", "bwrap:"], done.stdout
    assert not list((tmp_path / "home").iterdir())


def test_every_command_works_where_the_terminal_knows_no_character_but_ascii(tmp_path: Path) -> None:
    """Not POSIX's ASCII, for which Python takes UTF-8 nowadays: that of a locale with an encoding of its own."""
    environment = hostile(tmp_path) | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    course, handed = tmp_path / "course", tmp_path / "handed"
    (handed / "zoë").mkdir(parents=True)
    shutil.copy(ROOT / "labs/02_kv_cache/kv_cache.ipynb", handed / "zoë")
    commands = f"""\
doctor
learn --prepare-only
progress
quiz --help
grade new-course {course}
grade release 02 --course {course}
grade collect 02 {handed} --course {course}
grade report 02 --course {course}"""
    words = [sys.executable, "-P", "-c", COMMANDS, commands]
    done = subprocess.run(words, cwd=tmp_path, env=environment, umask=0o077, capture_output=True, timeout=1800)
    assert done.returncode == 0, (done.stdout + done.stderr).decode("ascii")
    done.stdout.decode("ascii")
