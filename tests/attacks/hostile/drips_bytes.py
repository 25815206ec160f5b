# attack: an answer that comes one byte at a time and never ends
# expect: check_len = timed out

# %% last
import os
import time


def drip(self):
    os.write(3, (1 << 20).to_bytes(4, "big") + bytes(8))
    while True:
        os.write(3, b" ")
        time.sleep(0.2)


Window.__len__ = drip
