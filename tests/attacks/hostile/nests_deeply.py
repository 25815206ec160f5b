# attack: code nested deeper than Python's own recursion goes, which whoever reads it must survive
# expect: passed
# base: solved

# %% last
import torch

if not torch:
    torch.@DEEP@ = 1
    setattr(torch.@DEEP@, "x", 0x@GIANT@)
    exec(torch.@DEEP@)
