# fault: after a refused decref the next one is refused too.
# fails: check_refused

# %% nbgrader={"grade_id": "BlockPool"}
from collections import Counter


class BlockPool:
    def __init__(self, num_blocks):
        self.counts, self.busy = [0] * num_blocks, False
        self.free = list(range(num_blocks))

    @property
    def num_free(self):
        return len(self.free)

    def ref_count(self, block):
        return self.counts[block]

    def allocate(self, n):
        if n > len(self.free):
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
        if self.busy:
            self.busy = False
            raise ValueError("busy")
        self.busy = True
        for b, n in Counter(ids).items():
            if not 0 <= b < len(self.counts) or self.counts[b] < n:
                raise ValueError("free")
        freed = []
        for b in ids:
            self.counts[b] -= 1
            if self.counts[b] == 0:
                freed.append(b)
        self.busy = False
        self.free += freed
        return freed
