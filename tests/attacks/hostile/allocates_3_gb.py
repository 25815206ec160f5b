# attack: a tensor of 3 GB
# expect: check_len = failed
# says: RuntimeError

# %% last
Window.__len__ = lambda self: len(torch.ones(3 << 30, dtype=torch.uint8))
