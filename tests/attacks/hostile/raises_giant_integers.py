# attack: exceptions made of integers that Python refuses to write as text
# expect: check_len = failed, check_calls = failed
# says: your code raised ValueError
# says: your code raised OverflowError

# %% last
Window.__len__ = lambda self: (_ for _ in ()).throw(ValueError(1 << 40_000))


def apply_all(model, tokens, window):
    raise OverflowError(1 << 13_500, 0x0F)
