# attack: a segmentation fault
# expect: check_len = crashed

# %% last
Window.__len__ = lambda self: __import__("ctypes").string_at(0)
