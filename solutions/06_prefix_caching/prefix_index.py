# %% [markdown] nbgrader={"grade_id": "intro"}
# # Lab 06: a prefix index
#
# A support desk asks a model 200 questions of 50 tokens each. Every question follows the same system prompt of 1,000
# tokens, and a block of the KV cache holds 16 tokens. How many of the 210,000 prompt tokens need not be computed? And
# how many if the template puts the time of day before the system prompt? Write both guesses down; a cell below computes
# them.
#
# You build, in this order: the key of a tenant, one link of a hash chain, a hash index, a radix-tree index, the tokens
# that an index saves, and the order of a template's parts. At the end both indexes run inside the engine and serve
# text.
#
# - Each part has a text, a cell for your code, and checks. Run a check as often as you like.
# - Grading draws other inputs of the same kinds, and tries longer runs of calls. A check that passes here for the right
#   reason passes there.
# - There are no tensors in this lab. A token is an int, a block is the number of a block in the KV cache, and an index
#   only records which block holds what. Use the standard library: no engine is available when your cells are graded.
# - Lists that you are given belong to the caller: do not modify them.
#
# 20 points.

# %% nbgrader={"grade_id": "imports"} inferlab={"where": "both"}
import hashlib

# %% nbgrader={"grade_id": "tools"}
# Given: helpers of the checks. You may read them, but do not change them.
import functools
import itertools
import operator

import torch

from grader.checks import drawn, rng, roles, seed, texts_of, unchanging

KEY, OTHER_KEY = bytes(range(32)), bytes(range(32, 64))
LIKE_KEY = [b"\xff" + KEY[1:], KEY[:16] + b"\xff" + KEY[17:], KEY[:31] + b"\xff"]  # each differs in one byte


def random_int(low, high, generator):
    """An integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def random_tokens(num_tokens, generator, vocab_size=1000):
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


class Links:
    """A link function that records its calls. It returns random bytes, the same for the same arguments."""

    def __init__(self):
        self.calls = []  # (parent, tokens, returned name)
        self.drawn = {}

    def link(self, parent, tokens):
        arguments = bytes(parent), tuple(int(token) for token in tokens)
        if arguments not in self.drawn:
            self.drawn[arguments] = b"".join(seed(f"link {len(self.drawn)} {i}").to_bytes(8, "big") for i in range(4))
        self.calls.append((*arguments, self.drawn[arguments]))
        return self.drawn[arguments]


def bytes_of(what, seen):
    assert isinstance(seen, bytes), f"{what}: expected bytes, saw {type(seen).__name__}"
    assert len(seen) == 32, f"{what}: expected 32 bytes, saw {len(seen)}"
    return bytes(seen)


def is_int(value):
    return hasattr(value, "__index__") and not isinstance(value, bool)


def ints_of(what, seen):
    """A list or tuple of ints as a list."""
    whole = isinstance(seen, list | tuple) and all(map(is_int, seen))
    assert whole, f"{what}: expected a list of block numbers, saw {seen!r:.200}"
    return [int(operator.index(value)) for value in seen]


def blocks_of(what, answer, block_size):
    """The blocks in an answer of match or insert."""
    return ints_of(what, answer)


def answer_of(blocks, block_size):
    """The answer of match or insert that stands for these blocks."""
    return list(blocks)


class Called:
    """An index, called as part 3 says. match and insert give the blocks of its answers."""

    def __init__(self, index, block_size):
        self.index, self.block_size = index, block_size

    def match(self, tokens, key):
        return blocks_of("match", unchanging(self.index.match)(list(tokens), key), self.block_size)

    def insert(self, tokens, key, blocks):
        return blocks_of("insert", unchanging(self.index.insert)(list(tokens), key, list(blocks)), self.block_size)

    def evict(self, num_blocks, evictable):
        return ints_of("evict", self.index.evict(num_blocks, evictable))

    def __len__(self):
        return len(self.index)


def apart(seen, expected):
    """Two lists of blocks; of long ones, where they part."""
    if max(len(seen), len(expected)) <= 20:
        return f"expected blocks {expected}, saw {seen}"
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(seen, expected, strict=False)))
    return (f"expected {len(expected)} blocks, saw {len(seen)}; after {same} that agree, expected {expected[same : same + 5]}, "
            f"saw {seen[same : same + 5]}")  # fmt: skip


def expect_match(index, tokens, key, expected, what):
    """index.match(tokens, key) must give the blocks `expected`."""
    blocks = index.match(tokens, key)
    print(f"match, {what}: {blocks if len(blocks) <= 20 else f'{len(blocks)} blocks'}")
    assert blocks == expected, f"match, {what}: {apart(blocks, expected)}"


def expect_insert(index, tokens, key, blocks, expected, what):
    """index.insert(tokens, key, blocks) must give the blocks `expected`."""
    seen = index.insert(tokens, key, blocks)
    if len(blocks) > 20:
        assert seen == expected, f"insert, {what}: {apart(seen, expected)}"
        return
    print(f"insert, {what}: gave {blocks}, got {seen}")
    assert seen == expected, f"insert, {what}: blocks {blocks} were given, {expected} stand for it now; saw {seen}"


def expect_evict(index, num_blocks, in_use, expected, what):
    """index.evict(num_blocks, ...) must return the blocks `expected` in some order, and none of `in_use`."""
    seen = index.evict(num_blocks, lambda block: block not in in_use)
    print(f"evict({num_blocks}), {what}: {seen}")
    assert sorted(seen) == sorted(expected), f"evict({num_blocks}), {what}: expected blocks {expected}, saw {seen}"


def expect_len(index, expected):
    assert len(index) == expected, f"{expected} blocks are indexed, len() says {len(index)}"


class Shared:
    """Prompts made from a tree of blocks that grows, so that it is known what they share: a prompt goes down a path of the
    tree and leaves it with a block that differs from each that continues the path, in one token or in their order."""

    def __init__(self, block_size, generator):
        self.block_size, self.draw = block_size, generator
        self.nodes = [(None, (), None)] * 3  # (parent, tokens, block); the first three are the roots of three keys
        self.unlike = 0

    def below(self, node):
        return [i for i in range(3, len(self.nodes)) if self.nodes[i][0] == node]

    def any_of(self, items):
        return items[random_int(0, len(items) - 1, self.draw)]

    def prompt(self):
        """(tokens of whole blocks, key, the path's nodes, tokens that follow and fill no block)"""
        root = random_int(0, 2, self.draw)
        node, path, tokens = root, [], []
        while (children := self.below(node)) and random_int(0, 4, self.draw):
            node = self.any_of(children)
            path.append(node)
            tokens += self.nodes[node][1]
        beside = [self.nodes[child][1] for child in self.below(node)]
        first = list(self.any_of(beside) if beside else random_tokens(self.block_size, self.draw))
        turned = (*first[1:], first[0])
        self.unlike += 1
        if beside and self.unlike % 3 == 0 and turned not in beside:
            first = list(turned)  # the same tokens in another order
        else:
            first[random_int(0, self.block_size - 1, self.draw)] = 5000 + self.unlike  # nowhere else
        others = [list(self.any_of(self.nodes[3:])[1]) if len(self.nodes) > 3 else [7] * self.block_size
                  for _ in range(random_int(0, 3, self.draw))]  # fmt: skip
        rest = random_int(0, self.block_size - 1, self.draw)
        tail = list(self.any_of(beside))[:rest] if beside and not others else [7] * rest
        return tokens, [KEY, *LIKE_KEY][root], path, [first, *others], tail

    def known(self, path):
        return [self.nodes[node][2] for node in path]

    def grow(self, key, path, new, blocks):
        node = path[-1] if path else [KEY, *LIKE_KEY].index(key)
        for tokens, block in zip(new, blocks, strict=True):
            self.nodes.append((node, tuple(tokens), block))
            node = len(self.nodes) - 1


class Prompts:
    """Random prompts that share much: each continues, truncates or changes an earlier one, under one of three keys."""

    def __init__(self, block_size, generator):
        self.block_size, self.draw = block_size, generator
        self.earlier = [[]]
        self.free, self.num_blocks = [], 0

    def prompt(self, full=False):
        """(tokens, key); full: cut to whole blocks"""
        old = self.earlier[random_int(0, len(self.earlier) - 1, self.draw)]
        cut = random_int(0, len(old), self.draw)
        tokens = old[:cut] + random_tokens(random_int(0, 3 * self.block_size, self.draw), self.draw, vocab_size=3)
        self.earlier.append(tokens)
        length = len(tokens) // self.block_size * self.block_size if full else len(tokens)
        return tokens[:length], [KEY, *LIKE_KEY][random_int(0, 2, self.draw)]

    def new_blocks(self, n):
        """Numbers of n blocks that hold nothing, in any order: those that were given back are used again."""
        while len(self.free) < n:
            order = torch.randperm(8, generator=self.draw).tolist()
            self.free += [self.num_blocks + i for i in order]
            self.num_blocks += 8
        taken, self.free = self.free[:n], self.free[n:]
        return taken

    def give_back(self, blocks):
        self.free = [*blocks, *self.free]


# %% [markdown] nbgrader={"grade_id": "text_root"}
# ## 1. The key of a prefix
#
# Two requests may share keys and values only if computing them would give the same numbers. With a different LoRA
# *adapter*, a small addition to the model's weights, the numbers differ for the same tokens. With a different *salt*,
# sharing is not wanted: a tenant could tell from the latency of an answer what another tenant has asked. Both are
# always part of the key; an engine must not leave them out.
#
# **Build** `root_key(adapter, salt)`: 32 bytes (a SHA-256 digest) for a request's adapter and salt. Each is a string or
# None; None means no adapter or salt.
#
# - The same pair always gives the same key, in every process.
# - Different pairs give different keys, whatever is in the names and however long they are: also `None` and `""`, names
#   of thousands of characters that differ only at their end, and names that only look alike. "é" may be one character or
#   two, an e and an accent; these are two names.
# - What exactly goes into the digest is your choice.
#
# **Hint:** the strings may contain any characters, also those of a long separator that you make up, so none is safe.
# Write the length of a part before the part, always in 8 bytes, or use a notation with quoting, such as JSON.
#
# **Trap (concatenation):** `"a" + "bc"` and `"ab" + "c"` are the same string, and `str(None)` is the string `"None"`.


# %% nbgrader={"grade_id": "root_key", "solution": true}
def root_key(adapter, salt):
    """32 bytes that differ whenever adapter or salt differ. Each is a str or None."""
    ### BEGIN SOLUTION
    digest = hashlib.sha256()
    for part in (adapter, salt):
        text = b"" if part is None else part.encode()
        digest.update(b"none" if part is None else b"some")
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.digest()
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_root", "grade": true, "points": 1}
# property: two pairs of adapter and salt have the same key only if both are equal, character by character.
# question: How do the adapter "ab" with salt "c" and the adapter "a" with salt "bc" look, written one after the other?
# hint: tag each part as there or not there, and write its length before it, so that no two pairs look alike.
# explanation: "ab" + "c" and "a" + "bc" are the same bytes, so two tenants would share a cache. With lengths before the
#   parts they are 2ab1c and 1a2bc. An adapter that is not there and one with an empty name are different too, and need
#   different marks.
def check_keys(pairs):
    keys = {}
    for adapter, salt in pairs:
        what = f"root_key({adapter!a:.60}, {salt!a:.60})"
        key = bytes_of(what, root_key(adapter, salt))
        assert root_key(adapter, salt) == key, f"{what} gave another key the second time"
        pair, other = keys.setdefault(key, ((adapter, salt), what))
        assert pair == (adapter, salt), f"{other} and {what} gave the same key for different names"
    print(f"{len(pairs)} pairs of adapter and salt, {len(keys)} keys")


check_keys([(None, None), ("french", None), (None, "tenant 7"), ("french", "tenant 7"), ("tenant 7", "french")])
check_keys([("a", "bc"), ("ab", "c"), ("abc", None), (None, "abc"), ("abc", ""), ("", "abc"), (None, ""), ("", "")])
check_keys([(None, "caf\u00e9"), (None, "cafe\u0301"), (None, "cafe"), ("caf\u00e9", None), (None, "CAF\u00c9")])
check_keys(
    [(None, "red"), (None, "red\U0001f600"), (None, "red\U0001f601"), ("\U0001f600", "red")]
)  # of 4 bytes in UTF-8
check_keys([(None, "tenant"), (None, "tenant 7"), (None, "tenant 7" * 99), (None, "tenant 7" * 99 + "!")])
with drawn("check_root") as draw:
    check_keys(
        [("None", None), (None, None), (None, "None"), ("None", "None"), ("", "None"), ("", None), ("none", None)]
    )
    signs = "|:,/\0\1\n\t -_.=&\x1e\x1f;#\"'\\"
    words = ("some", "none", "None", "null", "yes", "no", "True", "False", "0", "1", "adapter", "salt")
    texts = texts_of("root_key")  # a separator that was made up is in none of these lists, but in the code
    for mark in (*signs, *words, *texts):
        a, b, c = (str(random_int(0, 99, draw)) for _ in range(3))
        check_keys([(a, f"{b}{mark}{c}"), (f"{a}{mark}{b}", c), (f"{a}{mark}", f"{b}{c}"), (a, f"{mark}{b}{c}"),
                    (f"{a}{mark}{b}{mark}{c}", None), (f"{a}{mark}", f"{mark}{b}"), (f"{a}{mark}{mark}", b), ("", ""),
                    (f"{a}{mark}{b}", None), (f"{a}{mark}{b}", ""), (mark, None), (None, mark), (mark, mark)])  # fmt: skip
    for sign, tag in itertools.product(
        "|:,/&;=#", ("", "S", *texts[:8])
    ):  # a separator that is escaped, and its escape is not
        check_keys([("red\\", f"blue{sign}{tag}green"), (f"red{sign}{tag}blue\\", "green")])
    for one, other in (
        ("a\r\nb", "a\nb"),
        ("a\tb", "a b"),
        ("\U0001f600", "\uf600"),
        ("7", "07"),
        ("7", "\u0667"),
        ("7", "7.0"),
    ):
        check_keys([(one, "x"), (other, "x"), (None, one), (None, other)])
    tagged = [*itertools.product("|:,/\0\x1f", "+-10"), *itertools.combinations(texts[:8], 2)]
    for sign, tag in tagged:  # a separator, with a mark for a name that is there
        for mark in (sign + tag, tag + sign):
            check_keys([("red", f"blue{mark}green"), (f"red{mark}blue", "green")])
    name = f"Tenant {random_int(0, 999, draw)}"
    check_keys([(None, name), (None, name.lower()), (None, f"{name} "), (None, f" {name}"), (name, name), (None, None)])
    alike = [
        "\u00e9 e\u0301 e",
        "\ufb01 fi",
        "\u212b \u00c5 A\u030a A",
        "ss \u00df",
        "a \u0161 \u4e61",
        "\u4eac \u6771 ?",
    ]
    for signs in alike:
        names = [f"{name} {sign}" for sign in signs.split()]
        check_keys([(None, each) for each in names] + [(each, None) for each in names])
        check_keys([(names[0], each) for each in names])
    long = name * random_int(30, 40, draw)
    check_keys(
        [(None, long), (None, f"{long}a"), (None, f"{long}b"), (f"{long}a", None), (f"{long}b", None), (long, long)]
    )
    check_keys([(None, long * 300), (None, long * 300 + "a"), (long * 300, "a"), (None, "a" + long * 300)])
    for tag, width in itertools.product(("", "some", "1", "+", "y", "\1", *filter(str.isascii, texts[:8])), (1, 2)):
        for order, first in itertools.product(("big", "little"), (True, False)):  # a length that has run over
            number = (5).to_bytes(width, order).decode()
            header = tag + number if first else number + tag
            fill = "x" * (256**width - len(header))
            check_keys([("red", f"{fill}{header}green"), (f"red{header}{fill}", "green")])
    with roles(2) as processes:
        keys = {bytes_of("root_key", each.root_key(name, "salt")) for each in processes} | {root_key(name, "salt")}
    assert len(keys) == 1, f"root_key({name!r}, 'salt') gave {len(keys)} keys in three processes"
    for mark in ("", *"|:,/\0\n -_"):  # a length in decimal digits, and the name behind it begins with a digit
        filled = "x" * (9 - len(mark)) + f"{mark}1z"
        check_keys([("1", filled), (f"{mark}{len(filled)}{filled}"[:11], "z")])
    check_keys(
        [(adapter, f"{salt}{end}") for adapter in (long, "red") for salt in (long * 9, long * 90) for end in ("a", "b")]
    )
    check_keys(
        [(f"{adapter}{end}", salt) for adapter in (long * 9, long * 90) for salt in (long, "red") for end in ("a", "b")]
    )

# %% [markdown] nbgrader={"grade_id": "text_link"}
# ## 2. One link of the chain
#
# Hash *token ids*, never keys and values: to hash those you would have to compute them first, which is what you want to
# avoid. But the keys and values of a block also depend on everything before it. So the name of a block is a hash of its
# own tokens and the name of the block before it, and each name identifies a whole prefix. For the first block, the key
# of part 1 replaces the name of the block before it.
#
# **Build** `block_hash(parent, tokens)`: the SHA-256 digest (32 bytes) of `parent`, followed by each token id as 8
# bytes, little-endian.
#
# - `parent`: 32 bytes, the name of the block before, or the key. `tokens`: the block's token ids, ints in [0, 2³²).
# - The format is fixed to the byte because processes share these names: two engines on two machines with a common block
#   store must give the same block the same name.
#
# **Hint:** `int.to_bytes`. Seven tokens and a parent of 32 bytes make 88 bytes to hash.
#
# **Trap (hash):** Python's `hash()` of a string or bytes is a different number in every process. That of a tuple of
# ints is stable, and an attacker can compute other tokens with the same hash; then one request reads the keys and
# values of another's prompt. The same holds for checksums.


# %% nbgrader={"grade_id": "block_hash", "solution": true}
def block_hash(parent, tokens):
    """Name of a block: SHA-256 of the parent's name and its tokens, 8 bytes little-endian each -> 32 bytes."""
    ### BEGIN SOLUTION
    data = b"".join(token.to_bytes(8, "little") for token in tokens)
    return hashlib.sha256(parent + data).digest()
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_link", "grade": true, "points": 1}
# property: a block's name is SHA-256 of the parent's name and then its tokens, 8 bytes little-endian each.
# question: What does a block's name say about the blocks before it?
# hint: bytes of the parent first, then token.to_bytes(8, "little") for each token; nothing in between, nothing after.
# explanation: The name of block 1 is the hash of block 0's name and of its own tokens. So the same 16 tokens after
#   another beginning have another name, which they must: their keys and values depend on all that came before. A number
#   takes as many bytes whatever its size: without a fixed width 1, 23 and 12, 3 would look alike.
def check_name(parent, tokens, expected):
    name = bytes_of("block_hash", unchanging(block_hash)(parent, list(tokens)))
    print(f"tokens {tokens!r:.80} after {parent.hex()[:8]}...: {name.hex()}")
    assert name.hex() == expected, (
        f"{len(tokens)} tokens {tokens!r:.200} after {parent.hex()}: expected {expected}, saw {name.hex()}"
    )


first = "89d39ecded99db56e5ec07504b76734a15fe035e9c881f17ab58931a7334f0a2"
second = "eda57b33d17b41e3caf68364ab8424c911d6524f8cdd52330081c57b1809adb7"
check_name(KEY, [3, 1, 4, 1], first)
check_name(bytes.fromhex(first), [3, 1, 4, 1], second)  # the same tokens, later in a prompt
edges = [0, 1, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1]
check_name(bytes(31) + b" ", edges, "0734b91212e2ea06510556a8d72617de3d141554e0f166c372ce1f45d90b9500")
check_name(b" " + bytes(31), [0, 0], "7db9108b3e9382a6de9f254a406953bd4639372920611acbfd85cb629b4e74f8")
check_name(KEY, [6, 5, 5, 6], "6a9ab28e42600b429268cd4f256414db81be149ad9a8dcbc2b82cc9a52fec52d")
check_name(KEY, [5, 6, 6, 5], "60b0356748367e56526982eed730af016fab39487a548ff7422470a1c8dc2fa6")
check_name(KEY, range(3000), "d648d4d3e3c8446510a1a299e89fff9b0bc863883a0c04bf8332da35d418d9a5")
### BEGIN HIDDEN TESTS
draw = rng("check_link")
cases = [(bytes(random_tokens(32, draw, vocab_size=256)), random_tokens(n, draw, vocab_size=200_000))
         for n in (1, 2, 16, random_int(3, 20, draw), 100, 3000)]  # fmt: skip
cases += [(KEY, [3, 1, 4, 1, 5]), (KEY, [3, 4, 1, 1, 5])]  # the same tokens in two orders
for parent, tokens in [*cases, (bytes(32), [0, 0]), (b" " + bytes(31), edges[::-1])]:
    expected = hashlib.sha256(parent)
    for token in tokens:
        expected.update(token.to_bytes(8, "little"))
    check_name(parent, tokens, expected.hexdigest())
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_promise"}
# ## 3. The contract of an index
#
# Both indexes have the same four methods, those of the engine's `PrefixIndex`. `tokens` is a list of ids in [0, 2³²),
# `key` the 32 bytes of part 1, `blocks` a list of block numbers. Only full blocks are indexed: block i of a prefix holds
# the tokens [i × block_size, (i + 1) × block_size), all of them, in their order. Blocks have any numbers from 0 on, in
# any order; a number that was evicted, or not taken, comes again with other tokens.
#
# - `match(tokens, key)`: the blocks of the longest indexed prefix of `tokens` under this key, in order. They count as
#   used now, and no others.
# - `insert(tokens, key, blocks)`: index these blocks. `len(tokens)` is `block_size × len(blocks)`. Returns the blocks
#   that represent this prefix from now on: where one is already indexed, it is kept, and the given one is not taken
#   (its owner frees it). They count as used now.
# - `evict(num_blocks, evictable)`: remove up to `num_blocks` blocks and return them, in any order. They are evicted one
#   by one. A *leaf* is a block that no other indexed block continues; of the evictable leaves, the least recently used
#   is next. `evictable(block)` is a function that says whether a block may be evicted; requests may still read it.
#   Fewer than `num_blocks` are evicted only when no leaf is evictable.
# - `len(index)`: how many blocks are indexed.
#
# Two indexes share nothing, neither blocks nor moments, also when one begins while the other is in use.
#
# Where a method returns blocks, they are a list or tuple of their numbers, empty if there are none.
#
# Each call of `match` or `insert` is one moment, whatever its key: all blocks of one call are used at the same moment,
# later than those of the call before. A counter is a better clock here than the time of day.
#
# An index counts no references and frees nothing. It does not know which requests read a block; it asks `evictable`.
#
# The cell below states this in code, as used by the checks of both indexes.


# %% nbgrader={"grade_id": "promise"}
# Given: the checks of both indexes. Each function gets a new index, with blocks of 4 tokens if it does not say otherwise.
def check_matches(index, generator):
    A = random_tokens(12, generator)
    index.insert(A, KEY, [20, 0, 21])
    expect_match(index, A, KEY, [20, 0, 21], "the same 12 tokens")
    expect_match(index, [*A, 7, 7], KEY, [20, 0, 21], "the 12 tokens and two more")
    expect_match(index, A[:11], KEY, [20, 0], "the first 11: the last block is not full")
    expect_match(index, [*A[:9], 1000, 1000, 1000], KEY, [20, 0], "9 of the 12, then others: 1 token of a block")
    expect_match(index, A[:3], KEY, [], "the first 3")
    expect_match(index, [], KEY, [], "no tokens")
    expect_match(index, [*A[:4], *A[8:]], KEY, [20], "without the middle block")
    expect_match(index, A[4:], KEY, [], "without the first block: the same tokens at another place")
    expect_match(index, A, OTHER_KEY, [], "the same tokens under another key")


def check_lengths(index, size, generator):
    """Each number of tokens of an indexed prompt of three blocks, alone and with others behind it."""
    A, first = random_tokens(3 * size, generator), 0
    for n in range(3 * size + 1):
        for key, more in ((bytes([n]) * 32, []), (bytes([100 + n]) * 32, [1000] * size)):
            blocks = [first + 2, first, first + 1]
            first += 3
            index.insert(A, key, blocks)
            what = f"{n} of {3 * size} tokens and {len(more)} others, blocks of {size}"
            expect_match(index, A[:n] + more, key, blocks[: n // size], what)


def check_looks_alike(index, generator):
    """Tokens and keys that are nearly those in the index."""
    A = random_tokens(12, generator)
    index.insert(A, KEY, [20, 0, 21])
    for i, more in ((0, 1), (3, 256), (5, 2**16), (7, 2**31), (8, 256), (11, 1)):
        expect_match(index, [*A[:i], A[i] + more, *A[i + 1 :]], KEY, [20, 0, 21][: i // 4], f"token {i} plus {more}")
    for key in [*LIKE_KEY, KEY[::-1], *(KEY[:i] + bytes([KEY[i] ^ 1]) + KEY[i + 1 :] for i in range(32))]:
        expect_match(index, A, key, [], "the same tokens under a key that is nearly the same")
    index.insert([1, 23, 2**24, 4], KEY, [22])
    for tokens in ([12, 3, 2**24, 4], [1, 23, 2**24 + 1, 4], [23, 1, 4, 2**24], [1, 2, 3, 167772164], [1, 1, 23, 4]):
        expect_match(index, tokens, KEY, [], f"{tokens}, while [1, 23, {2**24}, 4] is indexed")
    index.insert(A, LIKE_KEY[0], [23, 24, 25])
    expect_match(index, A, LIKE_KEY[0], [23, 24, 25], "the same tokens, now indexed under that key, too")
    expect_match(index, A, KEY, [20, 0, 21], "the same tokens under the first key")
    expect_len(index, 7)


def check_inserts(index, generator):
    A = random_tokens(12, generator)
    expect_insert(index, [], KEY, [], [], "nothing")
    expect_insert(index, A, KEY, [6, 0, 3], [6, 0, 3], "12 new tokens")
    expect_insert(index, A[:8] + [1000] * 4, KEY, [2, 1, 5], [6, 0, 5], "8 of them and 4 others, of another request")
    expect_len(index, 4)
    expect_insert(index, A, KEY, [6, 0, 3], [6, 0, 3], "the 12 once more, with the blocks that match gives")
    expect_insert(index, A[:8], KEY, [2, 7], [6, 0], "the first 8 again")
    expect_insert(index, [], KEY, [], [], "nothing")
    expect_len(index, 4)
    expect_insert(index, [*A[:4], *A[:4], *A[:4]], KEY, [7, 2, 1], [6, 2, 1], "the first 4, three times")
    expect_len(index, 6)
    expect_insert(index, A, OTHER_KEY, [8, 9, 10], [8, 9, 10], "the 12 under another key")
    expect_insert(index, A[:4], LIKE_KEY[1], [11], [11], "the first 4 under a third key")
    expect_len(index, 10)


def check_evicts(index, generator):
    A, B, C = random_tokens(12, generator), [1000] * 4, [1001] * 4
    D = [A[4], *[1002] * 3]
    expect_evict(index, 2, set(), [], "nothing is indexed")
    index.insert([], KEY, [])
    index.match(A, OTHER_KEY)
    expect_evict(index, 2, set(), [], "nothing is indexed, after an insert of no tokens and a match")
    index.insert(A, KEY, [0, 1, 2])
    expect_insert(index, A[:8] + B, KEY, [10, 11, 3], [0, 1, 3], "8 of the 12 tokens and 4 others")
    expect_match(index, A, KEY[:16] + OTHER_KEY[16:], [], "the 12 tokens under a key of which half agrees")
    expect_match(index, A[:4] + D, KEY, [0], "5 of the 12 tokens, then others")
    index.match(A[:8] + B, KEY)
    expect_evict(index, 1, {0, 1, 2, 3}, [], "all blocks in use")
    expect_evict(index, 4, {2}, [3], "block 2 in use, and it continues 0 and 1")
    expect_len(index, 3)
    expect_evict(index, 0, set(), [], "none in use")
    expect_evict(index, 2, set(), [2, 1], "none in use")
    expect_match(index, A, KEY, [0], "the 12 tokens after that")
    expect_evict(index, 5, set(), [0], "none in use")
    expect_len(index, 0)
    expect_match(index, A, KEY, [], "the 12 tokens after that")
    for tokens, blocks in (
        (A, [10, 11, 12]),
        (A + B, [10, 11, 12, 13]),
        (A + C, [10, 11, 12, 14]),
        (A[:4] + D, [10, 15]),
    ):
        index.insert(tokens, KEY, blocks)
    index.insert(A, OTHER_KEY, [20, 21, 22])
    expect_match(index, [*A, 7], KEY, [10, 11, 12], "the 12 tokens, indexed again")
    expect_evict(index, 8, {15, 20}, [13, 14, 12, 11, 22, 21], "10 is continued by 15, which is in use; so is 20")
    expect_evict(index, 3, set(), [10, 15, 20], "none in use")
    expect_len(index, 0)


def check_shrinks(index, size, generator):
    """A run of four blocks loses its last one, and again; then others take its place, with the same block numbers."""
    A, other = random_tokens(4 * size, generator), [1000] * size
    index.insert(A, KEY, [5, 3, 0, 4])
    for num_left, gone in ((3, 4), (2, 0), (1, 3)):
        expect_evict(index, 1, set(), [gone], f"a run of {num_left + 1} blocks of {size} tokens")
        expect_match(index, A, KEY, [5, 3, 0][:num_left], "what is left of the run")
        expect_len(index, num_left)
    index.insert([*A[:size], *other, *A[2 * size :]], KEY, [5, 3, 4, 0])
    expect_match(index, A, KEY, [5], "the run of before")
    expect_match(index, A[:size] + other, KEY, [5, 3], "the same number for other tokens")
    index.insert(A, KEY, [5, 7, 8, 9])
    expect_match(index, A, KEY, [5, 7, 8, 9], "the run of before, indexed again")
    expect_evict(index, 4, {9}, [0, 4, 3], "the end of one run in use")
    expect_match(index, A, KEY, [5, 7, 8, 9], "the run in use")
    expect_evict(index, 9, set(), [9, 8, 7, 5], "none in use")
    expect_len(index, 0)


def check_order(index, generator):
    system = random_tokens(8, generator)
    questions = [[*system, 999, *[1000 + i] * 3] for i in range(3)]
    for i, question in enumerate(questions):
        index.insert(question, KEY, [0, 1, 10 + i])
    index.match(questions[0], KEY)
    index.match(system[:4], KEY)
    index.insert(questions[1], KEY, [0, 1, 11])
    expect_evict(index, 1, set(), [12], "10 was matched and 11 inserted again after 12")
    expect_evict(index, 1, set(), [10], "11 was used after 10")
    index.insert([2000] * 8, OTHER_KEY, [13, 14])
    index.match([*system, 7, 7, 7, 7], KEY)
    expect_evict(index, 1, set(), [11], "13 and 14 came later; the system prompt was matched since, but 11 was not")
    index.insert([3000] * 4, OTHER_KEY, [15])
    index.match([2000] * 4, OTHER_KEY)
    expect_evict(index, 1, set(), [14], "13, in front of it, was matched since, but 14 was not")
    expect_evict(index, 1, set(), [1], "the system prompt was used before 15 and 13")
    index.match(system[:4], KEY)
    expect_evict(index, 2, set(), [15, 13], "0 was used last")
    expect_evict(index, 1, set(), [0], "it is the only one")
    index.insert(questions[0], KEY, [20, 21, 22])
    index.insert(questions[1], KEY, [20, 21, 23])
    index.insert([3000] * 4, KEY, [24])
    index.match(questions[0], KEY)
    expect_evict(index, 1, {22, 24}, [23], "it was used before all others")
    expect_evict(index, 1, {24}, [22], "24 is older, but in use")
    expect_evict(index, 1, set(), [24], "20 and 21 were matched after it came")
    index.insert([*system, *[4000] * 4], KEY, [20, 21, 25])
    expect_evict(index, 1, set(), [25], "20, 21 and 25 were used at the same moment; 25 continues the others")


def check_moments(index):
    """Prompts A and B of two blocks of 2 tokens, and two calls after they are indexed, all pairs of calls."""
    prompts, blocks, num_orders = {"A": [1] * 4, "B": [2] * 4}, {"A": [3, 2], "B": [1, 0]}, 0
    calls = list(itertools.product(("match", "insert"), "AB", (2, 1)))
    pairs = [(KEY, *pair) for pair in itertools.product(calls, calls)]
    pairs += [(OTHER_KEY, *pair) for pair in itertools.product(calls[::2], calls[::2])]
    for key, *pair in pairs:
        keys, used, text = {"A": KEY, "B": key}, {}, ""
        for now, (method, name, num_blocks) in enumerate([("insert", "A", 2), ("insert", "B", 2), *pair]):
            given = [blocks[name][:num_blocks]] if method == "insert" else []
            getattr(index, method)(prompts[name][: 2 * num_blocks], keys[name], *given)
            used |= dict.fromkeys(blocks[name][:num_blocks], now)
            text += f"{method} {num_blocks} of {name}'s blocks, "
        text += "both under one key" if key == KEY else "under two keys"
        left, expected = {name: list(blocks[name]) for name in "AB"}, []
        while any(left.values()):
            oldest = min((name for name in "AB" if left[name]), key=lambda name: used[left[name][-1]])
            expected.append(left[oldest].pop())
        for first, last in ((0, 1), (1, 3), (3, 4)):
            seen, then = index.evict(last - first, lambda block: True), expected[first:last]
            what = f"A has blocks {blocks['A']}, B {blocks['B']}; {text}; {expected[:first]} went"
            assert sorted(seen) == sorted(then), f"{what}; evict({last - first}): expected {then}, saw {seen}"
        num_orders += 1
    print(f"{num_orders} orders of calls: the blocks went as they were used")


def check_used(index, generator):
    """A call uses all that it finds or takes; a call that finds nothing uses nothing."""
    A = random_tokens(12, generator)
    for method, tokens, *blocks in (("match", A), ("insert", A, [2, 1, 0]), ("insert", A + [1001] * 4, [2, 1, 0, 4])):
        index.insert(A, KEY, [2, 1, 0])
        index.insert([1000] * 4, LIKE_KEY[0], [3])
        getattr(index, method)(tokens, KEY, *blocks)
        expect_evict(index, len(tokens) // 4 - 2, {3}, [0, 4][: len(tokens) // 4 - 2], "3 is in use")
        expect_evict(index, 1, set(), [3], f"{method} used 1 and 2 after it")
        expect_evict(index, 9, set(), [1, 2], "none in use")
        index.insert(A, KEY, [2, 1, 0])
        index.insert([1000] * 4, LIKE_KEY[0], [3])
        getattr(index, method)(tokens, KEY, *blocks)
        expect_evict(index, len(tokens) // 4 - 1, {3}, [1, 0, 4][: len(tokens) // 4 - 1], "3 is in use")
        expect_evict(index, 1, set(), [3], f"{method} used 2, the first block of all, after it")
        expect_evict(index, 9, set(), [2], "2 is left")
    index.insert([1000] * 4, KEY, [3])
    index.insert(A[:4], KEY, [2])
    index.match([1000] * 4, KEY)
    index.insert(A[:8], KEY, [2, 1])
    expect_evict(index, 1, set(), [3], "1 came after 3 was matched")
    expect_evict(index, 9, set(), [1, 2], "none in use")
    index.insert(A[:8], KEY, [1, 0])
    index.insert([1000] * 4, KEY, [2])
    index.match([*A[:3], 1001, *A[4:]], KEY)
    index.match(A[:3], KEY)
    index.match(A, LIKE_KEY[2])
    index.match([*A[4:], *A[4:]], KEY)
    index.insert([], KEY, [])
    expect_evict(index, 1, set(), [0], "2 came later, and no match since has found 0")
    expect_evict(index, 1, set(), [1], "2 came later, and no match since has found 1")


def check_many(index):
    """One call evicts a whole run that is older than others, and then one of these."""
    index.insert([1] * 12, KEY, [7, 5, 6])
    for i in range(4):
        index.insert([2 + i] * 4, KEY, [i])
    expect_evict(index, 4, set(), [6, 5, 7, 0], "7, 5 and 6 are one run, older than 0, 1, 2 and 3")
    expect_len(index, 3)


def check_two(make):
    """Two indexes with the same tokens: what is done with one says nothing about the other."""
    index = make()
    index.insert([1] * 4, KEY, [0])
    index.insert([2] * 4, KEY, [1])
    other = make()
    expect_len(other, 0)
    index.match([1] * 4, KEY)
    other.insert([1] * 4, KEY, [5])
    other.insert([2] * 4, KEY, [6])
    other.match([2] * 4, KEY)
    expect_evict(index, 1, set(), [1], "0 was matched after 1 came; another index, begun since, has other moments")
    expect_evict(other, 1, set(), [5], "6 was matched after it; in the other index it was the other way round")
    expect_match(index, [1] * 4, KEY, [0], "what is left in one index")
    expect_match(other, [2] * 4, KEY, [6], "what is left in the other one")


def check_shared(index, num_rounds, block_size, generator, match=True, insert=True):
    """Prompts that share much: what match finds, and what insert says. Without `insert` each block is given once."""
    tree, next_block = Shared(block_size, generator), 0
    for _ in range(num_rounds):
        path_tokens, key, path, new, tail = tree.prompt()
        tokens, known = path_tokens + [token for block in new for token in block], tree.known(path)
        here, more = f"{len(path)} blocks of {block_size} are indexed", f"and {len(tail)} tokens behind it"
        if match:
            expect_match(index, path_tokens + tail, key, known, f"{here}, the prompt ends with them, {more}")
            expect_match(index, tokens + tail, key, known, f"{here}, the next one is new, {more}")
        own = list(range(next_block, next_block + len(path) + len(new)))
        next_block += len(own)
        stands = [*known, *own[len(path) :]]
        given = own if insert and random_int(0, 1, generator) else stands
        if insert:
            expect_insert(index, tokens, key, given, stands, f"{here}, the next one is new")
            expect_len(index, len(tree.nodes) - 3 + len(new))
        else:
            index.insert(tokens, key, given)
        tree.grow(key, path, new, own[len(path) :])
        if match:
            expect_match(index, tokens + tail, key, stands, f"the {len(stands)} blocks that were just inserted, {more}")


def check_large(make, generator):
    """A long prompt, prompts that leave it one block later each, many that begin alike, many keys. make: block_size ->
    index"""
    index, tokens = make(2), random_tokens(600, generator)
    blocks = torch.randperm(300, generator=generator).tolist()
    expect_insert(index, tokens, KEY, blocks, blocks, "300 blocks")
    expect_match(index, tokens, KEY, blocks, "300 blocks")
    for n in range(40):
        expect_insert(
            index, [*tokens[: 2 * n], 2000, 2000], KEY, [*blocks[:n], 2000 + n], [*blocks[:n], 2000 + n], f"{n} of them"
        )
        expect_insert(index, [3000 + n, 1], KEY, [3000 + n], [3000 + n], f"another first block, {n}")
        expect_insert(
            index, tokens[:4], bytes([n]) * 32, [4000 + 2 * n, 4001 + 2 * n], [4000 + 2 * n, 4001 + 2 * n], f"key {n}"
        )
    for n in range(40):
        expect_match(
            index, [*tokens[: 2 * n], 2000, 2000], KEY, [*blocks[:n], 2000 + n], f"{n} of 300 blocks, then another"
        )
        expect_match(index, [3000 + n, 1], KEY, [3000 + n], f"one of 40 first blocks, {n}")
        expect_match(index, tokens, bytes([n]) * 32, [4000 + 2 * n, 4001 + 2 * n], f"key {n} of 40")
    expect_match(index, tokens, KEY, blocks, "300 blocks, with prompts that leave them")
    index, tokens = make(40), [random_int(10**6, 10**7, generator) for _ in range(40)]
    index.insert(tokens, KEY, [0])
    for i in range(40):
        for less in (0, 1, 31, 257, 1000, 1009, 32_000, 65_536, 65_599, 131_072, 1_000_003):
            near = [*tokens[:i], tokens[i] + 1, *tokens[i + 1 :]]
            if i < 39:
                near[i + 1] -= less
            what = f"a block of 40 tokens, token {i} plus 1, the next one minus {less}"
            expect_match(index, near, KEY, [], what)
    swapped = [*tokens[:18], tokens[19], tokens[18], *tokens[20:]]
    expect_match(index, swapped, KEY, [], "a block of 40 tokens, two of them exchanged")


def check_long_use(index, generator):
    """40 prompts of one block, used 2300 times in any order: of them the one goes that was used least recently."""
    used = {}
    for now in range(2300):
        n = random_int(0, 39, generator)
        if n in used:
            expect_match(index, [n, 1], KEY, [n], f"prompt {n}")
        else:
            index.insert([n, 1], KEY, [n])
        used[n] = now
        if now % 25 == 24:
            oldest = min(used, key=used.get)
            expect_evict(index, 1, set(), [oldest], f"call {now + 1}; it was used in call {used.pop(oldest) + 1}")
    expect_evict(index, 30, set(), sorted(used, key=used.get)[:30], "30 at once, by their last use")


def evict_some(index, num_rounds, block_size, generator):
    """Random rounds of insert and evict: evicted blocks must be evictable, and strand nothing; the rest is found."""
    prompts, held = Prompts(block_size, generator), {}  # held: block -> (key, its prefix)
    for _ in range(num_rounds):
        full, key = prompts.prompt(full=True)
        given = prompts.new_blocks(len(full) // block_size)
        standing = index.insert(full, key, given)
        held |= {block: (key, full[: (i + 1) * block_size]) for i, block in enumerate(standing)}
        prompts.give_back([block for block in given if block not in standing])
        in_use = {block for block in held if random_int(0, 3, generator) == 0}
        behind = {block: {b for b, (k, p) in held.items() if k == key and p[: len(prefix)] == prefix}
                  for block, (key, prefix) in held.items()}  # fmt: skip
        can_go = [block for block in held if not behind[block] & in_use]
        wanted = random_int(0, 5, generator)
        gone = index.evict(wanted, lambda block, in_use=in_use: block not in in_use)
        print(f"{len(held)} indexed, {len(in_use)} in use: evict({wanted}) gave {gone}")
        known = len(set(gone)) == len(gone) and set(gone) <= set(held)
        assert known, f"evict({wanted}) gave {gone}; indexed were {sorted(held)}"
        assert not set(gone) & in_use, f"evict gave blocks {sorted(set(gone) & in_use)}, which are in use"
        stranded = sorted({b for block in gone for b in behind[block]} - set(gone))
        assert not stranded, f"evict({wanted}) gave {gone}: blocks {stranded} continue them, nobody can find them now"
        expected = min(wanted, len(can_go))
        assert len(gone) == expected, f"evict({wanted}): {len(can_go)} blocks can go, so {expected} do; saw {gone}"
        for block in gone:
            del held[block]
        prompts.give_back(gone)
        expect_len(index, len(held))
        left = [next((b for b, kept in held.items() if kept == (key, full[: (i + 1) * block_size])), None)
                for i in range(len(full) // block_size)]  # fmt: skip
        left = list(itertools.takewhile(lambda block: block is not None, left))
        expect_match(index, full, key, left, f"after that, {len(full)} tokens in blocks of {block_size}")


def compare_order(index, oracle, num_rounds, block_size, generator):
    """Random rounds of insert, match and evict: the evicted blocks are those that `oracle` evicts."""
    prompts, held = Prompts(block_size, generator), set()
    for _ in range(num_rounds):
        tokens, key = prompts.prompt()
        full = tokens[: len(tokens) // block_size * block_size]
        if random_int(0, 1, generator):
            given = prompts.new_blocks(len(full) // block_size)
            blocks = oracle.insert(full, key, given)
            index.insert(full, key, blocks)
            held |= set(blocks)
            prompts.give_back([block for block in given if block not in blocks])
        else:
            index.match(tokens, key)
            oracle.match(tokens, key)
        wanted = random_int(0, 3, generator)
        in_use = {block for block in held if wanted > 1 and random_int(0, 3, generator) == 0}
        oldest = oracle.evict(wanted, lambda block, in_use=in_use: block not in in_use)
        expect_evict(index, wanted, in_use, oldest, f"{len(oracle) + len(oldest)} blocks indexed, in use {in_use}")
        held -= set(oldest)
        prompts.give_back(oldest)


# %% [markdown] nbgrader={"grade_id": "text_hash"}
# ## 4. A hash index
#
# **Build** `HashIndex(block_size, link)`. `link(parent, tokens)` gives the name of a block as your `block_hash` does.
# The checks pass their own counting function; at the end of the lab it is yours.
#
# **Count:** a prompt of n full blocks takes at most n calls of `link`, each with `block_size` tokens. The tokens after
# the last full block are not hashed: they have no block.
#
# **Hint:** a dict from a name to its block, one from a name to the name before it, one from a name to its last moment.
# The leaves are the names that are not the parent of any other. Scanning all of them at every eviction is fine here.
#
# **Trap (partial block):** a hash table has only whole blocks. If 15 of 16 tokens agree, nothing of the block is
# reused; its tokens are recomputed, and nothing is copied.
#
# **Trap (inner block):** without the blocks before it, no `match` ever reaches a block. If a block that others continue
# is evicted, those are stranded: they take up memory and can never be found. This also holds when the block itself is
# evictable and the one after it is in use.


# %% nbgrader={"grade_id": "HashIndex", "solution": true}
class HashIndex:
    """Which block holds which prefix: names of blocks in a chain. link(parent, tokens) -> name (bytes)."""

    def __init__(self, block_size, link):
        ### BEGIN SOLUTION
        self.block_size, self.link, self.now = block_size, link, 0
        self.block = {}  # name -> block
        self.parent = {}  # name -> name of the block before it, or the key
        self.last_used = {}  # name -> moment
        ### END SOLUTION

    def match(self, tokens, key):
        """Blocks of the longest indexed prefix of tokens; they count as used now."""
        ### BEGIN SOLUTION
        self.now += 1
        blocks = []
        for _, name in self.chain(tokens, key):
            if name not in self.block:
                break
            self.last_used[name] = self.now
            blocks.append(self.block[name])
        return blocks
        ### END SOLUTION

    def insert(self, tokens, key, blocks):
        """Index blocks for tokens; returns the blocks that stand for them from now on, used now."""
        ### BEGIN SOLUTION
        self.now += 1
        standing = []
        for (parent, name), block in zip(self.chain(tokens, key), blocks, strict=True):
            if name not in self.block:
                self.block[name], self.parent[name] = block, parent
            self.last_used[name] = self.now
            standing.append(self.block[name])
        return standing
        ### END SOLUTION

    def evict(self, num_blocks, evictable):
        """Forget up to num_blocks evictable blocks, each time the least recently used leaf; returns them."""
        ### BEGIN SOLUTION
        evicted = []
        while len(evicted) < num_blocks:
            continued = set(self.parent.values())
            leaves = [name for name in self.block if name not in continued and evictable(self.block[name])]
            if not leaves:
                break
            oldest = min(leaves, key=self.last_used.get)
            evicted.append(self.block.pop(oldest))
            del self.parent[oldest], self.last_used[oldest]
        return evicted
        ### END SOLUTION

    def __len__(self):
        ### BEGIN SOLUTION
        return len(self.block)

    def chain(self, tokens, key):
        """(parent's name, name) of each full block, one after another."""
        name = key
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            parent, name = name, self.link(name, tokens[start : start + self.block_size])
            yield parent, name
        ### END SOLUTION


# %% nbgrader={"grade_id": "check_hash_match", "grade": true, "points": 2}
# property: match gives the longest run of full blocks from the start that is indexed under this key, and no more.
# question: Blocks 0 and 2 of a prompt are indexed and block 1 is not: how much can be used?
# hint: go block by block from position 0 and stop at the first that is not indexed or not full; start from the key.
# explanation: Blocks of 4, a prompt of 11 tokens: 2 full blocks and 3 tokens. Only block 0 indexed: match gives 1
#   block. Block 1 without block 0 gives none, since its keys would follow a gap. The last 3 tokens fill no block and
#   never count. Under another key nothing matches.
check_matches(Called(HashIndex(4, Links().link), 4), rng("hash_match"))
check_lengths(Called(HashIndex(4, Links().link), 4), 4, rng("hash_match"))
check_looks_alike(Called(HashIndex(4, Links().link), 4), rng("hash_match"))
with drawn("check_hash_match") as draw:
    check_matches(Called(HashIndex(4, Links().link), 4), draw)
    check_looks_alike(Called(HashIndex(4, Links().link), 4), draw)
    for block_size in (1, 2, random_int(3, 6, draw)):
        check_lengths(Called(HashIndex(block_size, Links().link), block_size), block_size, draw)
        check_shared(Called(HashIndex(block_size, Links().link), block_size), 15, block_size, draw, insert=False)
    check_large(lambda block_size: Called(HashIndex(block_size, Links().link), block_size), draw)


# %% nbgrader={"grade_id": "check_hash_insert", "grade": true, "points": 1}
# property: of what is indexed already the old block stays and is returned; only the others are taken, once each.
# question: Two requests computed the same prompt at the same time: which of the two blocks stays?
# hint: return, for each place, the block that match would give from now on; len() counts the blocks that were taken.
# explanation: Blocks [7, 2] are indexed; the same prompt comes with [9, 5, 6]. The first two places keep 7 and 2, the
#   third takes 6: 7, 2 and 6 stand for the prompt, one block is taken, and 9 and 5 go back. If 9 replaced 7, requests that hold
#   7 would still be right, but the next one would not share with them.
check_inserts(Called(HashIndex(4, Links().link), 4), rng("hash_insert"))
with drawn("check_hash_insert") as draw:
    check_inserts(Called(HashIndex(4, Links().link), 4), draw)
    for block_size in (1, 2, random_int(3, 6, draw)):
        check_shared(Called(HashIndex(block_size, Links().link), block_size), 30, block_size, draw, match=False)


# %% nbgrader={"grade_id": "check_hash_chain", "grade": true, "points": 1}
# property: each full block is hashed at most once per call, from the name before it; the first from the key.
# question: How many hashes do 4 full blocks need if each begins with the name before it?
# hint: keep the name of the block before in a variable, and hand link one block of tokens at a time.
# explanation: 4 full blocks: 4 calls of link, each with the last name and one block's tokens. Hashing from the start
#   for each block is 1 + 2 + 3 + 4 = 10 blocks of work, and for a prompt of 1,000 blocks half a million.
def check_chain(num_tokens, block_size, generator):
    tokens, links = random_tokens(num_tokens, generator), Links()
    num_full, chain, name = num_tokens // block_size, [], KEY
    for i in range(num_full):
        block = tokens[i * block_size : (i + 1) * block_size]
        name = links.link(name, block)
        chain.append((bytes(links.calls[-1][0]), tuple(block), name))
    index = Called(HashIndex(block_size, links.link), block_size)
    full = tokens[: num_full * block_size]
    for method, given, *blocks in (("insert", full, list(range(num_full))), ("match", tokens), ("match", full)):
        links.calls.clear()
        getattr(index, method)(given, KEY, *blocks)
        calls = list(links.calls)
        print(f"{method}, {len(given)} tokens in blocks of {block_size}: {len(calls)} calls of link")
        assert len(calls) <= num_full, f"{method}: expected at most {num_full} calls of link, saw {len(calls)}"
        for parent, hashed, name in calls:
            places = [i for i, (_, block, _) in enumerate(chain) if block == hashed]
            assert places, f"{method}: link got {len(hashed)} tokens that are no full block of the prompt"
            right = (parent, hashed, name) in chain
            assert right, (
                f"{method}: link got block {places[0]} with another parent than the name before it, or the key"
            )
        assert len(set(calls)) == len(calls), f"{method}: link got the same block twice in one call"
        if method == "insert":
            assert len(calls) == num_full, f"{num_full} new blocks need {num_full} calls of link, saw {len(calls)}"


check_chain(num_tokens=14, block_size=4, generator=rng("hash_chain"))
with drawn("check_hash_chain") as draw:
    for block_size in (1, 2, random_int(3, 6, draw)):
        check_chain(block_size * random_int(2, 6, draw) + block_size - 1, block_size, draw)
        check_chain(block_size * random_int(2, 6, draw), block_size, draw)


# %% nbgrader={"grade_id": "check_hash_evict", "grade": true, "points": 2}
# property: evicted blocks are evictable and continued by no remaining block; as many as asked, if possible.
# question: If the first block of a chain is evicted, can the second still be found?
# hint: look for the leaves again after each evicted block: its parent may be a leaf now.
# explanation: Chain a - b - c: only c is continued by nothing, so c goes first, then b, then a. Asked for 2, evict
#   gives c and b: b became a leaf on the way. If b is in use and c is not, c alone can go; a cannot, since b would be
#   out of reach and its memory lost.
check_evicts(Called(HashIndex(4, Links().link), 4), rng("hash_evict"))
check_shrinks(Called(HashIndex(4, Links().link), 4), 4, rng("hash_evict"))
evict_some(Called(HashIndex(2, Links().link), 2), 3, 2, rng("hash_evict"))
with drawn("check_hash_evict") as draw:
    check_evicts(Called(HashIndex(4, Links().link), 4), draw)
    for block_size in (1, 2, random_int(3, 6, draw)):
        check_shrinks(Called(HashIndex(block_size, Links().link), block_size), block_size, draw)
        evict_some(Called(HashIndex(block_size, Links().link), block_size), 15, block_size, draw)


# %% nbgrader={"grade_id": "check_hash_lru", "grade": true, "points": 1}
# property: of the leaves, the one goes that match or insert used least recently.
# question: Which blocks does a match use: all on its way, or only the last?
# hint: give every block that a call finds or takes the call's moment, and no other block.
# explanation: Prompts a - b and a - c, inserted in this order; then a - b is matched. Leaves are b and c; b was used
#   last, so c goes. The moment is that of the whole call, for each block that it found or took: a, which both use, is
#   never older than its leaves.
check_order(Called(HashIndex(4, Links().link), 4), rng("hash_lru"))
check_moments(Called(HashIndex(2, Links().link), 2))
check_used(Called(HashIndex(4, Links().link), 4), rng("hash_lru"))
check_many(Called(HashIndex(4, Links().link), 4))
same_link = Links().link
check_two(lambda: Called(HashIndex(4, same_link), 4))
with drawn("check_hash_lru") as draw:
    check_order(Called(HashIndex(4, Links().link), 4), draw)
    check_used(Called(HashIndex(4, Links().link), 4), draw)
    check_long_use(Called(HashIndex(2, Links().link), 2), draw)
### BEGIN HIDDEN TESTS
draw = rng("check_hash_lru, longer")
for block_size in (1, 2, random_int(3, 6, draw)):
    oracle = Called(reference.RadixIndex(block_size), block_size)
    compare_order(Called(HashIndex(block_size, Links().link), block_size), oracle, 60, block_size, draw)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_radix"}
# ## 5. A radix-tree index
#
# The same contract with another structure. A radix tree has one node for each run of blocks without a fork. A node
# holds the run's tokens and its blocks; its children continue it. The lookup of a prompt walks down from the root: it
# compares the tokens with a node's, and goes on to a child when the whole node agrees. No hashes, and a long prompt
# that is not shared is one node.
#
# ```
# after insert(system + question 1)      after insert(system + question 2)
#
# root ── [system, question 1]           root ── [system] ─┬─ [question 1]
#                                                          └─ [question 2]
# ```
#
# When a prompt diverges in the middle of a node, the node is *split* there: the first part stays above, the rest
# becomes its child and keeps the node's own children. Since only whole blocks can be shared, a split is at a block
# boundary: matching tokens beyond it are ignored. A tree with blocks of one token matches to the token.
#
# **Build** `RadixIndex(block_size)`, with the methods of part 3. The class `Node` is given; you may use another.
#
# **Hint:** let `match` split, too: then each node is used as a whole, and one moment per node is enough. Let both
# methods start with a common one that walks down, splits where the prompt diverges, and sets the moment. Children are
# found by their first block, a tuple of tokens: of two children the first *token* may be the same, and a child without
# a matching block must not be split.
#
# **Trap (split):** the lower half takes over three things: the rest of the tokens, the rest of the blocks, and the
# children. And the lower half, not the upper, becomes the parent of those children.
#
# **Trap (whole node):** eviction takes blocks, not nodes, from the end of a leaf, one at a time. To evict one block, a
# leaf of 50 blocks loses one.


# %% nbgrader={"grade_id": "node"} inferlab={"where": "both"}
# Given: one node of the tree.
class Node:
    """A run of blocks without a fork. parent None: a root, which has no tokens and no blocks."""

    def __init__(self, tokens, blocks, parent):
        self.tokens = tokens  # list of block_size x len(blocks) ids
        self.blocks = blocks  # list
        self.parent = parent
        self.children = {}  # tuple of a child's first block_size tokens -> Node
        self.last_used = 0  # moment


# %% nbgrader={"grade_id": "RadixIndex", "solution": true}
class RadixIndex:
    """Which block holds which prefix: a tree of runs of blocks for each key."""

    def __init__(self, block_size):
        ### BEGIN SOLUTION
        self.block_size, self.now = block_size, 0
        self.roots = {}  # key -> Node
        ### END SOLUTION

    def match(self, tokens, key):
        """Blocks of the longest indexed prefix of tokens; they count as used now."""
        ### BEGIN SOLUTION
        return self.descend(tokens, key)[1]
        ### END SOLUTION

    def insert(self, tokens, key, blocks):
        """Index blocks for tokens; returns the blocks that stand for them from now on, used now."""
        ### BEGIN SOLUTION
        node, standing = self.descend(tokens, key)
        start = len(standing) * self.block_size
        if start < len(tokens):
            leaf = Node(tokens[start:], blocks[len(standing) :], node)
            leaf.last_used = self.now
            node.children[self.block_of(leaf.tokens, 0)] = leaf
            standing = standing + leaf.blocks
        return standing
        ### END SOLUTION

    def evict(self, num_blocks, evictable):
        """Forget up to num_blocks evictable blocks, each time the least recently used leaf; returns them."""
        ### BEGIN SOLUTION
        evicted = []
        while len(evicted) < num_blocks:
            leaves = [node for node in self.nodes() if not node.children and evictable(node.blocks[-1])]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: node.last_used)
            evicted.append(leaf.blocks.pop())
            if not leaf.blocks:
                del leaf.parent.children[self.block_of(leaf.tokens, 0)]
            del leaf.tokens[-self.block_size :]
        return evicted
        ### END SOLUTION

    def __len__(self):
        ### BEGIN SOLUTION
        return sum(len(node.blocks) for node in self.nodes())

    def descend(self, tokens, key):
        """Walk down as far as whole blocks agree, splitting the last node there: (that node, blocks on the way)."""
        self.now += 1
        node, blocks = self.roots.setdefault(key, Node([], [], None)), []
        while True:
            rest = tokens[len(blocks) * self.block_size :]
            child = node.children.get(self.block_of(rest, 0))
            if child is None:
                return node, blocks
            same = 1  # blocks of the child that agree
            while same < len(child.blocks) and self.block_of(child.tokens, same) == self.block_of(rest, same):
                same += 1
            node = child if same == len(child.blocks) else self.split(child, same)
            node.last_used = self.now
            blocks = blocks + node.blocks

    def split(self, node, num_blocks):
        """Split a node after its first num_blocks blocks. Returns the upper part; the node itself is the lower one."""
        cut = num_blocks * self.block_size
        upper = Node(node.tokens[:cut], node.blocks[:num_blocks], node.parent)
        node.parent.children[self.block_of(upper.tokens, 0)] = upper
        node.tokens, node.blocks, node.parent = node.tokens[cut:], node.blocks[num_blocks:], upper
        upper.children[self.block_of(node.tokens, 0)] = node
        return upper

    def nodes(self):
        """All nodes but the roots."""
        found = list(self.roots.values())
        for node in found:  # grows during the iteration
            found += node.children.values()
        return found[len(self.roots) :]

    def block_of(self, tokens, i):
        """The tokens of block i, fewer where they end."""
        return tuple(tokens[i * self.block_size : (i + 1) * self.block_size])
        ### END SOLUTION


# %% nbgrader={"grade_id": "check_radix_match", "grade": true, "points": 2}
# property: match gives the longest run of full blocks from the start that is indexed under this key, and no more.
# question: A node holds 3 blocks and the prompt agrees with 2 of them: what is the answer?
# hint: compare with a node's tokens block by block; go on to a child only when the whole node agrees.
# explanation: Blocks of 4, one node with blocks [7, 2, 5] and 12 tokens. A prompt that agrees in the first 9 tokens
#   matches blocks 7 and 2: 9 tokens are 2 full blocks. It does not go on to a child, since the node as a whole does not
#   agree.
check_matches(Called(RadixIndex(4), 4), rng("radix_match"))
check_lengths(Called(RadixIndex(4), 4), 4, rng("radix_match"))
check_looks_alike(Called(RadixIndex(4), 4), rng("radix_match"))
tree, tokens = Called(RadixIndex(1), 1), random_tokens(12, rng("radix_match"))
tree.insert(tokens, KEY, list(range(12)))
expect_match(tree, [*tokens[:9], 1000, 1000, 1000], KEY, list(range(9)), "blocks of one token: to the token")
with drawn("check_radix_match") as draw:
    check_matches(Called(RadixIndex(4), 4), draw)
    check_looks_alike(Called(RadixIndex(4), 4), draw)
    check_large(lambda block_size: Called(RadixIndex(block_size), block_size), draw)
    for block_size in (1, 2, random_int(3, 6, draw)):
        check_lengths(Called(RadixIndex(block_size), block_size), block_size, draw)
        for _ in range(12):  # one prompt in the index, and one that matches part of it
            index = Called(RadixIndex(block_size), block_size)
            tokens = random_tokens(block_size * random_int(1, 8, draw), draw, vocab_size=2)
            blocks = torch.randperm(len(tokens) // block_size, generator=draw).tolist()
            index.insert(tokens, KEY, blocks)
            num_same = random_int(0, len(tokens), draw)
            prompt = tokens[:num_same] + random_tokens(random_int(0, 2 * block_size, draw), draw, vocab_size=2)
            differ = [i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b]
            same = min([*differ, len(tokens), len(prompt)])
            what = f"{same} of {len(prompt)} tokens agree, blocks of {block_size}"
            expect_match(index, prompt, KEY, blocks[: same // block_size], what)


# %% nbgrader={"grade_id": "check_radix_split", "grade": true, "points": 2}
# property: prompts that leave a node in the middle split it; all that was indexed is still found, and nothing twice.
# question: Two prompts share 2 of a node's 3 blocks: how many nodes are there afterwards?
# hint: after a split the upper node has one child, the lower part, with the rest of tokens and blocks and the children.
# explanation: A node with blocks [7, 2, 5]; a prompt agrees in 2 blocks and has one more, 9. Afterwards: an upper node
#   [7, 2] with two children, [5] and [9]. What hung below the old node hangs below [5]. Every block is in exactly one
#   node, and both prompts are found in full.
def check_radix_splits(generator):
    index, A = Called(RadixIndex(4), 4), random_tokens(16, generator)
    B, C, D, E = [1000] * 8, [1001] * 4, [1002] * 4, [1003] * 4
    inside = [*A[:6], 2000, 2000]
    expect_insert(index, [], KEY, [], [], "nothing")
    expect_insert(index, A, KEY, [0, 1, 2, 3], [0, 1, 2, 3], "16 new tokens")
    expect_insert(index, A + B, KEY, [10, 11, 12, 13, 4, 5], [0, 1, 2, 3, 4, 5], "8 more behind them")
    expect_insert(index, A + C, KEY, [10, 11, 12, 13, 6], [0, 1, 2, 3, 6], "4 others behind them")
    expect_insert(index, A[:8] + D, KEY, [10, 11, 7], [0, 1, 7], "leaving after 8 of the 16")
    expect_insert(index, inside, KEY, [10, 8], [0, 8], "leaving after 6, within a block")
    expect_insert(index, A + B[:4] + E, KEY, [10, 11, 12, 13, 14, 9], [0, 1, 2, 3, 4, 9], "leaving after 4 of the 8")
    expect_len(index, 10)
    for tokens, blocks, what in (
        (A, [0, 1, 2, 3], "the 16"),
        (A + B, [0, 1, 2, 3, 4, 5], "the 16 and the 8"),
        (A + B[:4] + E, [0, 1, 2, 3, 4, 9], "the 16, 4 of the 8, then others"),
        (A + C, [0, 1, 2, 3, 6], "the 16 and 4 others"),
        (A[:8] + D, [0, 1, 7], "8 of the 16, then others"),
        (inside, [0, 8], "6 of the 16, then others"),
    ):
        expect_match(index, tokens, KEY, blocks, what)
    expect_insert(index, A, OTHER_KEY, [20, 21, 22, 23], [20, 21, 22, 23], "the 16 under another key")
    expect_len(index, 14)


check_inserts(Called(RadixIndex(4), 4), rng("radix_split"))
check_radix_splits(rng("radix_split"))
with drawn("check_radix_split") as draw:
    check_inserts(Called(RadixIndex(4), 4), draw)
    check_radix_splits(draw)
    for block_size in (1, 2, random_int(3, 6, draw)):
        check_shared(Called(RadixIndex(block_size), block_size), 40, block_size, draw)


# %% nbgrader={"grade_id": "check_radix_evict", "grade": true, "points": 2}
# property: evicted blocks are evictable and continued by no remaining block; as many as asked, if possible.
# question: A leaf node has three blocks: which of them can go first?
# hint: take the last block of a leaf node; a node without blocks leaves the tree, and its parent may be a leaf then.
# explanation: A leaf with blocks [7, 2, 5]: 5 goes first, then 2, then 7; when it is empty the node leaves the tree,
#   and its parent may be a leaf. With 2 in use and 5 not, only 5 can go. A node with children loses nothing: they
#   continue it.
check_evicts(Called(RadixIndex(4), 4), rng("radix_evict"))
check_shrinks(Called(RadixIndex(4), 4), 4, rng("radix_evict"))
evict_some(Called(RadixIndex(2), 2), 3, 2, rng("radix_evict"))
with drawn("check_radix_evict") as draw:
    check_evicts(Called(RadixIndex(4), 4), draw)
    for block_size in (1, 2, random_int(3, 6, draw)):
        check_shrinks(Called(RadixIndex(block_size), block_size), block_size, draw)
        evict_some(Called(RadixIndex(block_size), block_size), 15, block_size, draw)


# %% nbgrader={"grade_id": "check_radix_lru", "grade": true, "points": 1}
# property: of the leaves, the one goes that match or insert used least recently.
# question: A match that ends in the middle of a node: which part of the node was used?
# hint: all nodes on the way are used now; of a node that agrees in part only that part: split it there, in match too.
# explanation: A node [7, 2, 5] from an older call; a match agrees in 2 blocks. 7 and 2 are used now, 5 is as old as
#   before. One moment for the whole node would make 5 look new, and another leaf would be evicted in its place; so the
#   node is divided where the agreement ends.
check_order(Called(RadixIndex(4), 4), rng("radix_lru"))
check_moments(Called(RadixIndex(2), 2))
check_used(Called(RadixIndex(4), 4), rng("radix_lru"))
check_many(Called(RadixIndex(4), 4))
check_two(lambda: Called(RadixIndex(4), 4))
with drawn("check_radix_lru") as draw:
    check_order(Called(RadixIndex(4), 4), draw)
    check_used(Called(RadixIndex(4), 4), draw)
    check_long_use(Called(RadixIndex(2), 2), draw)
### BEGIN HIDDEN TESTS
draw = rng("check_radix_lru, longer")
for block_size in (1, 2, random_int(3, 6, draw)):
    oracle = Called(reference.HashIndex(block_size, Links().link), block_size)
    compare_order(Called(RadixIndex(block_size), block_size), oracle, 60, block_size, draw)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_replay"}
# ## 6. What an index saves
#
# **Build** `replay(index, requests, block_size)`: serve `requests`, a list of pairs `(tokens, key)`, one after another,
# and count. For each request:
#
# 1. Ask the index for its tokens.
# 2. The matched blocks are prompt tokens that need not be computed. But the *last* token of a prompt is always
#    computed: its logits choose the first new token, and no cache holds logits. So at most
#    `(len(tokens) - 1) // block_size` blocks are saved.
# 3. Index all its full blocks: the matched ones, then new ones. The first new block of the replay has the number 0, the
#    next 1, and so on.
#
# Return `(saved, rate)`: the saved tokens of all requests, and their share of all prompt tokens, a number in [0, 1).
# Without requests both are 0. Every prompt has at least one token; one that fills no block has no block to index.
#
# **Hint:** `index` has the methods of part 3. The check passes its own, so this part can be right even if an earlier
# one is not.
#
# **Trap (whole prompt):** a fully indexed prompt of 64 tokens leaves nothing to compute, and a step of 0 tokens gives
# no logits: nano-vllm shipped that bug (its issue 144). With blocks of 16, the last block is recomputed.
#
# **Trap (mean of rates):** the hit rate is saved tokens over prompt tokens. The mean over the requests counts a prompt of
# 20 tokens as much as one of 20,000.


# %% nbgrader={"grade_id": "replay", "solution": true}
def replay(index, requests, block_size):
    """Serves (tokens, key) pairs one after another with an index -> (saved prompt tokens, their share of all)."""
    ### BEGIN SOLUTION
    saved, total, next_block = 0, 0, 0
    for tokens, key in requests:
        matched = index.match(tokens, key)
        saved += min(len(matched), (len(tokens) - 1) // block_size) * block_size
        total += len(tokens)
        num_full = len(tokens) // block_size
        new = range(next_block, next_block + num_full - len(matched))
        next_block += len(new)
        index.insert(tokens[: num_full * block_size], key, [*matched, *new])
    return saved, saved / total if total else 0.0
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_replay", "grade": true, "points": 1}
# property: each request is matched, then indexed; all but its last token can be saved; the rate is over all tokens.
# question: The whole prompt is in the cache: which token must be computed all the same?
# hint: cut the match to (len(tokens) - 1) // block_size blocks when you count, and index the full blocks.
# explanation: Blocks of 4, a prompt of 8 tokens, seen before: both blocks match, but the last token's logits are
#   needed, so at most 7 tokens can be saved, which is 1 full block: 4 tokens. With 9 tokens 8 can be saved. The rate is
#   saved tokens over all tokens of all requests, so long requests count more.
class Scripted:
    """A stand-in for an index: match of request i finds the blocks found[i]; records all calls."""

    LEARNER_SEES = ("match", "insert")

    def __init__(self, found, block_size):
        self.found, self.block_size = found, block_size
        self.matched = []  # (tokens, key) of every match
        self.inserted = []  # (tokens, key, blocks) of every insert that has any

    def match(self, tokens, key):
        number = len(self.matched)
        assert number < len(self.found), f"match was called {number + 1} times for {len(self.found)} requests"
        num_before = sum(len(before) >= self.block_size for before, _ in self.matched)
        right = len(self.inserted) == num_before
        assert right, f"match of request {number}: expected {num_before} inserts before, saw {len(self.inserted)}"
        self.matched.append((list(tokens), key))
        return answer_of(self.found[number], self.block_size)

    def insert(self, tokens, key, blocks):
        if len(tokens):
            self.inserted.append((list(tokens), key, ints_of("insert is given", blocks)))
        return answer_of(list(blocks), self.block_size)


def check_counts(seen, saved, total):
    pair = isinstance(seen, list | tuple) and len(seen) == 2
    assert pair, f"replay returns (saved, rate), saw {seen!r}"
    found, share = seen
    print(f"{total} prompt tokens, {saved} need not be computed: replay says {found} and {share}")
    assert found == saved, f"expected {saved} saved tokens, saw {found}"
    rate = saved / total if total else 0.0
    assert abs(float(share) - rate) < 1e-9, f"expected the rate {saved} of {total} = {rate}, saw {share}"


def check_replayed(requests, found, block_size):
    """replay of these (tokens, key), when match finds these lists of blocks."""
    index = Scripted(found, block_size)
    seen = unchanging(replay)(index, [(list(tokens), key) for tokens, key in requests], block_size)
    assert index.matched == requests, "expected one match for each request, with all its tokens and its key"
    num_new, num_saved, expected = 0, 0, []
    for (tokens, key), blocks in zip(requests, found, strict=True):
        num_full = len(tokens) // block_size
        new = list(range(num_new, num_new + num_full - len(blocks)))
        num_new += len(new)
        num_saved += min(len(blocks), (len(tokens) - 1) // block_size) * block_size
        if num_full:
            expected.append((tokens[: num_full * block_size], key, [*blocks, *new]))
    assert len(index.inserted) == len(expected), f"expected {len(expected)} inserts, saw {len(index.inserted)}"
    for i, (now, then) in enumerate(zip(index.inserted, expected, strict=True)):
        for name, a, b in zip(("tokens", "key", "blocks"), now, then, strict=True):
            assert a == b, f"insert number {i}: expected {name} {b}, saw {a}"
    check_counts(seen, num_saved, sum(len(tokens) for tokens, _ in requests))


def check_found(lengths, num_found, block_size, generator):
    """Prompts of these lengths that find these numbers of blocks."""
    requests = [(random_tokens(n, generator), bytes([i]) * 32) for i, n in enumerate(lengths)]
    names = iter(torch.randperm(1000, generator=generator).tolist())
    check_replayed(requests, [[next(names) for _ in range(n)] for n in num_found], block_size)


# 8 of 10 tokens are in the index; then 12 of 12, of which 8 are saved; then 4 of 4, of which none is; then 4 of 14
check_found([13, 10, 12, 4, 14, 9], [0, 2, 3, 1, 1, 0], block_size=4, generator=rng("replay"))
check_counts(replay(Scripted([], 4), [], 4), saved=0, total=0)
with drawn("check_replay") as draw:
    for block_size in (1, 2, random_int(3, 6, draw), 16):
        blocks = [random_int(0, 6, draw) for _ in range(6)]
        lengths = [n * block_size + random_int(0, block_size - 1, draw) for n in blocks]
        numbers = [random_int(0, n, draw) for n in blocks]
        # certain: nothing found, all of a whole prompt found, some found twice in a row, shorter than a block or whole
        lengths += [
            3 * block_size + block_size // 2,
            4 * block_size,
            4 * block_size,
            5 * block_size,
            max(1, block_size - 1),
        ]
        numbers += [0, 4, 1, 2, 0]
        pairs = [(length, number) for length, number in zip(lengths, numbers, strict=True) if length]
        order = torch.randperm(len(pairs), generator=draw).tolist()
        check_found([pairs[i][0] for i in order], [pairs[i][1] for i in order], block_size, draw)
        tree, next_block, requests, found = Shared(block_size, draw), 0, [], []
        for _ in range(30):
            path_tokens, key, path, new, tail = tree.prompt()
            if random_int(0, 2, draw) == 0 and path:  # all of it is indexed
                new = []
            requests.append((path_tokens + [token for block in new for token in block] + tail, key))
            found.append(tree.known(path))
            tree.grow(key, path, new, list(range(next_block, next_block + len(new))))
            next_block += len(new)
        requests.append(([7] * (60 * block_size), KEY))
        found.append(list(range(50)))
        check_replayed(requests, found, block_size)

# %% [markdown] nbgrader={"grade_id": "text_desk"}
# ### The question from the top
#
# The first two lines answer it. With a different time in front of each, every prompt differs from its first token on,
# and no token is saved: a prefix cache does not look for the same text, it looks for the same *beginning*.
#
# Nothing guarantees a hit. The first request of a prefix computes it; so does the first on another machine, under
# another key, or after the blocks were evicted. And long chats can have a higher rate without any system prompt,
# because each turn repeats the whole conversation before it, as in the third line.
#
# The last lines are one trace on three structures. They differ in granularity: blocks of 16 tokens lose up to 15 of the
# tokens that two prompts share.

# %% nbgrader={"grade_id": "desk"} inferlab={"where": "notebook"}
draw = rng("desk")
system, questions = random_tokens(1000, draw), [random_tokens(50, draw) for _ in range(200)]
templates = {
    "system prompt, question": [system + question for question in questions],
    "time, system prompt, question": [[1000 + i, *system, *question] for i, question in enumerate(questions)],
    "4 chats of 50 turns, no system prompt": [
        [token for question in questions[50 * chat : 50 * chat + turn] for token in question]
        for chat in range(4) for turn in range(1, 51)
    ],
}  # fmt: skip
for name, prompts in templates.items():
    saved, rate = replay(RadixIndex(16), [(tokens, KEY) for tokens in prompts], 16)
    print(f"{name}: {saved:,} of {sum(map(len, prompts)):,} prompt tokens saved = {rate:.1%}")
cut = [system[: random_int(100, 1000, draw)] + question for question in questions]
for name, index, size in (("hash chain, blocks of 16", HashIndex(16, block_hash), 16),
                          ("radix tree, blocks of 16", RadixIndex(16), 16), ("radix tree, blocks of 1", RadixIndex(1), 1)):  # fmt: skip
    saved, rate = replay(index, [(tokens, KEY) for tokens in cut], size)
    print(f"{name}: {saved:,} saved = {rate:.1%}")

# %% [markdown] nbgrader={"grade_id": "text_parts"}
# ## 7. Stable parts first
#
# An application makes its prompts from a template with parts: instructions, tool descriptions, the date, a profile of
# the user, the question. Parts that rarely change belong at the front, parts that change with every request at the end.
#
# **Build** `stable_first(requests)`: in which order the parts should stand. `requests` is a list of dicts, one for each
# request of a log: the names of the parts, in the order of today's template, with their texts. All have the same names.
# Returns the names: the part with the fewest different texts in the log comes first. Parts with equally many keep the
# order of today's template. Two texts are the same only if every character is: with one more space a text is another.
#
# The same text must also be the same tokens. Before you blame the order, look for a trailing space, a JSON object with
# its keys in a different order, a shuffled list of tools, an id in the first line.
#
# **Hint:** `sorted` keeps the order of what it finds equal.
#
# **Trap (first two):** two requests of the same morning have the same date. Compare the whole log.


# %% nbgrader={"grade_id": "stable_first", "solution": true}
def stable_first(requests):
    """Names of a template's parts, those with the fewest different texts first. requests: dicts part -> text."""
    ### BEGIN SOLUTION
    texts = {}
    for request in requests:
        for name, text in request.items():
            texts.setdefault(name, set()).add(text)
    return sorted(texts, key=lambda name: len(texts[name]))
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_parts", "grade": true, "points": 1}
# property: parts stand in order of how many different texts they have; those with equally many keep their order.
# question: Which part of a prompt should come first: one that is always the same, or one that changes?
# hint: collect the different texts of each part in a set, then sort the names by the size of their sets.
# explanation: Requests (system, user, tools) with 1, 3 and 2 different texts: the order is system, tools, user. What is
#   shared by all comes first, since a prefix ends at the first difference. How often a text occurs does not matter,
#   only how many different ones there are.
def check_parts_of(requests, expected):
    seen = unchanging(stable_first)([dict(request) for request in requests])
    numbers = {name: len({request[name] for request in requests}) for name in expected}
    print("different texts:", numbers, "order:", seen)
    assert isinstance(seen, list | tuple), f"expected a list of names, saw {seen!r}"
    assert list(seen) == expected, f"different texts {numbers}: expected the order {expected}, saw {list(seen)}"


check_parts_of(
    [
        {"time": f"9:0{minute}", "system": "Be brief.", "user": user, "tools": "[]", "question": f"Why {minute}?"}
        for minute, user in enumerate(("Ada", "Ada", "Kurt", "Emmy", "Kurt"))
    ],
    ["system", "tools", "user", "time", "question"],
)
long = "Be brief. " * 99
check_parts_of([{"rules": long, "user": "Ada"}, {"rules": long + "!", "user": "Ada"}], ["user", "rules"])
with drawn("check_parts") as draw:
    texts = ["a", "a ", "A", " a", "aa", "\u00e1", "a\u0301", "", " ", "a\n", "b", "2 different texts"]  # all different
    for _ in range(6):
        order = torch.randperm(9, generator=draw).tolist()
        num_texts = (1, 2, 9, 10, 2, 10, 12, 2, 2)
        numbers = {f"part {random_int(100, 999, draw)} {i}": num_texts[i] for i in order}
        requests = [{name: texts[i // 2 % n] for name, n in numbers.items()} for i in range(24)]
        check_parts_of(requests, sorted(numbers, key=numbers.get))
    many = [f"{random_int(0, 9, draw)} {i}" for i in range(400)]
    log = [{"id": many[i], "user": many[i // 2], "day": "x" * 2000 + many[max(0, i - 380)], "site": many[i % 7], "tone": "\r" * (i > 395)}
           for i in range(400)]  # fmt: skip
    check_parts_of(log, ["tone", "site", "day", "user", "id"])
    check_parts_of(log[200:], ["tone", "site", "day", "user", "id"])
    check_parts_of([{"a": str(i), "b": str(max(i, 1)), "c": "c"} for i in range(1000)], ["c", "b", "a"])
    pairs = [
        ("a", "A"),
        ("a\r\nb", "a\nb"),
        ("a 1", "a 2"),
        ("a", "a "),
        ("a", " a"),
        ("a", "a\n"),
        ("", "a"),
        ("", " "),
        ("\u00e1", "a\u0301"),
        ("ab", "ba"),
    ]
    for one, other in pairs:
        for twice, once in (("body", "head"), ("head", "body")):
            for log in ((one, one, other), (one, other, one), (other, one, one)):
                check_parts_of([{twice: text, once: "the same"} for text in log], [once, twice])
                check_parts_of([{once: "the same", twice: text} for text in log], [once, twice])

# %% [markdown] nbgrader={"grade_id": "text_engine"}
# ## 8. Inside the engine
#
# The engine's KV manager queries a *prefix index* when a request is admitted, inserts blocks once their tokens are
# computed, and evicts when no block is free. The cells below use your index there, as `prefix_index`. The manager makes
# the keys, from adapter and salt, counts the references, and recomputes at least the last token of a prompt. The
# scheduler, the model and the sampler stay as they are.
#
# The memory is so small that blocks must be evicted. Your index is checked: at the first wrong result the message names
# the method. The tokens must be those that the engine generates without a cache, and the number of computed tokens is
# counted in the engine's trace.


# %% nbgrader={"grade_id": "engine_parts"}
from reference_impl.assembly.lab_parts import LabEngine, course_llm


class Watched:
    """Your index as the engine's PrefixIndex. A ledger records what each block holds; every result is compared with
    it."""

    def __init__(self, index, block_size):
        self.index, self.block_size = Called(index, block_size), block_size
        self.holds = {}  # block -> (key, its prefix)
        self.num_evicted = 0

    def _prefixes(self, tokens, key):
        size = self.block_size
        return [(key, tuple(tokens[:end])) for end in range(size, len(tokens) + 1, size)]

    def match(self, tokens, key):
        blocks, prefixes = self.index.match(tokens, key), self._prefixes(tokens, key)
        right = len(blocks) <= len(prefixes) and all(map(self._is_held, blocks, prefixes))
        assert right, f"match gave blocks {blocks} for {len(tokens)} tokens; not all of them hold these tokens"
        return blocks

    def insert(self, tokens, key, blocks):
        standing = self.index.insert(tokens, key, blocks)
        assert len(standing) == len(blocks), f"insert got {len(blocks)} blocks and gave {len(standing)}"
        for now, given, prefix in zip(standing, blocks, self._prefixes(tokens, key), strict=True):
            old = [block for block, held in self.holds.items() if held == prefix]
            expected = old[0] if old else given
            assert now == expected, f"insert: block {expected} stands for these {len(prefix[1])} tokens, saw {now}"
            self.holds[now] = prefix
        expect_len(self, len(self.holds))
        return standing

    def evict(self, num_blocks, evictable):
        free_to_go = {block for block in self.holds if evictable(block)}
        gone = self.index.evict(num_blocks, lambda block: block in free_to_go)
        assert len(gone) <= num_blocks, f"evict({num_blocks}) gave {len(gone)} blocks"
        allowed = set(gone) <= free_to_go and len(set(gone)) == len(gone)
        assert allowed, f"evict gave blocks {gone}, which are in use, not indexed, or twice in the list"
        lost = {self.holds.pop(block): block for block in gone}
        for key, prefix in self.holds.values():
            parents = [lost[start] for start in self._prefixes(prefix, key) if start in lost]
            assert not parents, f"evict gave blocks {gone}; blocks that stay indexed continue {parents}"
        expect_len(self, len(self.holds))
        self.num_evicted += len(gone)
        return gone

    def __len__(self):
        return len(self.index)

    def _is_held(self, block, prefix):
        return self.holds.get(block) == prefix


def serve(waves, num_blocks, index=None):
    """Greedy output and computed tokens of each request (prompt, salt). A wave begins when the previous one is done."""
    options = {"block_size": 16, "num_blocks": num_blocks, "prefix_cache": "off"}
    engine = LabEngine(course_llm("draft"), options, prefix_index=index)
    for wave in waves:
        for prompt, salt in wave:
            engine.add(prompt, 2, cache_salt=salt)
        engine.run()
    return list(engine.outputs.values()), list(engine.num_computed().values())


def shared_tokens(waves):
    """For each request, how many prompt tokens a request of an earlier wave with the same salt has in common with it, in
    whole blocks of 16, the last token never."""
    earlier, found = [], []
    for wave in waves:
        for prompt, salt in wave:
            lengths = [0]
            for other, other_salt in earlier:
                differ = [i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b]
                lengths.append(min([*differ, len(other), len(prompt) - 1]) if salt == other_salt else 0)
            found.append(max(lengths) // 16 * 16)
        earlier += wave
    return found


@functools.cache
def without_cache(prompts):
    """The output of each prompt, all in one engine without sharing: {prompt: output}."""
    outputs, _ = serve([[(list(prompt), None) for prompt in prompts]], num_blocks=64)
    return dict(zip(prompts, outputs, strict=True))


def check_served(index, system, questions):
    """Serves questions after a system prompt of 4 blocks, and similar prompts, in 10 blocks of memory."""
    first, second, *others = [(system + question, None) for question in questions]
    other_order = (system[16:32] + system[:16] + questions[0], None)
    waves = [[first], [first], [other_order], [second]]
    waves += [[request, request] for request in others]  # two identical ones at once
    waves += [[(system, None)], [(first[0], "another tenant")]]
    yours = Watched(index, 16)
    seen, computed = serve(waves, 10, yours)
    prompts = [tuple(prompt) for wave in waves for prompt, _ in wave]
    alone = without_cache(tuple(dict.fromkeys(prompts)))
    expected = [alone[prompt] for prompt in prompts]
    assert seen == expected, f"without a cache the engine generates {expected}, with your index it generated {seen}"
    num_tokens = [len(prompt) + len(output) - 1 for prompt, output in zip(prompts, expected, strict=True)]
    saved = [n - c for n, c in zip(num_tokens, computed, strict=True)]
    print(f"of {num_tokens} tokens {saved} were not computed; {yours.num_evicted} blocks were evicted")
    possible = shared_tokens(waves)
    assert saved == possible, f"of {num_tokens} tokens {possible} need not be computed; {saved} were not"
    assert yours.num_evicted, "expected evictions, saw none"
    yours.evict(len(yours), lambda block: True)
    assert not yours.holds, f"in the end no block is in use and all can go; blocks {sorted(yours.holds)} did not"


SYSTEM = (
    "# You write Python for a small library: opening hours, loans and the catalogue. Names are short. Every function has "
    "a docstring of one line. Nothing is printed. Errors are raised as ValueError and say what was expected.\n\n\n"
)
QUESTIONS = (
    "def is_open(day, hour):\n    if day not in range(7):\n        raise ",
    "def is_late(loan, today):\n    return loan.due is not None and ",
    "class Shelf:\n    def __init__(self, number):\n        self.number = ",
)


# %% nbgrader={"grade_id": "check_engine_hash", "grade": true, "points": 1}
# property: with your HashIndex the engine gives the same text and computes every shared full block once.
# question: Which method does the message name, and with which blocks was it called?
# hint: the message names the method that gave the first wrong answer; make that part's own checks pass first.
# explanation: The engine matches each prompt, computes what is missing, inserts, and evicts when memory is short. A
#   match that is too long gives wrong text, one that is too short gives right text and too much work. The first answer
#   that is wrong is named; its own check shows the same on a small case.
system = course_llm("draft").encode(SYSTEM)[:64]
print("a system prompt of", len(system), "tokens")
check_served(HashIndex(16, block_hash), system, [course_llm("draft").encode(text) for text in QUESTIONS])
### BEGIN HIDDEN TESTS
draw = rng("check_engine")
questions = [random_tokens(random_int(20, 30, draw), draw) for _ in range(3)]
check_served(HashIndex(16, block_hash), random_tokens(64, draw), questions)
### END HIDDEN TESTS


# %% nbgrader={"grade_id": "check_engine_radix", "grade": true, "points": 1}
# property: with your RadixIndex the engine gives the same text and computes every shared full block once.
# question: Which method does the message name, and had a node been split before?
# hint: the message names the method that gave the first wrong answer; make that part's own checks pass first.
# explanation: The engine does with your tree what it does with the hash index, and both must give the same answers. If
#   only the tree fails, look at what only it does: splitting a node, and taking blocks from the end of one.
system = course_llm("draft").encode(SYSTEM)[:64]
print("a system prompt of", len(system), "tokens")
check_served(RadixIndex(16), system, [course_llm("draft").encode(text) for text in QUESTIONS])
### BEGIN HIDDEN TESTS
draw = rng("check_engine")
questions = [random_tokens(random_int(20, 30, draw), draw) for _ in range(3)]
check_served(RadixIndex(16), random_tokens(64, draw), questions)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_measure"}
# ## 9. Tokens and seconds
#
# A user notices a hit in the time to first token. The cell below gives the engine a long prompt and then the same
# prompt with a different end, with and without your tree. The tokens are exact. The seconds depend on this machine, so
# they are printed and never checked. The new tokens still attend to the whole prefix: a hit saves computing it, not
# reading it.

# %% nbgrader={"grade_id": "measure"} inferlab={"where": "notebook"}
encode = course_llm("draft").encode
long_prompt = (encode(SYSTEM) * 20)[:960]
serve([[(long_prompt, None)]], num_blocks=128)  # not timed: the first pass of this length is slower
options = {"block_size": 16, "num_blocks": 128, "prefix_cache": "off"}
for name, index in (("without a cache", None), ("with your RadixIndex", Called(RadixIndex(16), 16))):
    engine = LabEngine(course_llm("draft"), options, prefix_index=index)
    for i, end in enumerate(QUESTIONS[:2]):
        engine.add(long_prompt + encode(end), max_tokens=1)
        engine.run()
        ttft = engine.trace.metrics(str(i)).ttft
        computed = engine.num_computed()[str(i)]
        print(f"{name}, request {i}: {computed} tokens computed, first token after {ttft:.3f} s")

# %% [markdown] nbgrader={"grade_id": "text_milestone"}
# ## 10. Your index serves a text
#
# The same prompt comes twice, and your `RadixIndex` finds the blocks of the first for the second, which computes only
# the rest. With all checks passed, `inferlab lab check` shows this, too.

# %% nbgrader={"grade_id": "milestone"} inferlab={"where": "milestone"}
from reference_impl.assembly.lab_parts import show_served

index = Watched(RadixIndex(4), 4)
options = {"block_size": 4, "num_blocks": 32, "prefix_cache": "off"}
engine = LabEngine(course_llm(), options, prefix_index=index)
for _ in range(2):
    engine.add(course_llm().encode('class Queue:\n    def empty(self):\n        """'), 16)
    engine.run()
show_served("Your index just served this text twice", engine, course_llm())
first, second = engine.num_computed().values()
print(f"The first request computed {first} tokens, the second {second}: your index found the others.")

# %% [markdown] nbgrader={"grade_id": "extensions"}
# ## Further (not graded)
#
# Add cells below and try one.
#
# - **No scan.** Your `evict` looks at all leaves for every block. Keep them in a heap or in order of use instead. What
#   must happen when a leaf is used, and when it gets a child? Time both with 100,000 blocks.
# - **Token by token.** Let nodes of the tree end anywhere, not only at block boundaries. Which node owns a block that
#   extends beyond the end of a node?
# - **Another policy.** Evict the block that was used least often, or the one whose recomputation costs least. For which
#   of the traces in part 6, with a small memory, is that better than least recently used?
# - **Two machines.** Send the requests of part 6 to two indexes, alternately, and then by the hash of their first
#   block. How many tokens does each policy save? (Chapter 15.)
