# attack: a daemon that would write into the course later
# expect: passed

# %% first
import os
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            for folder in ("@COURSE@", "@HOME@", "/tmp", "/dev/shm", "/var/tmp", "."):
                try:
                    with open(f"{folder}/@MARK@", "a") as file:
                        file.write("still here\n")
                except OSError:
                    pass
            time.sleep(0.05)
    os._exit(0)
