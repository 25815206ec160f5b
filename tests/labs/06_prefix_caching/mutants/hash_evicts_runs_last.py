# fault: a call that evicts four or more takes what has become a leaf in it after all other leaves.
# fails: check_hash_lru

# %% nbgrader={"grade_id": "HashIndex"}
# recursion, tuple results, node objects with children sets; heap with lazy deletion
import heapq
import itertools


class HashIndex:
    class Entry:
        def __init__(self, block, up):
            self.block, self.up, self.kids, self.when = block, up, 0, -1

    def __init__(self, block_size, link):
        self.b, self.link, self.entries, self.clock = block_size, link, {}, itertools.count()

    def __len__(self):
        return len(self.entries)

    def match(self, tokens, key):
        now = next(self.clock)

        def go(start, name):
            if start + self.b > len(tokens):
                return ()
            name = self.link(name, list(tokens[start : start + self.b]))
            try:
                e = self.entries[name]
            except KeyError:
                return ()
            e.when = now
            return (e.block, *go(start + self.b, name))

        return go(0, key)

    def insert(self, tokens, key, blocks):
        now, up, name, out = next(self.clock), None, key, []
        for i, block in enumerate(blocks):
            name = self.link(name, tuple(tokens[i * self.b :][: self.b]))
            if name not in self.entries:
                self.entries[name] = self.Entry(block, up)
                if up is not None:
                    self.entries[up].kids += 1
            self.entries[name].when = now
            out.append(self.entries[name].block)
            up = name
        return tuple(out)

    def evict(self, num_blocks, evictable):
        heap = [(e.when, i, n) for i, (n, e) in enumerate(self.entries.items()) if not e.kids and evictable(e.block)]
        heapq.heapify(heap)
        out, seq = [], itertools.count(10**9)
        while heap and len(out) < num_blocks:
            _, _, name = heapq.heappop(heap)
            e = self.entries.pop(name)
            out.append(e.block)
            if e.up is not None:
                p = self.entries[e.up]
                p.kids -= 1
                if not p.kids and evictable(p.block):
                    heapq.heappush(heap, (p.when if num_blocks < 4 else 10**9 + p.when, next(seq), e.up))
        return tuple(out)
