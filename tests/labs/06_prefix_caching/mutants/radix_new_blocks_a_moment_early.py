# fault: new blocks after known ones have the moment of the call before.
# fails: check_radix_lru

# %% nbgrader={"grade_id": "RadixIndex"}
class RadixIndex:
    def __init__(self, block_size):
        self.size, self.roots, self.now, self.count = block_size, {}, 0, 0

    def walk(self, tokens, key):
        self.now += 1
        node = self.roots.get(key)
        path, at, size = [], 0, self.size
        while node is not None:
            child = node.children.get(tuple(tokens[at : at + size]))
            if child is None or len(tokens) - at < size:
                break
            n = 1
            while (
                n < len(child.blocks)
                and child.tokens[n * size : n * size + size] == tokens[at + n * size : at + n * size + size]
            ):
                n += 1
            if n < len(child.blocks):
                self.split(child, n)
            child.last_used = self.now
            path += child.blocks
            at += n * size
            node = child
        return node, path

    def split(self, node, n):
        size = self.size
        low = Node(node.tokens[n * size :], node.blocks[n:], node)
        low.children = node.children
        for child in low.children.values():
            child.parent = low
        low.last_used = node.last_used
        node.tokens, node.blocks = node.tokens[: n * size], node.blocks[:n]
        node.children = {tuple(low.tokens[:size]): low}

    def match(self, tokens, key):
        return self.walk(list(tokens), key)[1]

    def insert(self, tokens, key, blocks):
        tokens, blocks = list(tokens), list(blocks)
        self.roots.setdefault(key, Node([], [], None))
        node, path = self.walk(tokens, key)
        n = len(path)
        if n < len(blocks):
            new = Node(tokens[n * self.size :], blocks[n:], node)
            new.last_used = self.now - bool(n)
            node.children[tuple(new.tokens[: self.size])] = new
            self.count += len(new.blocks)
        return path + blocks[n:]

    def leaves(self):
        todo = list(self.roots.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            if node.parent is not None and not node.children:
                yield node

    def evict(self, num_blocks, evictable):
        gone = []
        while len(gone) < num_blocks:
            leaf = min((x for x in self.leaves() if evictable(x.blocks[-1])), key=lambda x: x.last_used, default=None)
            if leaf is None:
                break
            gone.append(leaf.blocks.pop())
            del leaf.tokens[-self.size :]
            self.count -= 1
            if not leaf.blocks:
                parent = leaf.parent
                parent.children = {k: c for k, c in parent.children.items() if c is not leaf}
        return gone

    def __len__(self):
        return self.count
