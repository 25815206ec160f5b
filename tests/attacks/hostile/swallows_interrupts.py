# attack: a loop that swallows interrupts and ignores signals
# expect: check_len = timed out

# %% last
import signal

for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)


def stubborn(self):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass


Window.__len__ = stubborn
