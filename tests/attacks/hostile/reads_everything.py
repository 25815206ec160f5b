# attack: reads every file there is, environments and command lines included, and prints what holds a secret
# expect: all = not written
# base: stub
# says: opened

# %% last
import os
import re

opened, found = 0, set()
for top in ("/tmp", "/dev", "/etc", "/root", "/home", "/work", "/mnt", "/opt", "/run", "/srv", "/var", "/learner/side",
            "/proc", "/sys", "@HOME@", "@COURSE@", "/usr/local/bin", "/usr/local/etc", "/usr/src"):  # fmt: skip
    for folder, folders, files in os.walk(top):
        if folder.count("/") > 6 or "/task/" in folder:
            folders.clear()
        for name in files:
            path = os.path.join(folder, name)
            if name.endswith((".ipynb", "gradebook.db", "course_secret.json")) or "solutions" in path:
                found.add(path)
            try:
                if not os.path.isfile(path) or os.path.getsize(path) > 1 << 20:
                    continue
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                data = os.read(fd, 1 << 20)
                os.close(fd)
            except OSError:
                continue
            opened += 1
            found.update(m.decode() for m in re.findall(rb"CANARY-[0-9a-f]{16}", data))
for path in ("/proc/1/root", "/proc/1/cwd", "/proc/1/environ", "/proc/1/mem", "/proc/1/fd", "/proc/kcore", "/dev/mem"):
    try:
        found.add(f"{path}: {os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(10)}")
    except OSError:
        pass
print("opened", opened, "found", sorted(found))
