# fault: a block that loses three references in a call with others is in the list of the freed twice.
# fails: check_refs

# %% nbgrader={"grade_id": "BlockPool"}
class BlockPool:
    def __init__(self, num_blocks):
        self.c = [0] * num_blocks

    @property
    def num_free(self):
        return self.c.count(0)

    def ref_count(self, block):
        return self.c[block]

    def allocate(self, n):
        free = [b for b, c in enumerate(self.c) if not c]
        if n > len(free):
            raise RuntimeError
        for b in free[:n]:
            self.c[b] = 1
        return free[:n]

    def incref(self, ids):
        if any(not 0 <= b < len(self.c) or not self.c[b] for b in ids):
            raise ValueError
        for b in ids:
            self.c[b] += 1

    def decref(self, ids):
        from collections import Counter

        n = Counter(ids)
        if any(not 0 <= b < len(self.c) or self.c[b] < t for b, t in n.items()):
            raise ValueError
        gone = []
        for b in ids:
            self.c[b] -= 1
            if not self.c[b]:
                gone += [b] * (2 if n[b] > 2 and len(n) > 1 else 1)
        return gone
