# attack: bytes that are no message: a header of 4 GiB, a number of 100,000 digits, depth, a chunk of many GiB
# expect: all = crashed
# says: sent what is not an answer

# %% last
import os


def raw(data):
    def send(*_):
        os.write(3, data)

    return send


def message(text, count=0):
    return len(text).to_bytes(4, "big") + count.to_bytes(4, "big") + bytes(4) + text


Window.mean = raw(b"\xff" * 12)
Window.__len__ = raw(message(b'{"m": "ok", "v": ' + b"9" * 100_000 + b"}"))
apply_all = raw(message(b'{"m": "ok"}', 1) + b"\xff" * 8)
