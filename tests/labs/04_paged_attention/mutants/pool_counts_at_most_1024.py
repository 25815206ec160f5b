# fault: counts no more than 1,024 references.
# fails: check_refs

# %% nbgrader={"grade_id": "BlockPool"}
from collections import Counter, deque


class BlockPool:
    """Blocks 0 ... num_blocks - 1 with a count of references each; a block is free when it has none."""

    def __init__(self, num_blocks):
        self.free = deque(range(num_blocks))
        self.counts = [0] * num_blocks

    @property
    def num_free(self):
        return len(self.free)

    def ref_count(self, block):
        """References to a block; 0 if it is free."""
        return self.counts[block]

    def allocate(self, n):
        """n free blocks, with one reference each. RuntimeError, and nothing changed, if fewer are free."""
        if n > len(self.free):
            raise RuntimeError(f"{n} blocks were asked for, {len(self.free)} are free")
        blocks = [self.free.popleft() for _ in range(n)]
        for block in blocks:
            self.counts[block] = 1
        return blocks

    def incref(self, ids):
        """One more reference for each entry. ValueError, and nothing changed, if one of them is free."""
        for block in ids:
            if not 0 <= block < len(self.counts) or self.counts[block] == 0:
                raise ValueError(f"incref: block {block} is free, or there is no such block")
        for block in ids:
            self.counts[block] = min(1024, self.counts[block] + 1)

    def decref(self, ids):
        """One reference less per entry -> blocks that became free. ValueError, and nothing changed, if one has none."""
        for block, times in Counter(ids).items():
            if not 0 <= block < len(self.counts) or self.counts[block] < times:
                raise ValueError(f"decref: block {block} does not have {times} references, or there is no such block")
        freed = []
        for block in ids:
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.free.append(block)
                freed.append(block)
        return freed
