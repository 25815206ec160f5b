# fault: a block of which only the first tokens agree counts as found.
# trap: partial block
# fails: check_hash_match, check_engine_hash, check_hash_evict

# %% nbgrader={"grade_id": "HashIndex"}
class HashIndex:
    """Which block holds which prefix: names of blocks in a chain. link(parent, tokens) -> name (bytes)."""

    def __init__(self, block_size, link):
        self.block_size, self.link, self.now = block_size, link, 0
        self.block = {}  # name -> block
        self.parent = {}  # name -> name of the block before it, or the key
        self.last_used = {}  # name -> moment
        self.first = {}  # name -> its first token

    def match(self, tokens, key):
        """Blocks of the longest indexed prefix of tokens; they count as used now."""
        self.now += 1
        blocks, last = [], key
        for _, name in self.chain(tokens, key):
            if name not in self.block:
                break
            last = name
            self.last_used[name] = self.now
            blocks.append(self.block[name])
        for rest in tokens[len(blocks) * self.block_size :][:1]:
            near = [name for name, parent in self.parent.items() if parent == last and self.first[name] == rest]
            blocks += [self.block[name] for name in near[:1]]
        return blocks

    def insert(self, tokens, key, blocks):
        """Index blocks for tokens; returns the blocks that stand for them from now on, used now."""
        self.now += 1
        standing = []
        for (parent, name), block in zip(self.chain(tokens, key), blocks, strict=True):
            if name not in self.block:
                self.block[name], self.parent[name] = block, parent
                self.first[name] = tokens[len(standing) * self.block_size]
            self.last_used[name] = self.now
            standing.append(self.block[name])
        return standing

    def evict(self, num_blocks, evictable):
        """Forget up to num_blocks evictable blocks, each time the least recently used leaf; returns them."""
        evicted = []
        while len(evicted) < num_blocks:
            continued = set(self.parent.values())
            leaves = [name for name in self.block if name not in continued and evictable(self.block[name])]
            if not leaves:
                break
            oldest = min(leaves, key=self.last_used.get)
            evicted.append(self.block.pop(oldest))
            del self.parent[oldest], self.last_used[oldest]
        return evicted

    def __len__(self):
        return len(self.block)

    def chain(self, tokens, key):
        """(parent's name, name) of each full block, one after another."""
        name = key
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            parent, name = name, self.link(name, tokens[start : start + self.block_size])
            yield parent, name
