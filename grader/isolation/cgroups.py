"""Limits for all processes of one submission together: a control group, where this machine lets us make one.

Three machines are known: version 1 with a folder per controller (memory, pids, cpu), version 2 with one folder, and
neither that we may write to, as in many containers. Then the limits of single processes and the keeper's watch
(`confine.py`) remain; `inferlab grade doctor` says which.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

WANTED = ("memory", "pids", "cpu")
_number = itertools.count()


@dataclass
class Group:
    """One control group. folders: its folder per controller; version 2 has the same one for all."""

    version: int
    folders: dict[str, Path] = field(default_factory=dict)

    def add(self, pid: int) -> None:
        """Puts a process, and what it will fork, into the group. Raises OSError."""
        for folder in set(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def out_of_memory(self) -> bool:
        """Whether the kernel killed a process of the group because the group used too much memory."""
        folder = self.folders.get("memory")
        if folder is None:
            return False
        with contextlib.suppress(OSError):
            text = (folder / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
            return any(line.split()[0] == "oom_kill" and line.split()[1] != "0" for line in text.splitlines())
        return False

    def remove(self) -> None:
        """Remove the group; its processes have ended, but the kernel may need a moment to notice."""
        for folder in set(self.folders.values()):
            for _ in range(50):
                with contextlib.suppress(OSError):
                    folder.rmdir()
                if not folder.exists():
                    break
                time.sleep(0.01)


def make_group(memory: int, processes: int) -> Group | None:
    """A new group with these limits (bytes; number of processes), or None where none can be made."""
    version, parents = available()
    if not parents:
        return None
    group = Group(version)
    name = f"inferlab-{os.getpid()}-{next(_number)}"
    try:
        for controller, parent in parents.items():
            folder = parent / name
            folder.mkdir(exist_ok=True)
            group.folders[controller] = folder
            _limit(folder, controller, version, memory, processes)
    except OSError:
        group.remove()
        return None
    return group


def _limit(folder: Path, controller: str, version: int, memory: int, processes: int) -> None:
    if controller == "memory":
        (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(memory))
        swap = folder / ("memory.memsw.limit_in_bytes" if version == 1 else "memory.swap.max")
        if swap.exists():
            swap.write_text(str(memory) if version == 1 else "0")
    elif controller == "pids":
        (folder / "pids.max").write_text(str(processes))
    # cpu: no number. A separate group gets the same share as its neighbours, however many processes it has.


@cache
def available() -> tuple[int, dict[str, Path]]:
    """(version, folder to make groups in per controller); the dict is empty where we may make none."""
    version, folders = _find()
    for folder in set(folders.values()):
        _sweep(folder)
    return version, folders


def _sweep(parent: Path) -> None:
    """Remove the groups of graders that were killed; their processes ended with them."""
    for folder in parent.glob("inferlab-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _find() -> tuple[int, dict[str, Path]]:
    lines = _lines("/proc/self/cgroup")
    one = {}
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        for controller in WANTED:
            if controller in controllers.split(",") and (parent := _writable_v1(controllers, inside)):
                one[controller] = parent
    if one:
        return 1, one
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    return 2, _writable_v2(own) if own is not None else {}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _writable_v1(controllers: str, inside: str) -> Path | None:
    for mount in (f"/sys/fs/cgroup/{controllers}", *(f"/sys/fs/cgroup/{one}" for one in controllers.split(","))):
        # In a container the path of /proc/self/cgroup may be the host's, and the mount begins at the container's own.
        for folder in (Path(mount + inside), Path(mount)):
            if (folder / "cgroup.procs").exists() and _can_make(folder):
                return folder
    return None


def _writable_v2(own: str) -> dict[str, Path]:
    """The nearest group above this process that we may write to and that hands its controllers on."""
    folder = Path("/sys/fs/cgroup" + own)
    for parent in (folder, *folder.parents):
        handed_on = _lines(str(parent / "cgroup.subtree_control"))
        controllers = [c for c in WANTED if handed_on and c in handed_on[0].split()]
        if "memory" in controllers and os.access(parent / "cgroup.procs", os.W_OK) and _can_make(parent):
            return dict.fromkeys(controllers, parent)
        if parent == Path("/sys/fs/cgroup"):
            break
    return {}


def _can_make(folder: Path) -> bool:
    trial = folder / f"inferlab-{os.getpid()}-trial"
    try:
        trial.mkdir()
        trial.rmdir()
        return True
    except OSError:
        return False
