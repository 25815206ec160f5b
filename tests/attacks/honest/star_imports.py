# honest: star imports, globals, a module's own names, many threads, a seed, deprecated functions

# %% first
from math import *

import torch
from torch.nn.functional import *

torch.set_num_threads(8)
torch.manual_seed(0)
torch.set_printoptions(precision=2)
e = pi

# %% last
import threading
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(4)
mean = Window.mean
Window.mean = lambda self: pool.submit(mean, self).result()
threading.Thread(target=lambda: print("hello from a thread"), daemon=True).start()
