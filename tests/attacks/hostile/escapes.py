# attack: the ways out that a kernel offers: namespaces, mounts, tracing, keys, another user; it works all the same
# expect: passed
# says: got []

# %% first
import ctypes
import os
import platform

libc, got = ctypes.CDLL(None, use_errno=True), []
ways = {
    "unshare user": lambda: libc.unshare(0x10000000),
    "unshare pid": lambda: libc.unshare(0x20000000),
    "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "remount": lambda: libc.mount(None, b"/", None, 32, None),
    "umount": lambda: libc.umount2(b"/proc", 2),
    "chroot": lambda: libc.chroot(b"/tmp"),
    "ptrace keeper": lambda: libc.ptrace(16, 1, 0, 0),
    "ptrace": lambda: libc.ptrace(0, 0, 0, 0),
    "setuid": lambda: libc.setuid(0),
    "setgid": lambda: libc.setgid(0),
    "sethostname": lambda: libc.sethostname(b"x", 1),
    "personality": lambda: libc.personality(0x0040000),
    "reboot": lambda: libc.reboot(0),
}
if platform.machine() == "x86_64":
    numbers = {"setns": 308, "bpf": 321, "keyctl": 250, "add_key": 248, "perf": 298, "userfaultfd": 323, "memfd": 319,
               "io_uring": 425, "open_tree": 428, "fsopen": 430, "kexec": 246, "pidfd_getfd": 438, "clone3": 435,
               "shmget": 29, "process_vm_readv": 310, "name_to_handle_at": 303}  # fmt: skip
    ways |= {name: lambda number=number: libc.syscall(number, 0, 0, 0, 0, 0) for name, number in numbers.items()}
    ways["clone user namespace"] = lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
for name, way in ways.items():
    if way() != -1:
        got.append(name)
for path, mode in (("/proc/1/oom_score_adj", "w"), ("/proc/sys/kernel/core_pattern", "w"), ("/proc/sysrq-trigger", "w"),
                   ("/proc/1/mem", "rb"), ("/sys/fs/cgroup/cgroup.procs", "w"),
                   ("/dev/kmsg", "w"), ("/dev/tty", "w"), ("/dev/sda", "rb")):  # fmt: skip
    try:
        os.close(os.open(path, os.O_RDWR if mode != "rb" else os.O_RDONLY))
        got.append(path)
    except OSError:
        pass
try:
    with open("/proc/self/uid_map", "w") as file:
        file.write("0 0 1")
    got.append("uid_map")
except OSError:
    pass
if os.path.exists("/usr/bin/su") and os.fork() == 0:
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    os.execv("/usr/bin/su", ["su", "-c", "echo CANARY-$(id)"])  # a program that would make it root
print("uid", os.getresuid()[0] > 0, "groups", os.getgroups(), "got", got)
