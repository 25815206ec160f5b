# honest: a torch module, a view of its own memory, no clone, results with a gradient

# %% Window
class Window(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size, self.num = size, 0
        self.weight = torch.nn.Parameter(torch.ones(1))

    def append(self, x):
        if self.num == 0:
            self.rows = torch.empty(0, *x.shape)
        self.rows = torch.cat([self.rows, x[None]])[-self.size :]
        self.num = min(self.num + 1, self.size)

    def mean(self):
        return self.rows.mean(0) * self.weight

    def __len__(self):
        return self.num
