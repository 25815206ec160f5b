# attack: as many busy processes as it may have, so that neighbours run out of time
# expect: check_len = timed out

# %% last
import os


def burn(self):
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
                while True:
                    pass
        except OSError:
            pass


Window.__len__ = burn
