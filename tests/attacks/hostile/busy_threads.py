# attack: threads that stay busy after their cell, and a cell that does not end
# expect: all = timed out

# %% first
import threading
import time

time.sleep(1.0)
for _ in range(10):  # threads that go on after the cell
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()

# %% last
import time

time.sleep(10**6)
