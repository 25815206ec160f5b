# attack: a subclass, a list, a handle that looks like a tensor, values that differ from one look to the next
# expect: check_window = failed, check_len = failed, check_calls = failed

# %% last
class Sub(torch.Tensor):
    pass


class Looks:
    def __init__(self, value):
        self.value, self.shape, self.dtype, self.looks = value, value.shape, value.dtype, 0

    def __len__(self):
        self.looks += 1
        return self.looks

    def __iter__(self):
        return iter(())

    def __getitem__(self, key):
        return self.value[key]


mean = Window.mean
Window.mean = lambda self: Looks(mean(self))
Window.__len__ = lambda self: True
calculate = apply_all
apply_all = lambda *a: calculate(*a).as_subclass(Sub)
