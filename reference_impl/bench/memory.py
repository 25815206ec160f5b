"""Memory of a process and its children together, sampled while they work. Linux: /proc/PID/smaps_rollup.

RSS counts a page once for every process that has it, so a sum of RSS counts shared libraries several times. PSS divides
a page by the number of processes that have it: its sum is what the machine would get back.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

FIELDS = ("Pss", "Rss")
ROLLUP = "/proc/{pid}/smaps_rollup"


class PeakMemory:
    """`with PeakMemory() as memory: ...`, then memory.report(). seconds: between samples; shorter peaks are missed."""

    def __init__(self, seconds: float = 0.25):
        self._seconds, self._stop = seconds, threading.Event()
        self._looks = 0
        self._known = Path(ROLLUP.format(pid=os.getpid())).is_file()
        self._peaks: dict[str, dict[int, int]] = {field: {} for field in FIELDS}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        if self._known:
            self._before = memory_of(os.getpid())
            self._look()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._known:
            self._stop.set()
            self._thread.join()
            self._look()

    def report(self) -> dict[str, Any]:
        """What was measured, in bytes. own_before: of this process when the watch began. peak: the largest sum over all
        processes at one moment, and its parts, this process first."""
        if not self._known:
            return {"unknown": "this system has no /proc/PID/smaps_rollup"}
        found: dict[str, Any] = {"seconds_between_looks": self._seconds, "looks": self._looks}
        for field, parts in self._peaks.items():
            sizes = list(parts.values())
            found[field.lower()] = {"peak": sum(sizes), "parts": sizes, "own_before": self._before[field]}
        return found

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds):
            self._look()

    def _look(self) -> None:
        seen = {}
        for pid in family(os.getpid()):
            try:
                seen[pid] = memory_of(pid)
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
        self._looks += 1
        for field, peak in self._peaks.items():
            if sum(memory[field] for memory in seen.values()) > sum(peak.values()):
                self._peaks[field] = {pid: memory[field] for pid, memory in seen.items()}


def memory_of(pid: int) -> dict[str, int]:
    """PSS and RSS of a process in bytes; 0 for a zombie, which is only an entry in the process table."""
    lines = Path(ROLLUP.format(pid=pid)).read_text().splitlines()[1:]
    values = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines}
    return {field: values.get(field, 0) for field in FIELDS}


def family(pid: int) -> list[int]:
    """Ids of a process, its children and theirs."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in children.read_text().split():
                found += family(int(child))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
