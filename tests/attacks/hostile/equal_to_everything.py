# attack: objects that are equal to everything, true, of every length, and say so
# expect: all = failed
# base: stub

# %% Window
class Everything:
    def __init__(self, *_):
        self.shape, self.dtype = (3,), torch.float32

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __hash__ = None

    def __bool__(self):
        return True

    def __len__(self):
        return 2

    def __getattr__(self, name):
        return self

    def __call__(self, *_, **__):
        return self

    def __getitem__(self, key):
        return self

    def __iter__(self):
        return iter(())

    def __torch_function__(self, *_):
        return True


class Window(Everything):
    def append(self, x):
        return self

    def mean(self):
        return Everything()

# %% apply_all
apply_all = Everything()
