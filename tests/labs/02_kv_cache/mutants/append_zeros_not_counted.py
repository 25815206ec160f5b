# fault: tokens whose keys are 0 are not counted.
# fails: check_append

# %% nbgrader={"grade_id": "KVCache"}
class KVCache:
    def __init__(self, num_kv_heads, head_dim, max_len):
        self.kv, self.m = torch.zeros(2, max_len, num_kv_heads, head_dim), max_len

    def append(self, k, v):
        n = len(self)
        if n + len(k) > self.m:
            raise ValueError("full")
        self.kv[0, n : n + len(k)] = k
        self.kv[1, n : n + len(k)] = v

    def view(self):
        return self.kv[0, : len(self)], self.kv[1, : len(self)]

    def __len__(self):
        return int(self.kv[0].flatten(1).any(1).sum())
