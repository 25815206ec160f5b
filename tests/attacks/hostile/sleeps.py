# attack: waits, using no processor time
# expect: check_len = timed out

# %% last
Window.__len__ = lambda self: __import__("time").sleep(10**6)
