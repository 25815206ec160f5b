# attack: locks, leases and shared memory on files that every submission sees, and news of them; it works all the same
# expect: passed
# says: reached []

# %% first
import fcntl
import mmap
import os

import torch

reached = []
for path in filter(os.path.isfile, ("/bin/sh", "/etc/passwd", "/etc/ld.so.cache", os.__file__, torch.__file__)):
    with open(path, "rb") as file:
        tries = {
            "flock": lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
            "record lock": lambda: fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB),
            "lease": lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK),
            "shared memory": lambda: mmap.mmap(file.fileno(), 1, mmap.MAP_SHARED, mmap.PROT_READ),
        }
        for name, attempt in tries.items():
            try:
                attempt()
                reached.append(name)
            except OSError:
                pass
print("reached", reached)
