# fault: a full buffer begins again at slot 0, like a ring.
# fails: check_full

# %% nbgrader={"grade_id": "KVCache"}
import torch


class KVCache:
    """Keys and values of one sequence in one layer: a preallocated buffer and a length.

    max_len: most tokens it can hold. All tensors are float32, [tokens, num_kv_heads, head_dim].
    """

    def __init__(self, num_kv_heads, head_dim, max_len):
        self.keys = torch.empty(max_len, num_kv_heads, head_dim)
        self.values = torch.empty(max_len, num_kv_heads, head_dim)
        self.length = 0

    def append(self, k, v):
        """Adds k and v [num_new, num_kv_heads, head_dim]. ValueError if they do not fit; then nothing changes."""
        end = self.length + len(k)
        slots = torch.arange(self.length, end) % len(self.keys)
        self.keys[slots] = k
        self.values[slots] = v
        self.length = min(end, len(self.keys))

    def view(self):
        """(keys, values), each [len(self), num_kv_heads, head_dim]."""
        return self.keys[: self.length], self.values[: self.length]

    def __len__(self):
        return self.length
