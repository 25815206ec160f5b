# fault: a block of which the first tokens agree counts as found.
# fails: check_radix_match, check_radix_split, check_engine_radix, check_radix_evict

# %% nbgrader={"grade_id": "RadixIndex"}
class RadixIndex:
    """Which block holds which prefix: a tree of runs of blocks for each key."""

    def __init__(self, block_size):
        self.block_size, self.now = block_size, 0
        self.roots = {}  # key -> Node

    def match(self, tokens, key):
        """Blocks of the longest indexed prefix of tokens; they count as used now."""
        node, blocks = self.descend(tokens, key)
        rest = list(tokens[len(blocks) * self.block_size :])
        for child in node.children.values():
            if rest and child.tokens[0] == rest[0]:
                return blocks + child.blocks[:1]
        return blocks

    def insert(self, tokens, key, blocks):
        """Index blocks for tokens; returns the blocks that stand for them from now on, used now."""
        node, standing = self.descend(tokens, key)
        start = len(standing) * self.block_size
        if start < len(tokens):
            leaf = Node(list(tokens[start:]), list(blocks[len(standing) :]), node)
            leaf.last_used = self.now
            node.children[self.first_block(leaf)] = leaf
            standing = standing + leaf.blocks
        return standing

    def evict(self, num_blocks, evictable):
        """Forget up to num_blocks evictable blocks, each time the least recently used leaf; returns them."""
        evicted = []
        while len(evicted) < num_blocks:
            leaves = [node for node in self.nodes() if not node.children and evictable(node.blocks[-1])]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: node.last_used)
            evicted.append(leaf.blocks.pop())
            if not leaf.blocks:
                del leaf.parent.children[self.first_block(leaf)]
            del leaf.tokens[-self.block_size :]
        return evicted

    def __len__(self):
        return sum(len(node.blocks) for node in self.nodes())

    def descend(self, tokens, key):
        """Walk down as far as whole blocks agree, splitting the last node there: (that node, blocks on the way)."""
        self.now += 1
        node, blocks, size = self.roots.setdefault(key, Node([], [], None)), [], self.block_size
        while True:
            rest = list(tokens[len(blocks) * size :])
            child = node.children.get(tuple(rest[:size]))
            if child is None:
                return node, blocks
            same = 1  # blocks of the child that agree
            while same < len(child.blocks) and child.tokens[: (same + 1) * size] == rest[: (same + 1) * size]:
                same += 1
            node = child if same == len(child.blocks) else self.split(child, same)
            node.last_used = self.now
            blocks = blocks + node.blocks

    def split(self, node, num_blocks):
        """Cut a node behind its first num_blocks blocks. Returns the upper part; the node itself is the lower one."""
        cut = num_blocks * self.block_size
        upper = Node(node.tokens[:cut], node.blocks[:num_blocks], node.parent)
        node.parent.children[self.first_block(upper)] = upper
        node.tokens, node.blocks, node.parent = node.tokens[cut:], node.blocks[num_blocks:], upper
        upper.children[self.first_block(node)] = node
        return upper

    def nodes(self):
        """All nodes but the roots."""
        found = list(self.roots.values())
        for node in found:  # grows while it is read
            found += node.children.values()
        return found[len(self.roots) :]

    def first_block(self, node):
        return tuple(node.tokens[: self.block_size])
