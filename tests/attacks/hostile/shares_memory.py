# attack: a result that it goes on writing to; it works all the same
# expect: passed

# %% last
import threading

mean, given = Window.mean, []


def shared(self):
    given.append(mean(self))
    return given[-1]


def spoil():
    while True:
        for tensor in given[:-1]:
            tensor.fill_(9)


Window.mean = shared
threading.Thread(target=spoil, daemon=True).start()
