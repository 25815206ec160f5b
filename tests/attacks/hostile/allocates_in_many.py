# attack: processes that stay below the limit each, and take more than all may have together
# expect: check_len = killed for memory
# says: used more memory than it may

# %% last
import os
import time


def grow(self):
    go_on, wait = os.pipe()
    for _ in range(3):
        if os.fork() == 0:
            os.close(wait)
            os.read(go_on, 1)
            hoard = torch.ones(150 << 20)  # 600 MiB
            time.sleep(600)
    hoard = torch.ones(300 << 20)  # 1.2 GiB: the largest of them goes first
    os.close(wait)
    while len(hoard):  # asleep it uses none of its 3 s of processor time: they have three times that by the clock
        time.sleep(0.01)


Window.__len__ = grow
