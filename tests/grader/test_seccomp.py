"""The filter of system calls, run by an interpreter of its instructions: for both machines, on any."""

from __future__ import annotations

import errno

import pytest

from grader.learner_side import seccomp
from grader.learner_side.seccomp import ARCHITECTURES, CLONE, CLONE3, DENIED, NEW_NAMESPACES, SOCKET, program

ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
MACHINES = list(ARCHITECTURES)


def decide(machine: str, number: int, first: int = 0, arch: int | None = None) -> int:
    """What the filter returns for a system call, after the rules of linux/filter.h."""
    steps = program(machine)
    words = {0: number, 4: ARCHITECTURES[machine][0] if arch is None else arch, 16: first}
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
def test_everything_on_the_list_fails_with_permission_denied(machine: str) -> None:
    column = ARCHITECTURES[machine][1]
    for name, numbers in DENIED.items():
        if numbers[column] is not None:
            assert decide(machine, numbers[column]) == FAIL | errno.EPERM, name


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_on_no_list_is_allowed(machine: str) -> None:
    column = ARCHITECTURES[machine][1]
    special = {numbers[column] for numbers in (*DENIED.values(), SOCKET, CLONE, CLONE3)}
    allowed = [number for number in range(500) if number not in special]
    assert len(allowed) > 400
    assert {decide(machine, number) for number in allowed} == {ALLOW}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("family", [2, 10, 16, 17, 40, 0xFFFFFFFF])
def test_only_local_sockets_can_be_made(machine: str, family: int) -> None:
    number = SOCKET[ARCHITECTURES[machine][1]]
    assert decide(machine, number, 1) == ALLOW
    assert decide(machine, number, family) == FAIL | errno.EAFNOSUPPORT


@pytest.mark.parametrize("machine", MACHINES)
def test_a_process_can_be_made_but_no_namespace(machine: str) -> None:
    column = ARCHITECTURES[machine][1]
    assert decide(machine, CLONE[column], 0x01200011) == ALLOW  # what libc's fork passes
    assert decide(machine, CLONE[column], 0x003D0F00) == ALLOW  # what libc's pthread_create passes
    for bit in range(32):
        wanted = FAIL | errno.EPERM if NEW_NAMESPACES >> bit & 1 else ALLOW
        assert decide(machine, CLONE[column], 1 << bit) == wanted
    assert decide(machine, CLONE3[column]) == FAIL | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_system_calls_of_another_architecture_kill(machine: str) -> None:
    assert decide(machine, 0, arch=0x40000003) == KILL  # 32 bit, whose numbers mean other calls


def test_the_second_numbering_of_x86_kills() -> None:
    assert decide("x86_64", 0x40000000 | 41, 2) == KILL


def test_on_an_unknown_machine_there_is_no_filter_and_no_silence() -> None:
    with pytest.raises(LookupError, match="riscv64.*x86_64"):
        seccomp.program("riscv64")
