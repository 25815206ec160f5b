# attack: sys.exit, KeyboardInterrupt, GeneratorExit and NotImplementedError, for another status
# expect: check_window = failed, check_len = failed, check_calls = not written

# %% last
import sys


def leave(self):
    sys.exit(0)


def interrupt(self, *_):
    raise KeyboardInterrupt


def apply_all(*_):
    raise NotImplementedError("<cell check_calls>")


Window.__len__, Window.mean = leave, interrupt
