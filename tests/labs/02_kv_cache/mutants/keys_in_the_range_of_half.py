# fault: keys are cut to what half precision can hold.
# fails: check_append

# %% nbgrader={"grade_id": "KVCache"}
import torch


class KVCache:
    """Keys and values of one sequence in one layer: a preallocated buffer and a length.

    max_len: its capacity in tokens. All tensors are float32, [tokens, num_kv_heads, head_dim].
    """

    def __init__(self, num_kv_heads, head_dim, max_len):
        self.keys = torch.empty(max_len, num_kv_heads, head_dim)
        self.values = torch.empty(max_len, num_kv_heads, head_dim)
        self.length = 0

    def append(self, k, v):
        """Adds k and v [num_new, num_kv_heads, head_dim]. ValueError if they do not fit; then nothing changes."""
        end = self.length + len(k)
        if end > len(self.keys):
            raise ValueError(f"{len(k)} more tokens do not fit: {self.length} of {len(self.keys)} slots are used")
        self.keys[self.length : end] = k.clamp(-65504, 65504)
        self.values[self.length : end] = v
        self.length = end

    def view(self):
        """(keys, values), each [len(self), num_kv_heads, head_dim]."""
        return self.keys[: self.length], self.values[: self.length]

    def __len__(self):
        return self.length
