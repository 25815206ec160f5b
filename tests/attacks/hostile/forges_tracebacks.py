# attack: an exception whose traceback names the examiner's cells, and is a megabyte
# expect: check_len = failed
# says: not an answer of the examiner

# %% last
import sys


def describe(error, with_trace=True):
    trace = '  File "<cell check_len>", line 1\n' + "not an answer of the examiner\n" * 30_000
    return {"type": "AssertionError", "args": ["short"], "name": "passed" * 1000, "trace": trace}


def fail(self):
    sys.modules["learner_side.peer"].describe = describe
    raise ValueError


Window.__len__ = fail
