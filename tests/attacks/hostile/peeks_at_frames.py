# attack: looks for the hidden tests in its own process: In, frames, objects, sources, memory
# expect: all = not written
# base: stub
# says: looked at

# %% last
import gc
import linecache
import sys

wanted = "{ yb ffo si naem eht srotcev modnar no"[::-1]  # of a hidden test
seen, found = 0, []
for name in ("In", "_ih", "Out", "_i", "get_ipython", "reference"):
    if name in globals():
        found.append(name)
frame = sys._getframe()
while frame:
    seen += 1
    found += [k for k, v in {**frame.f_locals, **frame.f_globals}.items() if isinstance(v, str) and wanted in v and k != "wanted"]
    frame = frame.f_back
for thing in gc.get_objects():
    seen += 1
    if isinstance(thing, dict):
        found += ["object" for v in list(thing.values()) if isinstance(v, str) and wanted in v and v is not wanted]
for lines in linecache.cache.values():
    found += [line for line in (lines[2] if len(lines) > 2 else ()) if wanted in line]
try:
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
        for line in maps:
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            if "rw" in line and last - first < 64 << 20:
                try:
                    memory.seek(first)
                    data = memory.read(last - first)
                except (OSError, ValueError):
                    continue
                seen += 1
                at = data.find(b"CANARY-" + b"")
                while at >= 0:
                    text = data[at : at + 23]
                    if text[7:].isalnum():
                        found.append(text.decode("ascii", "replace"))
                    at = data.find(b"CANARY-", at + 1)
except FileNotFoundError:  # there is no /proc
    pass
print("looked at", seen, "found", found)
