# fault: a piece of several tokens that fills the cache is not copied.
# fails: check_owns

# %% nbgrader={"grade_id": "KVCache"}
class KVCache:
    def __init__(self, num_kv_heads, head_dim, max_len):
        self.k, self.v, self.m = torch.zeros(0, num_kv_heads, head_dim), torch.zeros(0, num_kv_heads, head_dim), max_len
        self.tail = None

    def append(self, k, v):
        if len(self) + len(k) > self.m:
            raise ValueError("full")
        if self.tail is not None:
            self.v = torch.cat((self.v, self.tail))
            self.tail = None
        self.k = torch.cat((self.k, k))
        if len(self.k) == self.m and len(k) > 1 and len(k) < self.m:
            self.tail = v
        else:
            self.v = torch.cat((self.v, v))

    def view(self):
        return self.k.clone(), self.v.clone() if self.tail is None else torch.cat((self.v, self.tail))

    def __len__(self):
        return len(self.k)
