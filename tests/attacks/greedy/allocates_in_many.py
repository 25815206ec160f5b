# attack: processes that stay below the limit each, and take more than all may have together
# expect: check_len = killed for memory
# says: used more memory than it may

# %% last
import mmap
import os
import time

POPULATED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE  # one call, not a fault for each page


def hoard(size):
    taken = mmap.mmap(-1, size, flags=POPULATED)
    for place in range(0, size, mmap.PAGESIZE):
        taken[place] = 1  # where populating gave up without a word
    return taken


def grow(self):
    go_on, wait = os.pipe()
    for _ in range(3):
        if os.fork() == 0:
            os.close(wait)
            os.close(3)  # the channel: it is closed when nobody has it any more
            os.read(go_on, 1)
            taken = hoard(130 << 20)
            time.sleep(600)
    taken = hoard(210 << 20)  # the largest of them goes first
    os.close(wait)
    time.sleep(600)


Window.__len__ = grow
