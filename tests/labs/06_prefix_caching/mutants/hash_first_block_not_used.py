# fault: a match does not use the first of several blocks.
# fails: check_hash_lru

# %% nbgrader={"grade_id": "HashIndex"}
class HashIndex:
    def __init__(self, block_size, link):
        self.size, self.link = block_size, link
        self.block, self.parent, self.used, self.now = {}, {}, {}, 0

    def names(self, tokens, key):
        name = key
        for i in range(0, len(tokens) - self.size + 1, self.size):
            name, before = self.link(name, tokens[i : i + self.size]), name
            yield name, before

    def match(self, tokens, key):
        self.now += 1
        found = []
        for name, _ in self.names(tokens, key):
            if name not in self.block:
                break
            if found or len(tokens) < 2 * self.size:
                self.used[name] = self.now
            found.append(self.block[name])
        return found

    def insert(self, tokens, key, blocks):
        self.now += 1
        standing = []
        for block, (name, before) in zip(blocks, self.names(tokens, key), strict=False):
            if name not in self.block:
                self.block[name], self.parent[name] = block, before
            self.used[name] = self.now
            standing.append(self.block[name])
        return standing

    def evict(self, num_blocks, evictable):
        gone = []
        while len(gone) < num_blocks:
            inner = set(self.parent.values())
            leaves = [n for n in self.block if n not in inner and evictable(self.block[n])]
            if not leaves:
                break
            name = min(leaves, key=self.used.get)
            gone.append(self.block.pop(name))
            del self.parent[name], self.used[name]
        return gone

    def __len__(self):
        return len(self.block)
