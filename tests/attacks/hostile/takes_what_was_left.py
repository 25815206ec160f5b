# attack: looks for what the submissions before it left; it works all the same
# expect: passed
# says: was left []

# %% first
import os
import socket
import time

left, mine = [], {"/tmp", "/dev/shm"}
for _ in range(20):
    for folder in ("/tmp", "/dev/shm", "/dev/mqueue", "/var/tmp", "/run"):
        if os.path.isdir(folder):
            left += [f"{folder}/{name}" for name in os.listdir(folder) if "attack-" in name]
    try:
        socket.socket(socket.AF_UNIX).connect("\0@MARK@-left")
        left.append("socket")
    except OSError:
        pass
    left += [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, os.getpid())]
    time.sleep(0.05)
print("was left", left)
