# attack: processes that take more together than all may have; the kernel ends one of them, and the first goes on
# expect: check_len = killed for memory
# says: used more memory than it may

# %% last
import mmap
import os
import time

POPULATED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE  # one call, not a fault for each page


def grow(self):
    for _ in range(5):
        if os.fork() == 0:
            hoard = mmap.mmap(-1, 600 << 20, flags=POPULATED)
            time.sleep(600)
    os.wait()
    while True:
        pass


Window.__len__ = grow
