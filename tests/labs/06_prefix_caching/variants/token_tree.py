# A radix tree whose nodes may end within a block: a block belongs to the node that holds its last token. One moment for
# each block. The hash index keeps its leaves in a dict of their own.

# %% nbgrader={"grade_id": "root_key"}
import hashlib


def root_key(adapter, salt):
    parts = [bytes(32) if part is None else hashlib.sha256(part.encode()).digest() for part in (adapter, salt)]
    return hashlib.sha256(parts[0] + parts[1]).digest()


# %% nbgrader={"grade_id": "block_hash"}
def block_hash(parent, tokens):
    data = bytearray(parent)
    for token in tokens:
        for _ in range(8):
            data.append(token & 255)
            token >>= 8
    return hashlib.sha256(data).digest()


# %% nbgrader={"grade_id": "HashIndex"}
class Entry:
    def __init__(self, name, block, parent):
        self.name, self.block, self.parent = name, block, parent
        self.last_used = self.num_children = 0


class HashIndex:
    def __init__(self, block_size, link):
        self.block_size, self.link = block_size, link
        self.entries, self.leaves, self.moment = {}, {}, 0

    def names(self, tokens, key):
        out = [key]
        for i in range(len(tokens) // self.block_size):
            out.append(self.link(out[-1], tokens[i * self.block_size : (i + 1) * self.block_size]))
        return out[1:]

    def match(self, tokens, key):
        self.moment += 1
        found = []
        for name in self.names(tokens, key):
            entry = self.entries.get(name)
            if not entry:
                break
            entry.last_used = self.moment
            found.append(entry.block)
        return found

    def insert(self, tokens, key, blocks):
        self.moment += 1
        parent, standing = None, []
        for name, block in zip(self.names(tokens, key), blocks, strict=True):
            entry = self.entries.get(name)
            if entry is None:
                entry = self.entries[name] = self.leaves[name] = Entry(name, block, parent)
                if parent:
                    parent.num_children += 1
                    self.leaves.pop(parent.name, None)
            entry.last_used = self.moment
            standing.append(entry.block)
            parent = entry
        return standing

    def evict(self, num_blocks, evictable):
        gone = []
        while len(gone) < num_blocks:
            for entry in sorted(self.leaves.values(), key=lambda entry: entry.last_used):
                if evictable(entry.block):
                    break
            else:
                return gone
            gone.append(entry.block)
            del self.entries[entry.name], self.leaves[entry.name]
            if entry.parent:
                entry.parent.num_children -= 1
                if not entry.parent.num_children:
                    self.leaves[entry.parent.name] = entry.parent
        return gone

    def __len__(self):
        return len(self.entries)


# %% nbgrader={"grade_id": "RadixIndex"}
class Part:
    """Tokens [start, start + len(tokens)) of a prefix, and the blocks whose last token is among them."""

    def __init__(self, start, tokens, blocks, parent):
        self.start, self.tokens, self.blocks, self.parent = start, tokens, blocks, parent
        self.children = {}  # first token -> Part


class RadixIndex:
    def __init__(self, block_size):
        self.block_size, self.moment = block_size, 0
        self.roots, self.last_used = {}, {}  # last_used: block -> moment

    def walk(self, tokens, key):
        """(parts on the way, how many tokens agree)"""
        part, done = self.roots.setdefault(key, Part(0, [], [], None)), 0
        path = [part]
        while done < len(tokens) and tokens[done] in part.children:
            part = part.children[tokens[done]]
            path.append(part)
            for token in part.tokens:
                if done == len(tokens) or tokens[done] != token:
                    return path, done
                done += 1
        return path, done

    def use(self, blocks):
        self.moment += 1
        for block in blocks:
            self.last_used[block] = self.moment
        return blocks

    def match(self, tokens, key):
        path, done = self.walk(tokens, key)
        return self.use([block for part in path for block in part.blocks][: done // self.block_size])

    def insert(self, tokens, key, blocks):
        path, done = self.walk(tokens, key)
        standing = [block for part in path for block in part.blocks][: done // self.block_size]
        if done < len(tokens):
            part = path[-1]
            if done < part.start + len(part.tokens):
                part = self.cut(part, done)
            part.children[tokens[done]] = Part(done, tokens[done:], blocks[len(standing) :], part)
        return self.use(standing + blocks[len(standing) :])

    def cut(self, part, place):
        own = place // self.block_size - part.start // self.block_size
        above = Part(part.start, part.tokens[: place - part.start], part.blocks[:own], part.parent)
        part.parent.children[above.tokens[0]] = above
        part.tokens, part.blocks = part.tokens[place - part.start :], part.blocks[own:]
        part.start, part.parent = place, above
        above.children[part.tokens[0]] = part
        return above

    def evict(self, num_blocks, evictable):
        gone = []
        while len(gone) < num_blocks:
            leaves = [part for part in self.parts() if not part.children and evictable(part.blocks[-1])]
            if not leaves:
                break
            part = min(leaves, key=lambda part: self.last_used[part.blocks[-1]])
            block = part.blocks.pop()
            gone.append(block)
            del self.last_used[block]
            end = part.start + len(part.tokens) - self.block_size
            while part.parent and not part.children:  # tokens behind the last full block go, too
                if end > part.start:
                    part.tokens = part.tokens[: end - part.start]
                    break
                del part.parent.children[part.tokens[0]]
                part = part.parent
                end = (part.start + len(part.tokens)) // self.block_size * self.block_size
        return gone

    def parts(self):
        todo = [child for root in self.roots.values() for child in root.children.values()]
        while todo:
            part = todo.pop()
            yield part
            todo.extend(part.children.values())

    def __len__(self):
        return len(self.last_used)
