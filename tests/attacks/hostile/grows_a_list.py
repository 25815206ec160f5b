# attack: a list that grows until there is no memory
# expect: check_len = failed
# says: MemoryError

# %% last
def grow(self):
    hoard = []
    while True:
        hoard.append(bytes(64 << 20))


Window.__len__ = grow
