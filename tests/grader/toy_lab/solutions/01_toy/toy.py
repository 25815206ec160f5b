# %% [markdown] nbgrader={"grade_id": "intro"}
# # A toy lab
#
# **Trap (window):** the mean is over the last `window` values, not over all of them.

# %% nbgrader={"grade_id": "imports"} inferlab={"where": "both"}
import torch


# %% nbgrader={"grade_id": "Window", "solution": true}
class Window:
    """Keeps the last `size` vectors. append(x [dim]) adds one; mean() -> [dim]; len() is how many are kept."""

    def __init__(self, size: int):
        ### BEGIN SOLUTION
        self.size = size
        self.rows = []
        ### END SOLUTION

    def append(self, x):
        ### BEGIN SOLUTION
        self.rows = [*self.rows, x.clone()][-self.size :]
        ### END SOLUTION

    def mean(self):
        ### BEGIN SOLUTION
        return torch.stack(self.rows).mean(0)
        ### END SOLUTION

    def __len__(self):
        ### BEGIN SOLUTION
        return len(self.rows)
        ### END SOLUTION


# %% nbgrader={"grade_id": "check_window", "grade": true, "points": 2}
# property: the mean is over the last `size` vectors only.
# hint: what happens to the first vector when a third one arrives
#   in a window of two?
w = Window(2)
for value in (1.0, 2.0, 4.0):
    w.append(torch.full((3,), value))
print(f"after 1, 2, 4 in a window of 2 the mean is {w.mean()[0]:.2f}")
assert torch.equal(w.mean(), torch.full((3,), 3.0)), f"expected a mean of 3, saw {w.mean()}"
### BEGIN HIDDEN TESTS
from grader.checks import rng

x = torch.randn(20, 4, generator=rng("check_window"))
w = Window(5)
for row in x:
    w.append(row)
assert torch.allclose(w.mean(), x[-5:].mean(0)), (
    f"on random vectors the mean is off by {(w.mean() - x[-5:].mean(0)).abs().max()}"
)
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "check_len", "grade": true, "points": 1}
# property: len() is the number of vectors kept.
# hint: it never exceeds the size of the window.
w = Window(2)
assert len(w) == 0, f"an empty window has length 0, saw {len(w)}"
for _ in range(5):
    w.append(torch.zeros(1))
assert len(w) == 2, f"a full window of 2 has length 2, saw {len(w)}"


# %% nbgrader={"grade_id": "counter"}
class Model:
    """A model of the examiner that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, tokens):
        self.calls += 1
        return tokens.float() * 2


# %% nbgrader={"grade_id": "apply_all", "solution": true}
def apply_all(model, tokens, window):
    """Calls model(tokens[i : i + 1]) once per token [n]; returns the mean of the last results, by `window`."""
    ### BEGIN SOLUTION
    for i in range(tokens.shape[0]):
        window.append(model(tokens[i : i + 1]))
    return window.mean()
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_calls", "grade": true, "points": 3}
# property: the model is called once per token.
# hint: count the calls: one token, one call.
model = Model()
window = Window(3)
out = apply_all(model, torch.arange(5), window)
print(f"{model.calls} calls for 5 tokens")
assert model.calls == 5, f"expected 5 calls for 5 tokens, saw {model.calls}"
### BEGIN HIDDEN TESTS
model = Model()
out = apply_all(model, torch.arange(7), reference.Window(2))
assert torch.equal(out, torch.tensor([11.0])), f"with a correct window the result is 11, saw {out}"
### END HIDDEN TESTS
