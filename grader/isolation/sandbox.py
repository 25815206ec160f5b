"""The wall around learners' code on Linux: which files bubblewrap shows it, and why it would not start here.

Inside there is Python's standard library, torch, triton and numpy with what they need, and a copy of
`reference_impl/interfaces/`; nothing else of the course, of the instructor's files, or of the network.
`confine.py` then separates the submissions from each other.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "triton", "numpy")
SIDE = "/learner/side"  # where the launcher's folder is seen inside
SITE = "/learner/site"
SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/include")
INNER_UID = 61000  # the user inside, when an ordinary user grades
FIRST_UID, NUM_UIDS = 61184, 2048  # unused user ids; root lends one to each warm process, and as many to its keepers
MEMORY, DISK, PROCESSES = 2 << 30, 256 << 20, 64
# Without a control group: what the kernel keeps for one process, such as its list of mappings, is counted nowhere.
WATCHED_PROCESSES = 16
# In every learner's process, isolated or not. There is no GPU: Triton's kernels run in its interpreter, which must be
# selected before Triton is imported.
FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}


class SandboxError(RuntimeError):
    """Learners' code cannot be isolated here: says the cause and the remedy."""


@dataclass(frozen=True)
class Isolation:
    """How isolation is done for the current user. uid: what root's learners become; None for an ordinary user."""

    bwrap: str
    uid: int | None

    @property
    def keeper_uid(self) -> int | None:
        """The user of the process that watches the learners', which they then cannot signal or slow down; or None."""
        return None if self.uid is None else self.uid + NUM_UIDS


def isolation() -> Isolation:
    """The isolation that this machine offers, without trying it. Raises SandboxError."""
    if sys.platform != "linux":
        raise SandboxError(
            "learners' code can only be isolated on Linux. On macOS and Windows grade in a container: "
            "grader/isolation/container/README.md. For code you trust as your own: --insecure"
        )
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(
            "bubblewrap is not installed. Debian and Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap. "
            "For code you trust as your own: --insecure"
        )
    return Isolation(bwrap, FIRST_UID + os.getpid() % NUM_UIDS if os.geteuid() == 0 else None)


def command(isolated: Isolation, folder: str, inside: list[str]) -> list[str]:
    """The command line that runs `inside` in bubblewrap, with `folder` as SIDE. Raises SandboxError."""
    words = [isolated.bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
    words += ["--hostname", "learner"]
    if isolated.uid is None:
        # All rights, but only over its own namespaces: the warm process needs them to separate submissions, and
        # gives them up before a learner's code runs.
        words += ["--unshare-user", "--uid", str(INNER_UID), "--gid", str(INNER_UID), "--cap-add", "ALL"]
    else:
        words += ["--cap-drop", "ALL"]
        for right in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL"):
            words += ["--cap-add", right]
        for right, number in (("CAP_SYS_PTRACE", 19), ("CAP_SYS_NICE", 23)):  # for a keeper, where a container has them
            words += ["--cap-add", right] if _has_right(number) else []
    words += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/tmp"]
    for source, target in _files(folder, isolated.uid):
        for parent in reversed(Path(target).parents[:-1]):
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--symlink", source[1:], target] if source.startswith(">") else ["--ro-bind", source, target]
    for hidden in _hidden():
        words += ["--tmpfs", hidden, "--remount-ro", hidden]
    words += ["--remount-ro", "/", "--remount-ro", "/dev", "--chdir", "/tmp", "--clearenv"]
    for name, value in environment().items():
        words += ["--setenv", name, value]
    return [*words, "--", *inside]


def _has_right(capability: int) -> bool:
    status = _setting("/proc/self/status").partition("CapPrm:")[2].split()
    return bool(status) and bool(int(status[0], 16) >> capability & 1)


def environment() -> dict[str, str]:
    """The whole environment inside."""
    given = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "USER": "learner", "LANG": "C.UTF-8"}
    return given | FIXED


def python() -> list[str]:
    """The command line of Python inside, without any site-packages."""
    return [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B"]


def _files(folder: str, uid: int | None) -> Iterator[tuple[str, str]]:
    """(path here, path inside); a source that begins with `>` is what a link inside points to."""
    # Not all of /usr: administrators keep configuration with passwords in /usr/local/etc.
    prefix = os.path.realpath(sys.base_prefix)
    wanted = [*SYSTEM, *(os.path.join(prefix, part) for part in ("bin", "lib"))]
    yield from ((path, path) for path in dict.fromkeys(wanted) if os.path.isdir(path) and not os.path.islink(path))
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            yield ">" + os.readlink(name), name
        elif os.path.isdir(name):
            yield name, name
    for name in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/sys/devices/system/cpu"):
        if os.path.exists(name):
            yield name, name
    who = INNER_UID if uid is None else uid
    for name, text in (("passwd", f"learner:x:{who}:{who}::/tmp:/bin/sh\n"), ("group", f"learner:x:{who}:\n")):
        Path(folder, name).write_text(text)
        yield os.path.join(folder, name), f"/etc/{name}"
    yield os.path.join(folder, "learner_side"), f"{SIDE}/learner_side"
    yield from ((source, f"{SITE}/{name}") for name, source in packages().items())


def packages() -> dict[str, str]:
    """The top-level files and folders of PACKAGES and of all they need: name inside site-packages, path here."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    todo, done = list(PACKAGES), set()
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in done:
            continue
        done.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # triton does not exist everywhere, and a marker may leave others out
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not top.endswith(".pth"):
                found[top] = os.path.realpath(str(distribution.locate_file(top)))
        wanted = (Requirement(text) for text in distribution.requires or ())
        todo += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return {name: path for name, path in sorted(found.items()) if os.path.exists(path)}


def _hidden() -> list[str]:
    """Folders inside what is shown that must be empty: other packages, and this course if it lies there."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = os.path.realpath(sys.base_prefix)
    shown = [*SYSTEM, *(os.path.join(prefix, part) for part in ("bin", "lib"))]
    folders = [f"{prefix}/lib/{version}/site-packages", "/usr/lib/python3/dist-packages"]
    folders += [f"/usr/local/lib/{version}/{name}" for name in ("dist-packages", "site-packages")]
    folders += [os.path.realpath(os.getcwd()), os.path.realpath(Path(__file__).parents[2])]
    there = {path for path in folders if os.path.isdir(path) and any(_is_inside(path, root) for root in shown)}
    return sorted(there - set(shown))


def _is_inside(path: str, folder: str) -> bool:
    return os.path.realpath(path) == folder or os.path.realpath(path).startswith(folder + "/")


def diagnosis(said: str) -> str:
    """Cause and remedy, from what bubblewrap or the warm process printed before it ended."""
    flat = " ".join(said.split())[-400:] or "it ended without a message"
    if _setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid():
        remedy = (
            "AppArmor keeps ordinary users from making namespaces (Ubuntu 24.04 and later). Install its profile for "
            "bubblewrap: apt install apparmor-profiles, then copy "
            "/usr/share/apparmor/extra-profiles/bwrap-userns-restrict to /etc/apparmor.d/ and restart apparmor"
        )
    elif _setting("/proc/sys/kernel/unprivileged_userns_clone") == "0" and os.geteuid():
        remedy = "This system forbids namespaces to ordinary users: sysctl kernel.unprivileged_userns_clone=1"
    elif _setting("/proc/sys/user/max_user_namespaces") == "0":
        remedy = "User namespaces are switched off: sysctl user.max_user_namespaces=10000"
    elif "bwrap:" in flat or "ermitted" in flat or "namespaces" in flat:
        remedy = (
            "In a container the engine must allow namespaces and mounts: docker run --cap-add SYS_ADMIN "
            "--cap-add NET_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt "
            "systempaths=unconfined (see grader/isolation/container/README.md)"
        )
    else:
        remedy = "inferlab grade doctor tries each property"
    return f"learners' code cannot be isolated here: {flat}. {remedy}"


def _setting(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
