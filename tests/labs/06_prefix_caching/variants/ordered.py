# OrderedDict in order of use, links remembered between calls, the tree as nested dicts walked by recursion; tuples.

# %% nbgrader={"grade_id": "root_key"}
import hashlib


def root_key(adapter, salt):
    return hashlib.sha256(ascii([adapter, salt]).encode("ascii")).digest()


# %% nbgrader={"grade_id": "block_hash"}
import array
import sys


def block_hash(parent, tokens):
    ids = array.array("Q", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(bytes(parent) + ids.tobytes()).digest()


# %% nbgrader={"grade_id": "HashIndex"}
import collections
import functools


class HashIndex:
    __slots__ = ("block_size", "entries", "link")

    def __init__(self, block_size, link):
        self.block_size = block_size
        self.link = functools.lru_cache(maxsize=1000)(lambda parent, tokens: link(parent, list(tokens)))
        self.entries = collections.OrderedDict()  # name -> (block, name before or None); the least recently used first

    def _chain(self, tokens, key):
        starts = range(0, len(tokens) // self.block_size * self.block_size, self.block_size)
        pieces = (tuple(tokens[start : start + self.block_size]) for start in starts)
        name = key
        for piece in pieces:
            name = self.link(name, piece)
            yield name

    def _touch(self, names):
        for name in reversed(names):
            self.entries.move_to_end(name)

    def match(self, tokens, key):
        names = []
        for name in self._chain(tokens, key):
            if name not in self.entries:
                break
            names.append(name)
        self._touch(names)
        return tuple(self.entries[name][0] for name in names)

    def insert(self, tokens, key, blocks):
        names = list(self._chain(tokens, key))
        for before, name, block in zip([None, *names], names, blocks, strict=False):
            self.entries.setdefault(name, (block, before))
        self._touch(names)
        return tuple(self.entries[name][0] for name in names)

    def evict(self, num_blocks, evictable):
        gone = ()
        while len(gone) < num_blocks:
            inner = {before for _, before in self.entries.values()}
            able = (name for name, (block, _) in self.entries.items() if name not in inner and evictable(block))
            name = next(able, None)
            if name is None:
                return gone
            gone += (self.entries.pop(name)[0],)
        return gone

    def __len__(self):
        return len(self.entries)


# %% nbgrader={"grade_id": "RadixIndex"}
class Node(dict):
    """One block: children by their tokens. Has the name of the given class and not its form."""

    block = moment = None


class RadixIndex:
    def __init__(self, block_size):
        self.block_size, self.moment, self.roots = block_size, 0, {}

    def match(self, tokens, key):
        self.moment += 1
        return tuple(self._match(self.roots.get(key, Node()), tokens))

    def _match(self, node, tokens):
        head, rest = tuple(tokens[: self.block_size]), tokens[self.block_size :]
        if len(head) < self.block_size or head not in node:
            return []
        node[head].moment = self.moment
        return [node[head].block, *self._match(node[head], rest)]

    def insert(self, tokens, key, blocks):
        self.moment += 1
        return self._insert(self.roots.setdefault(key, Node()), tokens, blocks)

    def _insert(self, node, tokens, blocks):
        if not blocks:
            return []
        head, rest = tuple(tokens[: self.block_size]), tokens[self.block_size :]
        if head not in node:
            node[head] = Node()
            node[head].block = blocks[0]
        node[head].moment = self.moment
        return [node[head].block, *self._insert(node[head], rest, blocks[1:])]

    def _leaves(self, node):
        for head, child in node.items():
            if child:
                yield from self._leaves(child)
            else:
                yield child.moment, head, node, child.block

    def evict(self, num_blocks, evictable):
        if not num_blocks:
            return []
        leaves = [leaf for root in self.roots.values() for leaf in self._leaves(root) if evictable(leaf[3])]
        if not leaves:
            return []
        _, head, above, block = min(leaves, key=lambda leaf: leaf[0])
        del above[head]
        return [block, *self.evict(num_blocks - 1, evictable)]

    def __len__(self):
        return sum(map(self._count, self.roots.values()))

    def _count(self, node):
        return sum(1 + self._count(child) for child in node.values())


# %% nbgrader={"grade_id": "replay"}
def replay(index, requests, block_size):
    numbers = iter(range(10**9))
    saved = 0
    for tokens, key in requests:
        num_full, left = divmod(len(tokens), block_size)
        found = [*index.match(tokens, key)]
        saved += block_size * (len(found) - (len(found) == num_full and not left))
        index.insert(
            tokens[: num_full * block_size], key, found + [next(numbers) for _ in range(num_full - len(found))]
        )
    return [saved, saved / (sum(len(tokens) for tokens, _ in requests) or 1)]


# %% nbgrader={"grade_id": "stable_first"}
def stable_first(requests):
    names = list(requests[0])
    for end in range(len(names), 1, -1):  # bubble sort is stable
        for i in range(end - 1):
            one, two = ({request[name] for request in requests} for name in names[i : i + 2])
            if len(one) > len(two):
                names[i], names[i + 1] = names[i + 1], names[i]
    return names
