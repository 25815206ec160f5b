# attack: leaves files, a socket and changed limits for the submissions after it; it works all the same
# expect: passed

# %% first
import os
import resource
import socket

for folder in ("/tmp", "/dev/shm", "/dev/mqueue", "/var/tmp", "/run"):
    try:
        open(f"{folder}/@MARK@-left", "w").write("CANARY-" + "0123456789abcdef")
    except OSError:
        pass
try:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("\0@MARK@-left")
    listening.listen()
except OSError:
    pass
try:
    os.setpriority(os.PRIO_PROCESS, 0, 10)
except OSError:
    pass
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
