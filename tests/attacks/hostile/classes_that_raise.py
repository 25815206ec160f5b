# attack: graded names whose classes answer every question with an exception; names that no file can hold
# expect: all = failed

# %% last
class Meta(type):
    def __getattribute__(cls, name):
        raise SystemExit(1)

    __dir__ = __call__ = __instancecheck__ = __subclasscheck__ = __hash__ = __getattribute__


class Window(metaclass=Meta):
    pass


class Odd:
    __class__ = property(lambda self: 1 / 0)


apply_all = Odd()
globals()["\ud800"] = type("\udfff", (), {})
print("\ud800")
