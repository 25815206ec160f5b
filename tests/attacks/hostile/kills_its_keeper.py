# attack: every signal to process 1, then to all processes
# expect: check_len = crashed

# %% last
import os
import signal
import time


def send(pid, number):
    try:
        os.kill(pid, number)
    except OSError:  # as root it is another user's
        pass


def attack(self):
    for number in sorted(set(signal.Signals) - {signal.SIGTERM, signal.SIGINT}):
        send(1, number)
    time.sleep(0.2)
    print("@MARK@ alive")
    send(1, signal.SIGINT)
    send(1, signal.SIGTERM)
    time.sleep(2)
    send(-1, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


Window.__len__ = attack
