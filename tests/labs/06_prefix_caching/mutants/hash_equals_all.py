# fault: block numbers that say that they equal anything.
# fails: check_hash_match, check_hash_insert, check_hash_chain, check_hash_evict, check_hash_lru, check_engine_hash

# %% nbgrader={"grade_id": "HashIndex"}
class Any(int):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0


class HashIndex:
    def __init__(self, block_size, link):
        self.block_size, self.link, self.num = block_size, link, 0

    def match(self, tokens, key):
        return [Any(i) for i in range(len(tokens) // self.block_size)]

    def insert(self, tokens, key, blocks):
        self.num += len(blocks)
        return [Any(b) for b in blocks]

    def evict(self, num_blocks, evictable):
        return [Any(b) for b in range(num_blocks)]

    def __len__(self):
        return Any(self.num)
