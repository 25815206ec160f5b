# attack: exceptions whose text, arguments and class raise, exit or never end when they are asked
# expect: check_len = failed, check_calls = failed
# says: your code raised Silent

# %% last
class Silent(Exception):
    args = property(lambda self: __import__("os").abort() if 0 else iter(int, 1))

    def __str__(self):
        raise SystemExit(1)

    __repr__ = __str__


class Meta(type):
    def __getattribute__(cls, name):
        raise GeneratorExit


class Nameless(BaseException, metaclass=Meta):
    pass


def raises(error):
    raise error


Window.__len__ = lambda self: raises(Silent())


def apply_all(model, tokens, window):
    raise SyntaxError("x", ("<cell x>", 10**30, "a", "b")) from Nameless()
