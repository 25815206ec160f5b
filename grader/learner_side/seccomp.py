"""The filter of system calls for learners' code: a small program for the kernel, written down here as data.

Everything is allowed but what could lead out of the sandbox or around its limits: namespaces and mounts, other
processes' memory, sockets that are not local, memory that no limit counts, and the kernel's administration. The kernel
runs the filter before every system call of the process and all its children; it cannot be taken off again.

The instructions are classic BPF over `struct seccomp_data` (linux/seccomp.h). No library is needed, so that the filter
works where libseccomp is missing; system call numbers stand here for x86-64 and aarch64. Shipped beside `learner.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# name: number on x86-64, on aarch64 (None: does not exist there). From the kernel's unistd tables.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes and their memory
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # memory that outlives its process or that no limit of a process counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "setsockopt": (54, 208),  # makes the buffers of sockets large
    # the kernel's keys, clocks, modules and administration
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "personality": (135, 92),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
SOCKET, CLONE, CLONE3 = (41, 198), (56, 220), (435, 435)
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
AF_UNIX = 1

# architecture (os.uname().machine): AUDIT_ARCH value, column of the tables above
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low half of the argument
_X32 = 0x40000000  # system calls of the x32 ABI have this bit, and numbers of their own
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter's instructions (code, jump if true, jump if false, operand). Raises LookupError for other machines."""
    if machine not in ARCHITECTURES:
        raise LookupError(f"there is no filter of system calls for {machine}, only for {', '.join(ARCHITECTURES)}")
    arch, column = ARCHITECTURES[machine]
    steps = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        steps += [(_GREATER_EQUAL, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    # The flags of clone3 lie in memory, where a filter cannot look; libc then uses clone.
    steps += [(_EQUAL, 0, 1, CLONE3[column]), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    steps += [(_EQUAL, 0, 3, CLONE[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 4, NEW_NAMESPACES)]
    steps += [(_RETURN, 0, 0, _FAIL | errno.EPERM)]
    steps += [(_EQUAL, 0, 2, SOCKET[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 0, 1, AF_UNIX)]
    return [*steps, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install() -> None:
    """Put the filter on this process for good. Raises LookupError, OSError."""
    steps = program(os.uname().machine)
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, None, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(_Program(len(steps), code)), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel does not take the filter of system calls")
