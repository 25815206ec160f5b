# honest: exceptions of its own, caught; a bare except; a finally with a return

# %% last
class TooFew(Exception):
    pass


mean = Window.mean


def careful(self):
    try:
        raise TooFew(len(self))
    except:  # noqa: E722
        pass
    try:
        return mean(self)
    finally:
        print("done")


Window.mean = careful
