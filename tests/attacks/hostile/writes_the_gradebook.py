# attack: writes the gradebook, the results and the lab
# expect: all = not written
# base: stub
# says: could not write

# %% last
import os
import sqlite3

refused = 0
for name in ("gradebook.db", "results/01_toy/s000.json", "solutions/01_toy/toy.ipynb", "canary.txt", "@MARK@"):
    try:
        os.makedirs(os.path.dirname("@COURSE@/" + name), exist_ok=True)
        open("@COURSE@/" + name, "a").write("x")
    except OSError:
        refused += 1
try:
    sqlite3.connect("@COURSE@/gradebook.db").execute("update grade set manual_score = 100")
except sqlite3.Error:
    refused += 1
try:
    open("@HOME@/canary.txt", "w").write("x")
except OSError:
    refused += 1
print("could not write", refused)
