"""The filter of system calls, run by an interpreter of its instructions: for both machines, on any."""

from __future__ import annotations

import errno

import pytest

from grader.learner_side import seccomp
from grader.learner_side.seccomp import (
    ALLOWED,
    ARCHITECTURES,
    CLONE,
    DENIED,
    FCNTL,
    FCNTL_COMMANDS,
    MMAP,
    NEW_NAMESPACES,
    PRLIMIT,
    program,
)

ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
MACHINES = list(ARCHITECTURES)
SOME_ARGUMENTS = (CLONE, MMAP, FCNTL, PRLIMIT)
CLONE3, OPEN_TREE_ATTR, LISTMOUNT = 435, 467, 458  # the same number on all machines


def decide(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What the filter returns for a system call, after the rules of linux/filter.h."""
    steps = program(machine)
    words = {0: number, 4: ARCHITECTURES[machine][0] if arch is None else arch}
    words |= {16 + 8 * place: value for place, value in enumerate((*arguments, *[0] * 6)[:6])}
    place = value = 0
    while True:
        code, yes, no, operand = steps[place]
        place += 1
        if code == 0x20:
            value = words[operand]
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            place += yes if holds else no


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_on_a_list_is_allowed_or_not_permitted_and_nothing_else_exists(machine: str) -> None:
    column = ARCHITECTURES[machine][1]
    some = {numbers[column] for numbers in SOME_ARGUMENTS}
    allowed, denied = ({numbers[column] for numbers in names.values()} - {None} for names in (ALLOWED, DENIED))
    assert not allowed & denied
    assert not (allowed | denied) & some
    for number in set(range(600)) - some:
        answer = ALLOW if number in allowed else FAIL | (errno.EPERM if number in denied else errno.ENOSYS)
        assert decide(machine, number) == answer, number


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("number", [CLONE3, OPEN_TREE_ATTR, LISTMOUNT, 5000])
def test_what_is_new_does_not_exist(machine: str, number: int) -> None:
    assert decide(machine, number) == FAIL | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_the_tables_have_no_number_twice(machine: str) -> None:
    column = ARCHITECTURES[machine][1]
    numbers = [numbers[column] for numbers in (*ALLOWED.values(), *DENIED.values(), *SOME_ARGUMENTS)]
    found = [number for number in numbers if number is not None]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("machine", MACHINES)
def test_a_jump_reaches_its_place(machine: str) -> None:
    assert max(max(yes, no) for _, yes, no, _ in program(machine)) < 256
    assert len(program(machine)) < 4096


@pytest.mark.parametrize("machine", MACHINES)
def test_a_process_can_be_made_but_no_namespace(machine: str) -> None:
    number = CLONE[ARCHITECTURES[machine][1]]
    assert decide(machine, number, 0x01200011) == ALLOW  # what libc's fork passes
    assert decide(machine, number, 0x003D0F00) == ALLOW  # what libc's pthread_create passes
    for bit in range(32):
        wanted = FAIL | errno.EPERM if NEW_NAMESPACES >> bit & 1 else ALLOW
        assert decide(machine, number, 1 << bit) == wanted


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("flags", "permitted"), [(0x22, True), (0x02, True), (0x21, False), (0x01, False), (3, False), (0x40022, False)]
)
def test_memory_can_be_private_only(machine: str, flags: int, permitted: bool) -> None:
    answer = decide(machine, MMAP[ARCHITECTURES[machine][1]], 0, 4096, 3, flags)
    assert answer == (ALLOW if permitted else FAIL | errno.EPERM)


@pytest.mark.parametrize("machine", MACHINES)
def test_of_a_file_neither_locks_nor_leases_nor_large_pipes(machine: str) -> None:
    number = FCNTL[ARCHITECTURES[machine][1]]
    permitted = [command for command in range(1100) if decide(machine, number, 5, command) == ALLOW]
    assert permitted == list(FCNTL_COMMANDS)
    locks_leases_pipes = (6, 7, 37, 38, 1024, 1026, 1031)
    assert {decide(machine, number, 5, command) for command in locks_leases_pipes} == {FAIL | errno.EPERM}


@pytest.mark.parametrize("machine", MACHINES)
def test_limits_are_read_and_set_of_oneself_only(machine: str) -> None:
    number = PRLIMIT[ARCHITECTURES[machine][1]]
    assert decide(machine, number, 0, 7) == ALLOW
    assert decide(machine, number, 1, 7) == FAIL | errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_system_calls_of_another_architecture_kill(machine: str) -> None:
    assert decide(machine, 0, arch=0x40000003) == KILL  # 32 bit, whose numbers mean other calls


def test_the_second_numbering_of_x86_kills() -> None:
    assert decide("x86_64", 0x40000000 | 41, 2) == KILL


def test_on_an_unknown_machine_there_is_no_filter_and_no_silence() -> None:
    with pytest.raises(LookupError, match="riscv64.*x86_64"):
        seccomp.program("riscv64")
