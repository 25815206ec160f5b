# attack: as many busy processes as it may have, so that neighbours run out of time
# expect: check_len = timed out

# %% last
import os
import time


def burn(self):
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
                while True:
                    pass
        except OSError:
            time.sleep(1)  # so that its own time, when it would be ended, does not pass


Window.__len__ = burn
