# No tree and no chain of its own: a dict from whole prefixes to blocks, in order of use; the hashes are only its keys.

# %% nbgrader={"grade_id": "root_key"}
import hashlib


def root_key(adapter, salt):
    return hashlib.sha256(repr((adapter, salt)).encode("utf-8")).digest()


# %% nbgrader={"grade_id": "block_hash"}
import numpy


def block_hash(parent, tokens):
    digest = hashlib.sha256(parent)
    digest.update(numpy.array(tokens, dtype="<i8").tobytes())
    return digest.digest()


# %% nbgrader={"grade_id": "HashIndex"}
class HashIndex:
    def __init__(self, block_size, link):
        self.block_size = block_size
        self.link = link
        self.known = {}  # tuple of the names on the way -> block, the oldest first and of one call the deepest

    def match(self, tokens, key):
        found, path = [], ()
        for start in range(0, len(tokens), self.block_size):
            block_tokens = tokens[start : start + self.block_size]
            if len(block_tokens) < self.block_size:
                break
            path = (*path, self.link(path[-1] if path else key, block_tokens))
            if path not in self.known:
                path = path[:-1]
                break
            found.append(self.known[path])
        self._to_the_end(path)
        return found

    def insert(self, tokens, key, blocks):
        path, standing = (), []
        for i, block in enumerate(blocks):
            start = i * self.block_size
            path = (*path, self.link(path[-1] if path else key, tokens[start : start + self.block_size]))
            standing.append(self.known.setdefault(path, block))
        self._to_the_end(path)
        return standing

    def evict(self, num_blocks, evictable):
        gone = []
        for path, block in list(self.known.items()):
            if len(gone) < num_blocks and evictable(block):
                if any(other[: len(path)] == path and other != path for other in self.known):
                    continue  # what continues it is in use
                gone.append(self.known.pop(path))
        return gone

    def __len__(self):
        return len(self.known)

    def _to_the_end(self, path):
        for length in range(len(path), 0, -1):
            self.known[path[:length]] = self.known.pop(path[:length])


# %% nbgrader={"grade_id": "RadixIndex"}
class RadixIndex:
    def __init__(self, block_size):
        self.block_size = block_size
        self.blocks = {}  # (key, prefix) -> block
        self.moments = {}
        self.calls = 0

    def match(self, tokens, key):
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        places = [(key, tuple(tokens[:end])) for end in ends]
        while places and places[-1] not in self.blocks:
            places.pop()
        return self.use(places)

    def insert(self, tokens, key, blocks):
        places = [(key, tuple(tokens[: (i + 1) * self.block_size])) for i in range(len(blocks))]
        for place, block in zip(places, blocks, strict=True):
            if place not in self.blocks:
                self.blocks[place] = block
        return self.use(places)

    def use(self, places):
        self.calls += 1
        for place in places:
            self.moments[place] = self.calls
        return [self.blocks[place] for place in places]

    def evict(self, num_blocks, evictable):
        gone = []
        for _ in range(num_blocks):
            parents = {(key, prefix[: -self.block_size]) for key, prefix in self.blocks}
            can_go = [(self.moments[p], p) for p in self.blocks if p not in parents and evictable(self.blocks[p])]
            if can_go:
                gone.append(self.blocks.pop(min(can_go)[1]))
        return gone

    def __len__(self):
        return len(self.blocks)


# %% nbgrader={"grade_id": "replay"}
def replay(index, requests, block_size):
    saved, taken = 0, 0
    for tokens, key in requests:
        blocks = list(index.match(tokens, key))
        found = len(blocks) * block_size
        saved += found - block_size if found == len(tokens) else found
        while (len(blocks) + 1) * block_size <= len(tokens):
            blocks.append(taken)
            taken += 1
        index.insert(tokens[: len(blocks) * block_size], key, blocks)
    return saved, saved / max(1, sum(len(tokens) for tokens, _ in requests))


# %% nbgrader={"grade_id": "stable_first"}
def stable_first(requests):
    order = []
    for number in range(1, len(requests) + 1):
        for name in requests[0]:
            if len({request[name] for request in requests}) == number:
                order.append(name)
    return order
