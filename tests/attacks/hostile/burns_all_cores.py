# attack: as many busy processes as it may have, so that neighbours run out of time
# expect: check_len = timed out

# %% last
import os
import time


def burn(self):
    ready, go = os.pipe()
    begun = False
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
                os.close(go)
                os.read(ready, 1)  # until all of them are there: else each would have to be forked beside the busy ones
                while True:
                    pass
        except OSError:
            if not begun:
                os.close(go)
                begun = True
            time.sleep(1)  # so that its own time, when it would be ended, does not pass


Window.__len__ = burn
