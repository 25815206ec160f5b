# attack: every signal to process 1, then to all processes
# expect: check_len = crashed

# %% last
import os
import signal
import time


def attack(self):
    for number in sorted(set(signal.Signals) - {signal.SIGTERM, signal.SIGINT}):
        os.kill(1, number)
    time.sleep(0.2)
    print("@MARK@ alive")
    os.kill(1, signal.SIGINT)
    os.kill(1, signal.SIGTERM)
    time.sleep(60)
    os.kill(-1, signal.SIGKILL)


Window.__len__ = attack
