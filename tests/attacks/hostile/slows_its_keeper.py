# attack: renices, limits and moves the process that watches it, among many busy ones; it works all the same
# expect: passed
# says: changed []

# %% first
import os
import resource

busy = []
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        os.close(3)
        while True:
            pass
    busy.append(pid)
changed = []
tries = {
    "renice": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    "renice all": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "limit": lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)),
    "processor": lambda: os.sched_setaffinity(1, [0]),
    "idle": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
}
for name, attempt in tries.items():
    try:
        attempt()
        changed.append(name)
    except OSError:
        pass
for number in (2, 9, 19, 20):
    try:
        os.kill(1, number)
    except OSError:
        pass
print("changed", changed)
for pid in busy:
    os.kill(pid, 9)
