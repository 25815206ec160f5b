# attack: an infinite loop
# expect: check_len = timed out
# says: had not finished after 2 s

# %% last
def forever(self):
    while True:
        pass


Window.__len__ = forever
