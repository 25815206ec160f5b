# attack: results of many GiB: as they are, expanded from one number, and again and again
# expect: check_window = failed, check_len = failed, check_calls = failed

# %% last
Window.mean = lambda self: torch.zeros(1).expand(1 << 40)
Window.__len__ = lambda self: 1 << 80
apply_all = lambda *_: [torch.zeros(200 << 20, dtype=torch.uint8), torch.zeros(200 << 20, dtype=torch.uint8)]
