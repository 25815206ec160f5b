# attack: replaced comparison functions
# expect: all = failed
# base: stub

# %% first
import math
import unittest

import numpy
import torch

for module in (torch, numpy, math):
    for name in ("equal", "allclose", "isclose", "array_equal", "all", "any"):
        if hasattr(module, name):
            setattr(module, name, lambda *_, **__: True)
torch.testing.assert_close = unittest.TestCase.assertEqual = lambda *_, **__: None
for name in ("equal", "allclose", "isclose"):
    setattr(torch.Tensor, name, lambda *_, **__: True)

# %% Window
class Window:
    def __init__(self, size):
        pass

    def append(self, x):
        pass

    def mean(self):
        return 5

    def __len__(self):
        return 7

# %% apply_all
apply_all = lambda *_: 5
