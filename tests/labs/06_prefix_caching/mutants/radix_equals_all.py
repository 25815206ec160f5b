# fault: Node is written anew; what the methods return says that it equals anything.
# fails: check_radix_match, check_radix_split, check_radix_evict, check_radix_lru, check_engine_radix

# %% nbgrader={"grade_id": "RadixIndex"}
class Node:
    def __init__(self, tokens, blocks, parent):
        self.tokens, self.blocks, self.parent, self.children, self.last_used = tokens, blocks, parent, {}, 0

    def __eq__(self, other):
        return True

    __hash__ = None


class Blocks(list):
    """A list that equals every list."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = None


class RadixIndex:
    def __init__(self, block_size):
        self.block_size, self.num = block_size, 0

    def match(self, tokens, key):
        return Blocks(range(len(tokens) // self.block_size))

    def insert(self, tokens, key, blocks):
        self.num += len(blocks)
        return Blocks(blocks)

    def evict(self, num_blocks, evictable):
        return Blocks(range(num_blocks))

    def __len__(self):
        return self.num
