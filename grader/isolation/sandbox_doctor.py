"""`inferlab grade doctor`: is the sandbox real on this machine? Each property is tried, by code that attacks it.

The attacks run where a learner's code would run. A property that does not hold is a failure with a cause and a remedy,
and the grader should not be trusted until it is repaired. What is weaker than it could be is a warning.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

from rich.console import Console

from grader.findings import Row, table
from grader.isolation import cgroups, sandbox, sandbox_trials
from grader.isolation.launcher import Launcher

CAP_SYS_PTRACE = 19  # its bit, from linux/capability.h


def run(console: Console | None = None) -> int:
    """Prints a table of properties; returns the exit code: 1 if submissions must not be graded here."""
    console = console or Console(highlight=False)
    rows = []
    try:
        with Launcher() as launcher:
            for row in trials(launcher):
                rows.append(row)
    except sandbox.SandboxError as error:
        rows.append(Row("isolation", str(error), "fail", "Without isolation the grader refuses to grade"))
    console.print(table(rows, "inferlab grade doctor"))
    for row in rows:
        if row.advice:
            console.print(f"{row.name}: {row.advice}", markup=False, soft_wrap=True)
    failed = [row.name for row in rows if row.verdict == "fail"]
    console.print(
        f"Do not grade submissions here before this is repaired: {', '.join(failed)}"
        if failed
        else "Every property was tried on this machine just now, and holds.",
        markup=False,
    )
    return int(bool(failed))


def trials(launcher: Launcher) -> Iterator[Row]:
    """One row per property. Raises SandboxError when no learner's process can be started at all."""
    started = time.monotonic()
    launcher.fork().end()
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True).stdout.strip()
    who = "root, learners as a user nobody has" if os.geteuid() == 0 else "an ordinary user, with user namespaces"
    yield Row("isolation", f"{version}, graded by {who}; started in {time.monotonic() - started:.1f} s")
    yield _groups()
    yield rights(launcher)
    yield from (trial(launcher) for trial in sandbox_trials.ALL)
    yield speed(launcher)


def _groups() -> Row:
    version, folders = cgroups.available()
    if not folders:
        advice = (
            "The limits of single processes and a watch over all of them are used instead; they were tried below. "
            "With systemd, cgroups appear when you run the grader by: systemd-run --user --scope -p Delegate=yes ..."
        )
        return Row("control groups", "none that we may make", "warn", advice)
    missing = [name for name in cgroups.WANTED if name not in folders]
    found = f"version {version}: {', '.join(folders)}" + (f"; without {', '.join(missing)}" if missing else "")
    return Row("control groups", found)


def rights(launcher: Launcher) -> Row:
    """Whether the process that watches a submission got what it watches with, where no control group bounds memory."""
    if os.geteuid() != 0:
        return Row("rights", "an ordinary user's, over namespaces of its own; no others are needed")
    process = launcher.fork()
    try:
        keeper = int(_status(process.pid)["PPid"])
        exact = int(_status(keeper)["CapEff"], 16) >> CAP_SYS_PTRACE & 1
        is_first = os.getpriority(os.PRIO_PROCESS, keeper) < os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        process.end()
    missing = [name for name, there in (("SYS_PTRACE", exact), ("SYS_NICE", is_first)) if not there]
    return rights_row(missing, "memory" in cgroups.available()[1])


def rights_row(missing: list[str], has_group: bool) -> Row:
    """What to say of missing rights, without CAP_. has_group: a control group bounds memory."""
    if not missing:
        return Row("rights", "the keeper of a submission has CAP_SYS_PTRACE, and came first by CAP_SYS_NICE")
    found = f"without {' and '.join(f'CAP_{name}' for name in missing)}"
    if has_group:
        return Row("rights", f"{found}, which only a machine without control groups needs", "info")
    costs = {"SYS_PTRACE": "memory that processes share counts once for each, so an honest submission may be ended",
             "SYS_NICE": "busy processes of a submission can delay the count of its memory"}  # fmt: skip
    advice = (
        f"{'; '.join(costs[name] for name in missing)}. In a container, start it with "
        f"{' '.join(f'--cap-add {name}' for name in missing)}, or give it a control group that it may write to"
    )
    return Row("rights", found, "warn", advice)


def _status(pid: int) -> dict[str, str]:
    """The lines of /proc/PID/status, by name."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


def speed(launcher: Launcher) -> Row:
    """What isolation costs a submission."""
    started = time.monotonic()
    for _ in range(10):
        launcher.fork().end()
    return Row("speed", f"{(time.monotonic() - started) * 100:.0f} ms to start and end a learner's process", "info")
