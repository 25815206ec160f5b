# fault: keeps the caller's tensors instead of copies.
# trap: borrowed memory
# fails: check_owns

# %% nbgrader={"grade_id": "KVCache"}
import torch


class KVCache:
    """Keys and values of one sequence in one layer: a preallocated buffer and a length.

    max_len: most tokens it can hold. All tensors are float32, [tokens, num_kv_heads, head_dim].
    """

    def __init__(self, num_kv_heads, head_dim, max_len):
        self.keys, self.values = [], []
        self.shape, self.max_len = (0, num_kv_heads, head_dim), max_len
        self.length = 0

    def append(self, k, v):
        """Adds k and v [num_new, num_kv_heads, head_dim]. ValueError if they do not fit; then nothing changes."""
        end = self.length + len(k)
        if end > self.max_len:
            raise ValueError(f"{len(k)} more tokens do not fit: {self.length} of {self.max_len} slots are used")
        self.keys.append(k)
        self.values.append(v)
        self.length = end

    def view(self):
        """(keys, values), each [len(self), num_kv_heads, head_dim]."""
        empty = torch.empty(self.shape)
        return torch.cat([empty, *self.keys]), torch.cat([empty, *self.values])

    def __len__(self):
        return self.length
