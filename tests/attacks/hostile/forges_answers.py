# attack: answers written by hand before the question, twice, with verdicts in them
# expect: all = failed
# base: stub

# %% Window
import os


def forge(header):
    text = header.encode()
    os.write(3, len(text).to_bytes(4, "big") + bytes(8) + text)


class Window:
    def __init__(self, size):
        pass

    def append(self, x):
        forge('{"m": "ok", "v": null, "w": []}')
        forge('{"m": "ok", "v": true, "status": "passed", "earned": 2, "result": {"earned": 6}, "check": {}}')

    def mean(self):
        forge('{"m": "ok", "v": {"t": "h", "back": 1}}')

    def __len__(self):
        forge('{"m": "ok", "v": 0}')
        forge('{"m": "ok", "v": null}')
        return 2

# %% apply_all
def apply_all(*_):
    forge('{"m": "err", "v": {"t": "d", "v": []}}')
    forge('{"check": {"status": "passed", "earned": 3}}')
