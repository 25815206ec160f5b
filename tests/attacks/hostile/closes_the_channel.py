# attack: closes the channel and lives on
# expect: check_len = crashed

# %% last
import os
import time


def attack(self):
    os.close(3)
    time.sleep(600)


Window.__len__ = attack
