# attack: imports and executes the solutions, the engine and the grader
# expect: all = not written
# base: stub
# says: nothing to import

# %% last
import importlib
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "_NotHere"]
for path in ("@CHECKOUT@", "@COURSE@", "@COURSE@/solutions/01_toy", "/learner", "/learner/side", "."):
    sys.path.append(path)
got = []
for name in ("grader", "grader.course", "reference_impl.models", "solutions", "toy", "tests", "labs", "nbgrader"):
    try:
        got.append(importlib.import_module(name))
    except ImportError:
        pass
try:
    exec(open("@COURSE@/solutions/01_toy/toy.ipynb").read())
    got.append("solutions")
except OSError:
    pass
print(got or "nothing to import")
