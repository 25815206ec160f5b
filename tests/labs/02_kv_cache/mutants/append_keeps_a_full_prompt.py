# fault: tokens that fill all slots at once are kept by reference.
# fails: check_owns

# %% nbgrader={"grade_id": "KVCache"}
class KVCache:
    def __init__(self, num_kv_heads, head_dim, max_len):
        self.k, self.v, self.n, self.m = (
            torch.zeros(max_len, num_kv_heads, head_dim),
            torch.zeros(max_len, num_kv_heads, head_dim),
            0,
            max_len,
        )

    def append(self, k, v):
        if self.n + len(k) > self.m:
            raise ValueError("full")
        if len(k) == self.m:
            self.k, self.v = k, v
        else:
            self.k[self.n : self.n + len(k)] = k
            self.v[self.n : self.n + len(k)] = v
        self.n += len(k)

    def view(self):
        return self.k[: self.n], self.v[: self.n]

    def __len__(self):
        return self.n
