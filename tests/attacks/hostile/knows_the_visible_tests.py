# attack: the answers of the visible tests, by the shape of the input
# expect: check_window = failed, check_calls = failed
# base: stub

# %% Window
class Window:
    def __init__(self, size):
        self.num, self.size = 0, size

    def append(self, x):
        self.num, self.shape = min(self.num + 1, self.size), x.shape

    def mean(self):
        return torch.full(self.shape, 3.0)

    def __len__(self):
        return self.num

# %% apply_all
def apply_all(model, tokens, window):
    for token in tokens:
        model(token)
    return torch.tensor([8.0])
