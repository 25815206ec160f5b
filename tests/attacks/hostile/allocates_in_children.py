# attack: processes that take more together than all may have; the kernel ends one of them, and the first goes on
# expect: check_len = killed for memory
# says: used more memory than it may

# %% last
import mmap
import os
import time

POPULATED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE  # one call, not a fault for each page


def grow(self):
    for _ in range(2):  # 900 MiB of 768; more of them fight for the last pages until the time is over
        if os.fork() == 0:
            hoard = mmap.mmap(-1, 450 << 20, flags=POPULATED)
            time.sleep(600)
    os.wait()
    time.sleep(600)  # by the clock a call has three times what it has of the processor


Window.__len__ = grow
