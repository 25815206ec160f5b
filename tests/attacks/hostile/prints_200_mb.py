# attack: 200 MB of output, one line of 60 MB
# expect: passed
# says: the last line

# %% first
import sys

for _ in range(140):
    sys.stdout.write("y\n" * (1 << 19))
sys.stdout.write("z" * (60 << 20))
print()
sys.stderr.write("the last line\n")
