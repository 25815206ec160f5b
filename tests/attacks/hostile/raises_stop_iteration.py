# attack: StopIteration and the like out of every call, to end the check's loops early
# expect: all = failed
# base: stub

# %% Window
class Window:
    def __init__(self, size):
        pass

    def append(self, x):
        raise StopIteration

    def mean(self):
        raise StopIteration

    def __len__(self):
        raise StopIteration

# %% apply_all
def apply_all(*_):
    raise StopAsyncIteration
