# attack: all of /tmp and /dev/shm, in bytes and in files; it works all the same
# expect: passed
# says: No space left on device

# %% first
import os

for folder in ("/tmp", "/dev/shm"):
    try:
        with open(f"{folder}/@MARK@", "wb") as file:
            for _ in range(1000):
                file.write(bytes(1 << 20))
    except OSError as error:
        print(folder, error)
    os.truncate(f"{folder}/@MARK@", 0)
    try:
        for number in range(100_000):
            open(f"{folder}/@MARK@-{number}", "wb").close()
    except OSError as error:
        print(folder, number, error)
