# Heaps for the oldest leaf, one tree node per block, JSON and struct for bytes.

# %% nbgrader={"grade_id": "root_key"}
import hashlib
import json


def root_key(adapter, salt):
    return hashlib.sha256(json.dumps([adapter, salt]).encode()).digest()


# %% nbgrader={"grade_id": "block_hash"}
import struct


def block_hash(parent, tokens):
    return hashlib.sha256(struct.pack(f"<{len(parent)}s{len(tokens)}Q", parent, *tokens)).digest()


# %% nbgrader={"grade_id": "HashIndex"}
import heapq


class HashIndex:
    def __init__(self, block_size, link):
        self.size, self.link, self.clock = block_size, link, 0
        self.entries = {}  # name -> [block, parent, last used, number of children]
        self.heap = []  # (last used, name) of what is or was a leaf

    def match(self, tokens, key):
        self.clock += 1
        name, blocks = key, []
        while len(tokens) >= self.size * (len(blocks) + 1):
            name = self.link(name, tokens[self.size * len(blocks) : self.size * (len(blocks) + 1)])
            if name not in self.entries:
                break
            self._use(name)
            blocks.append(self.entries[name][0])
        return blocks

    def insert(self, tokens, key, blocks):
        self.clock += 1
        name, standing = key, []
        for i, block in enumerate(blocks):
            parent, name = name, self.link(name, tokens[self.size * i : self.size * (i + 1)])
            if name not in self.entries:
                self.entries[name] = [block, parent, 0, 0]
                if parent in self.entries:
                    self.entries[parent][3] += 1
            self._use(name)
            standing.append(self.entries[name][0])
        return standing

    def evict(self, num_blocks, evictable):
        gone, kept = [], []
        while len(gone) < num_blocks and self.heap:
            last_used, name = heapq.heappop(self.heap)
            if name not in self.entries or self.entries[name][2:] != [last_used, 0]:
                continue  # of an earlier moment
            block, parent = self.entries[name][:2]
            if not evictable(block):
                kept.append((last_used, name))
                continue
            gone.append(block)
            del self.entries[name]
            if parent in self.entries:
                self.entries[parent][3] -= 1
                if self.entries[parent][3] == 0:
                    heapq.heappush(self.heap, (self.entries[parent][2], parent))
        for item in kept:
            heapq.heappush(self.heap, item)
        return gone

    def __len__(self):
        return len(self.entries)

    def _use(self, name):
        self.entries[name][2] = self.clock
        heapq.heappush(self.heap, (self.clock, name))


# %% nbgrader={"grade_id": "RadixIndex"}
import itertools


class BlockNode:
    def __init__(self, block, parent, tokens):
        self.block, self.parent, self.tokens = block, parent, tokens
        self.children = {}
        self.moment = 0


class RadixIndex:
    def __init__(self, block_size):
        self.size = block_size
        self.trees = {}
        self.clock = itertools.count()
        self.count = 0
        self.leaves = []

    def _walk(self, tokens, key, blocks):
        node, now = self.trees.setdefault(key, BlockNode(None, None, None)), next(self.clock)
        for start in range(0, len(tokens) // self.size * self.size, self.size):
            step = tuple(tokens[start : start + self.size])
            if step not in node.children:
                if blocks is None:
                    return
                node.children[step] = BlockNode(blocks[start // self.size], node, step)
                self.count += 1
            node = node.children[step]
            node.moment = now
            heapq.heappush(self.leaves, (now, start, id(node), node))
            yield node.block

    def match(self, tokens, key):
        return list(self._walk(tokens, key, None))

    def insert(self, tokens, key, blocks):
        return list(self._walk(tokens, key, blocks))

    def evict(self, num_blocks, evictable):
        gone, kept = [], []
        while len(gone) < num_blocks and self.leaves:
            item = heapq.heappop(self.leaves)
            moment, start, _, node = item
            if node.parent is None or node.children or node.moment != moment:
                continue
            if not evictable(node.block):
                kept.append(item)
                continue
            gone.append(node.block)
            self.count -= 1
            above, node.parent = node.parent, None
            del above.children[node.tokens]
            heapq.heappush(self.leaves, (above.moment, start - self.size, id(above), above))
        for item in kept:
            heapq.heappush(self.leaves, item)
        return gone

    def __len__(self):
        return self.count


# %% nbgrader={"grade_id": "stable_first"}
def stable_first(requests):
    names = list(requests[0])
    numbers = [len({request[name] for request in requests}) for name in names]
    return [names[i] for _, i in sorted(zip(numbers, range(len(names)), strict=True))]
