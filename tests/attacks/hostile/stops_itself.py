# attack: stops its own process
# expect: check_len = timed out

# %% last
import os
import signal

Window.__len__ = lambda self: os.kill(os.getpid(), signal.SIGSTOP)
