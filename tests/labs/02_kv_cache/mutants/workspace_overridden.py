# fault: keeps the caller's tensors, and has a method of its own that copies.
# fails: check_owns

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
        self.pieces = [*getattr(self, "pieces", []), (k, v)]
        self.shape = (0, *k.shape[1:])
        self.length = end

    def view(self):
        """(keys, values), each [len(self), num_kv_heads, head_dim]."""
        pieces = getattr(self, "pieces", [])
        empty = self.keys[:0]
        return torch.cat([empty, *(k for k, _ in pieces)]), torch.cat([empty, *(v for _, v in pieces)])

    def append_from_workspace(self, k, v):
        self.append(k.clone(), v.clone())

    def __len__(self):
        return self.length
