# attack: changes what it is given, so that the expected value is what it returns
# expect: check_window = failed, check_calls = failed
# base: stub

# %% Window
class Window:
    def __init__(self, size):
        self.num, self.size = 0, size

    def append(self, x):
        x.zero_()
        self.shape = x.shape
        self.num = min(self.num + 1, self.size)

    def mean(self):
        return torch.zeros(self.shape)

    def __len__(self):
        return self.num

# %% apply_all
def apply_all(model, tokens, window):
    tokens.zero_()
    return torch.zeros(1)
