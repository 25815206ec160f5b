"""Attacks on the sandbox, one per property, for `inferlab grade doctor` and for the tests.

Each runs hostile code where a learner's code would run, and says whether the property held.
"""

from __future__ import annotations

from grader.isolation.trials_limits import (
    disk,
    held_by_the_kernel,
    memory_of_many,
    memory_of_one,
    number_of_processes,
    time_limit,
)
from grader.isolation.trials_neighbours import channels, keeper, other_processes, survival
from grader.isolation.trials_walls import machine, network, packages, privileges, reading, writing

ALL = (
    packages,
    privileges,
    network,
    reading,
    writing,
    machine,
    other_processes,
    channels,
    keeper,
    number_of_processes,
    memory_of_one,
    memory_of_many,
    held_by_the_kernel,
    disk,
    survival,
    time_limit,
)
