"""Which units of tests have to run, by the record, whose turn it is, and the jobs that follow."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.selection.record import PATH, SLOW, Record, short_name
from tests.selection.sources import Tree, commits

TURNS = 10  # commits in which all that is left out has its turn
BATCH, STARTS = 25.0, 0.4  # seconds of tests that share a process; seconds for a file's imports


@dataclass
class Job:
    """One pytest. units: what of the record it tries; leave: of a file the short names of tests that need not run."""

    files: list[str] = field(default_factory=list)
    seconds: float = 0.0
    units: set[str] = field(default_factory=set)
    leave: dict[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.files[0].removeprefix("tests/") + (f" and {len(self.files) - 1} more" if self.files[1:] else "")


class Choice:
    """lines: what is known of each unit that is there, whether it holds or not; why: what changed where it does not;
    stale: what has to run, but for slow tests."""

    def __init__(self, root: Path):
        self.root, self.tree, self.known = root, Tree(root, PATH), Record.read(root / PATH)
        self.holding, why = self.known.judge(self.tree)
        found = (*self.known.lines, *self.holding.values())  # what was moved is under its new name
        self.lines = {line.unit: line for line in found if line.file in self.tree.names}
        self.known.lines = [*self.lines.values()]
        self.why = {unit: paths for unit, paths in why.items() if unit in self.lines}
        self.files = sorted(name for name in self.tree.names if re.fullmatch(r"tests/(.+/)?test_\w+\.py", name))
        self.units = {*self.files, *self.lines}
        self.slow = {unit for unit, line in self.lines.items() if SLOW in line.costly}
        self.stale = self.units - self.holding.keys() - self.slow
        # Dealt out like cards, the dearest first, so that all turns cost about the same.
        deck = sorted(self.holding.keys() - self.slow, key=lambda unit: (-self.lines[unit].seconds, unit))
        self.turn = commits(root) % TURNS
        self.drawn = set(deck[self.turn :: TURNS])

    def jobs(self, units: set[str], share: bool = False) -> list[Job]:
        """For each file what runs its units among these, and its short tests; share: files may share a job."""
        jobs, shared = [self.job(file, units) for file in self.files], Job()
        if not share:
            return jobs
        made = [job for job in jobs if job.seconds > BATCH]
        for job in (job for job in jobs if job.seconds <= BATCH):
            if shared.seconds + job.seconds > BATCH:
                made.append(shared)
                shared = Job()
            shared.files += job.files
            shared.seconds += job.seconds
            shared.leave |= job.leave
        return [*made, shared] if shared.files else made

    def job(self, file: str, units: set[str]) -> Job:
        own = {unit for unit in self.lines if unit.startswith(f"{file}::")}  # have lines of their own
        tried = units & {file, *own}
        leave = {short_name(unit) for unit in own - tried}
        seconds = STARTS + sum(self.lines[unit].seconds if unit in self.lines else 1.0 for unit in tried)
        if file not in units and (line := self.lines.get(file)):
            leave |= line.costly.keys()
            seconds += line.seconds - sum(line.costly.values())
        return Job([file], seconds, tried, {file: sorted(leave)})
