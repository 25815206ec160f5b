# attack: processes that stay below the limit each, and take more than all may have together
# expect: check_len = killed for memory
# says: used more memory than it may

# %% last
import mmap
import os
import time

POPULATED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE  # one call, not a fault for each page


def grow(self):
    go_on, wait = os.pipe()
    for _ in range(3):
        if os.fork() == 0:
            os.close(wait)
            os.read(go_on, 1)
            hoard = mmap.mmap(-1, 200 << 20, flags=POPULATED)
            time.sleep(600)
    hoard = mmap.mmap(-1, 400 << 20, flags=POPULATED)  # the largest of them goes first
    os.close(wait)
    while len(hoard):  # asleep it uses none of its 3 s of processor time: they have three times that by the clock
        time.sleep(0.01)


Window.__len__ = grow
