"""The filter of system calls for learners' code: a small program for the kernel, written down here as data.

What Python, torch, numpy and Triton need is allowed, by name; some of it only with arguments that lead neither out of
the sandbox nor around its limits. What is known and refused says "not permitted"; everything else, also what future
kernels bring, does not exist here, and libraries then do what they do on an older kernel. The kernel runs the filter
before every system call of the process and all its children; it cannot be taken off again.

The instructions are classic BPF over `struct seccomp_data` (linux/seccomp.h). No library is needed, so that the filter
works where libseccomp is missing; system call numbers stand here for x86-64 and aarch64. Shipped beside `learner.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# name: number on x86-64, on aarch64 (None: does not exist there). From the kernel's unistd tables.
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # files
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70),
    "open": (2, None), "openat": (257, 56), "openat2": (437, 437), "creat": (85, None), "close": (3, 57),
    "close_range": (436, 436), "lseek": (8, 62), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "pipe": (22, None), "pipe2": (293, 59), "fsync": (74, 82), "fdatasync": (75, 83), "sync_file_range": (277, 84),
    "fallocate": (285, 47), "truncate": (76, 45), "ftruncate": (77, 46), "copy_file_range": (326, 285),
    "ioctl": (16, 29), "getdents": (78, None),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None),
    "link": (86, None), "linkat": (265, 37), "unlink": (87, None), "unlinkat": (263, 35), "symlink": (88, None),
    "symlinkat": (266, 36), "readlink": (89, None), "readlinkat": (267, 78), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "umask": (95, 166), "utime": (132, None), "utimes": (235, None), "utimensat": (280, 88), "futimesat": (261, None),
    "mknod": (133, None), "mknodat": (259, 33), "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10),
    "listxattr": (194, 11), "llistxattr": (195, 12), "flistxattr": (196, 13), "poll": (7, None), "ppoll": (271, 73),
    "select": (23, None), "pselect6": (270, 72),
    # memory
    "brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233),
    "msync": (26, 227), "mlock": (149, 228), "mlock2": (325, 284), "munlock": (150, 229), "membarrier": (324, 283),
    "pkey_alloc": (330, 289), "pkey_free": (331, 290), "pkey_mprotect": (329, 288),
    # processes and threads
    "execve": (59, 221), "execveat": (322, 281), "exit": (60, 93), "exit_group": (231, 94), "fork": (57, None),
    "vfork": (58, None), "wait4": (61, 260), "waitid": (247, 95), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgid": (121, 155),
    "getpgrp": (111, None), "setpgid": (109, 154), "getsid": (124, 156), "setsid": (112, 157),
    "set_tid_address": (218, 96), "set_robust_list": (273, 99), "get_robust_list": (274, 100), "futex": (202, 98),
    "futex_waitv": (449, 449), "rseq": (334, 293), "arch_prctl": (158, None), "prctl": (157, 167),
    "restart_syscall": (219, 128), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158),
    "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143),
    "setresuid": (117, 147), "setresgid": (119, 149), "setgroups": (116, 159), "setfsuid": (122, 151),
    "setfsgid": (123, 152), "capget": (125, 90), "capset": (126, 91), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "getrusage": (98, 165), "times": (100, 153), "getpriority": (140, 141), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getscheduler": (145, 120), "sched_getparam": (143, 121),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "sched_rr_get_interval": (148, 127),
    "sched_getattr": (315, 275), "getcpu": (309, 168), "uname": (63, 160),
    "getrandom": (318, 278),
    # signals and time
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None), "alarm": (37, None),
    "getitimer": (36, 102), "setitimer": (38, 103), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    # the channel
    "sendto": (44, 206), "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51, 204),
    "getpeername": (52, 205), "getsockopt": (55, 209),
}  # fmt: skip
# Known, and refused with EPERM.
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
    # of other processes, the keeper among them: priority, processors
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # what two submissions could speak through, over files that both of them see
    "flock": (73, 32),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "mincore": (27, 232),  # what of a file is in memory; preadv2 and pwritev2, which say so, too, do not exist here
    "fadvise64": (221, 223),  # these two change it
    "readahead": (187, 213),
    "sysinfo": (99, 179),  # how many processes the machine has
    # memory of the kernel's, which outlives its process or which no limit of a process counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "setsockopt": (54, 208),  # makes the buffers of sockets large
    "sendmsg": (46, 211),  # carries open files, which then no process has
    "sendmmsg": (307, 269),
    "sendfile": (40, 71),  # these keep pages in pipes
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "mq_open": (240, 180),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "io_setup": (206, 0),
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
# Allowed with some arguments only.
CLONE, MMAP, FCNTL, PRLIMIT = (56, 220), (9, 222), (72, 25), (302, 261)
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
# Not MAP_SHARED: without a file such memory can be kept by processes that are not seen to use it; of a file that other
# submissions see, it is a place to meet them.
MAP_SHARED = 1
MAP_HUGETLB = 0x40000  # huge pages are no part of what the keeper sums
# F_DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC, GETPIPE_SZ. Not SETPIPE_SZ, and no locks or leases: on files that
# other submissions see they are a channel, and the kernel's memory for them has no limit.
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030, 1032)

# architecture (os.uname().machine): AUDIT_ARCH value, column of the tables above
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; of an argument the low half is read
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
    # What is called most stands first; newer kernels remember the answer for each number.
    for names, answer in ((ALLOWED, _ALLOW), (DENIED, _FAIL | errno.EPERM)):
        for numbers in names.values():
            if (number := numbers[column]) is not None:
                steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | errno.EPERM)
    for numbers, argument, bits in ((CLONE, 0, NEW_NAMESPACES), (MMAP, 3, MAP_SHARED | MAP_HUGETLB)):
        steps += [(_EQUAL, 0, 4, numbers[column]), _load(argument), (_ANY_BIT, 0, 1, bits), refuse, allow]
    for numbers, argument, values in ((FCNTL, 1, FCNTL_COMMANDS), (PRLIMIT, 0, (0,))):
        tests = [step for value in values for step in ((_EQUAL, 0, 1, value), allow)]
        steps += [(_EQUAL, 0, len(tests) + 2, numbers[column]), _load(argument), *tests, refuse]
    # Among them clone3: its flags lie in memory, where a filter cannot look; libc then uses clone.
    return [*steps, (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]


def _load(argument: int) -> tuple[int, int, int, int]:
    return _LOAD, 0, 0, _ARGUMENTS + 8 * argument


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
