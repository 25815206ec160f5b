# attack: processes that take more together than all may have; the kernel ends one of them, the first hangs up and lives
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
    time.sleep(600)


def grow(self):
    for _ in range(3):  # 600 MiB of 512
        if os.fork() == 0:
            os.close(3)  # the channel: it is closed when nobody has it any more
            hoard(200 << 20)
    os.wait()
    os.close(3)
    time.sleep(600)


Window.__len__ = grow
