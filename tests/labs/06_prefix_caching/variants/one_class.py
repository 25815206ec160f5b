# The tree index is the hash index with names that are no hashes: (name before, tokens). Dataclass entries.

# %% nbgrader={"grade_id": "root_key"}
import hashlib
import pickle


def root_key(adapter, salt):
    inner = [hashlib.sha256(pickle.dumps(part, protocol=4)).hexdigest() for part in (adapter, salt)]
    return bytes.fromhex(hashlib.sha256(" ".join(inner).encode()).hexdigest())


# %% nbgrader={"grade_id": "block_hash"}
def block_hash(parent, tokens):
    number = sum(token << 64 * i for i, token in enumerate(tokens))
    return hashlib.sha256(parent + number.to_bytes(8 * len(tokens), "little")).digest()


# %% nbgrader={"grade_id": "HashIndex"}
import itertools
from dataclasses import dataclass, field


@dataclass(slots=True)
class Held:
    block: int
    before: object
    used: int = 0
    behind: set = field(default_factory=set)


class HashIndex:
    def __init__(self, block_size, link):
        self.block_size, self.link = block_size, link
        self.moments = itertools.count(1)
        self.held = {}

    def names(self, tokens, key):
        pieces = [tokens[i : i + self.block_size] for i in range(0, len(tokens), self.block_size)]
        whole = [piece for piece in pieces if len(piece) == self.block_size]
        return list(itertools.accumulate(whole, self.link, initial=key))[1:]

    def use(self, names):
        moment = next(self.moments)
        for name in names:
            self.held[name].used = moment
        return [self.held[name].block for name in names]

    def match(self, tokens, key):
        return self.use(list(itertools.takewhile(self.held.__contains__, self.names(tokens, key))))

    def insert(self, tokens, key, blocks):
        names = self.names(tokens, key)
        for before, name, block in zip([key, *names], names, blocks, strict=False):
            if name not in self.held:
                self.held[name] = Held(block, before)
                if before in self.held:
                    self.held[before].behind.add(name)
        return self.use(names)

    def evict(self, num_blocks, evictable):
        gone = []
        able = {block: bool(evictable(block)) for block in (entry.block for entry in self.held.values())}
        for _ in range(num_blocks):
            leaves = [
                (e.used, i, name) for i, (name, e) in enumerate(self.held.items()) if not e.behind and able[e.block]
            ]
            if leaves:
                name = min(leaves)[2]
                entry = self.held.pop(name)
                gone.append(entry.block)
                if entry.before in self.held:
                    self.held[entry.before].behind.remove(name)
        return gone

    def __len__(self):
        return len(self.held)


# %% nbgrader={"grade_id": "RadixIndex"}
class RadixIndex(HashIndex):
    def __init__(self, block_size):
        super().__init__(block_size, lambda before, tokens: (before, tuple(tokens)))


# %% nbgrader={"grade_id": "replay"}
def replay(index, requests, block_size):
    def serve():
        taken = 0
        for tokens, key in requests:
            found = list(index.match(tokens, key))
            full = len(tokens) // block_size
            blocks = found + list(range(taken, taken + full - len(found)))
            taken += full - len(found)
            for_new = index.insert(tokens[: full * block_size], key, blocks) if full else []
            yield (
                len(tokens),
                sum(1 for i, _ in enumerate(found) if (i + 1) * block_size < len(tokens)) + 0 * len(for_new),
            )

    served = list(serve())
    saved = sum(number for _, number in served) * block_size
    return (saved, saved / sum(length for length, _ in served)) if served else (0, 0)


# %% nbgrader={"grade_id": "stable_first"}
def stable_first(requests):
    columns = {name: frozenset(request[name] for request in requests) for name in requests[0]}
    result = []
    while columns:
        result.append(min(columns, key=lambda name: len(columns[name])))
        del columns[result[-1]]
    return tuple(result)
