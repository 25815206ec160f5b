# honest: NumPy inside, and NumPy numbers as results

# %% Window
import numpy as np


class Window:
    def __init__(self, size):
        self.size, self.rows = size, []

    def append(self, x):
        self.rows = [*self.rows, x.numpy().copy()][-self.size :]

    def mean(self):
        return np.stack(self.rows).mean(0)

    def __len__(self):
        return int(np.int64(len(self.rows)))
