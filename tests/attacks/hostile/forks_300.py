# attack: 300 processes that stay; it works all the same
# expect: passed
# says: processes

# %% first
import os
import time

number = 0
try:
    while number < 300:
        if os.fork() == 0:
            while True:
                time.sleep(60)
        number += 1
except OSError as error:
    print(number, "processes", error)
