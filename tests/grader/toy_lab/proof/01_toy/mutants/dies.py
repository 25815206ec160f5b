# fault: len() ends the process.
# fails: check_len

# %% nbgrader={"grade_id": "Window"}
class Window:
    def __init__(self, size):
        self.size = size
        self.rows = []

    def append(self, x):
        self.rows = [*self.rows, x][-self.size :]

    def mean(self):
        return torch.stack(self.rows).mean(0)

    def __len__(self):
        import os

        os._exit(0)
