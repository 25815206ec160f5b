# fault: the window keeps every vector.
# trap: window
# fails: check_window, check_len

# %% nbgrader={"grade_id": "Window"}
class Window:
    def __init__(self, size):
        self.rows = []

    def append(self, x):
        self.rows.append(x)

    def mean(self):
        return torch.stack(self.rows).mean(0)

    def __len__(self):
        return len(self.rows)
