# attack: a dataclass of the interfaces with a field that never ends, to be gone through in the examiner
# expect: check_len = crashed, check_calls = crashed
# says: a field of a dataclass is an object of the other process

# %% last
import inspect

from reference_impl.interfaces import SamplingParams


class Endless:
    def __iter__(self):
        return self

    def __next__(self):
        return 1


def made():
    params = SamplingParams.__new__(SamplingParams)
    for name, parameter in inspect.signature(SamplingParams).parameters.items():
        object.__setattr__(params, name, parameter.default)
    object.__setattr__(params, "stop_token_ids", Endless())
    return params


Window.__len__ = lambda self: made()


def apply_all(model, tokens, window):
    return made()
