# fault: asked for more blocks than it has, a pool loses one.
# fails: check_too_many

# %% nbgrader={"grade_id": "BlockPool"}
from collections import Counter


class BlockPool:
    def __init__(self, num_blocks):
        self.counts = [0] * num_blocks
        self.free = list(range(num_blocks))

    @property
    def num_free(self):
        return len(self.free)

    def ref_count(self, block):
        return self.counts[block]

    def allocate(self, n):
        if n > len(self.free):
            if n > len(self.counts):
                self.free = self.free[1:]
            raise RuntimeError("too few")
        taken = [self.free.pop() for _ in range(n)]
        for b in taken:
            self.counts[b] = 1
        return taken

    def incref(self, ids):
        for b in ids:
            if not 0 <= b < len(self.counts) or self.counts[b] == 0:
                raise ValueError("free")
        for b in ids:
            self.counts[b] += 1

    def decref(self, ids):
        for b, n in Counter(ids).items():
            if not 0 <= b < len(self.counts) or self.counts[b] < n:
                raise ValueError("free")
        freed = []
        for b in ids:
            self.counts[b] -= 1
            if self.counts[b] == 0:
                freed.append(b)
        self.free += freed
        return freed
