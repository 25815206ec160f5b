# attack: os._exit in a graded function
# expect: check_len = crashed
# says: ended its process

# %% last
Window.__len__ = lambda self: __import__("os")._exit(0)
