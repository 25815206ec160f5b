# honest: a progress bar, colours, Unicode, no line's end, a lone surrogate, bytes
# says: ärger 日本語

# %% last
import sys

length = Window.__len__


def noisy(self):
    for i in range(100):
        sys.stdout.write(f"\r{'█' * (i // 5)} {i} %")
    print("\x1b[31mred\x1b[0m ärger 日本語 🎉 \ud83d \x07 \u202e", end="")
    sys.stdout.buffer.write(b"\xff\xfe\x00")
    return length(self)


Window.__len__ = noisy
