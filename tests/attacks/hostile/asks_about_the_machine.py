# attack: reads the machine's name, its groups and mounts, and tries system calls that tell of them; it works all the same
# expect: passed
# says: learned learner []

# %% first
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
learned = []
for path in ("/proc/self/cgroup", "/proc/self/mountinfo", "/proc/mounts", "/proc/version", "/proc/locks", "/etc/hostname"):
    if os.path.exists(path):
        learned.append(path)
for number in (428, 457, 458, 467):  # open_tree, statmount, listmount, open_tree_attr
    if libc.syscall(number, -100, b"/tmp", 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 38):
        learned.append(number)
print("learned", os.uname().nodename, learned)
