# attack: the examiner's first questions are answered with exceptions
# expect: all = crashed

# %% first
import os

text = b'{"m": "err", "v": {"t": "d", "v": [["type", "ValueError"], ["args", []], ["name", "x"], ["trace", ""]]}}'
os.write(3, len(text).to_bytes(4, "big") + bytes(8) + text)
