"""Blocks of the paged cache: what one holds, and what must be moved between them before a step."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple

BlockId = int
NO_BLOCK: BlockId = -1  # in a block table: these positions have fallen out of the window and are never read again


KVKind = Literal["kv", "latent", "state"]
_COPIES: dict[KVKind, int] = {"kv": 2, "latent": 1, "state": 1}


@dataclass(frozen=True)
class KVSpec:
    """What the cache of one KV group holds, and in what unit it is handed out. Widths are in bits: a cache of 4 bits
    has two values in a byte.

    A group is a set of layers that keep the same positions. All groups of a model have the same number of layers, so
    that a block of one pool can serve any of them.

    kind: what each layer keeps.
        kv       for each token a key and a value for each KV head: head_dim values each
        latent   for each token one vector, from which keys and values of all heads are computed (MLA, DeepSeek-V2):
                 num_kv_heads 1, head_dim kv_lora_rank + rope_dim
        state    for each request num_kv_heads times head_dim values, however long it is (Mamba, linear attention:
                 head_dim is all that a head keeps). A block holds the state of one request, whatever block_size is
    """

    num_layers: int  # in this group; in a pipeline's stage there may be fewer, and a block has room for so many
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens in a block
    _: KW_ONLY
    bits_per_value: int
    layers: tuple[int, ...] = ()  # which layers of the model; () is the first num_layers
    window: int | None = None  # a query at position p sees p - window + 1 ... p; None: everything before it
    bits_per_scale: int = 0  # beside each group of values
    bits_per_zero_point: int = 0  # beside each scale
    group_size: int | None = None  # values of a head that share a scale; None: all of them
    kind: KVKind = "kv"

    def __post_init__(self) -> None:
        _check_spec(self)

    @property
    def bits_per_head(self) -> int:
        """The bits of one head's key, value, latent or state, with its scales and zero points."""
        groups = 1 if self.group_size is None else self.head_dim // self.group_size
        return self.head_dim * self.bits_per_value + groups * (self.bits_per_scale + self.bits_per_zero_point)

    @property
    def bits_per_token(self) -> int:
        """The bits that each token adds: 2 (keys and values; latent 1, state 0) x layers x KV heads x bits_per_head."""
        return 0 if self.kind == "state" else self._bits_of_all_heads

    @property
    def bytes_per_token(self) -> int:
        """The bytes that each token adds. ValueError where its bits are not whole bytes."""
        if self.bits_per_token % 8:
            raise ValueError(f"bytes_per_token: a token has {self.bits_per_token} bits here, ask for bits_per_token")
        return self.bits_per_token // 8

    @property
    def bytes_per_block(self) -> int:
        """The bytes of a block: of block_size tokens, or of one whole state."""
        return self._bits_per_block // 8

    def bytes_per_request(self, num_tokens: int) -> int:
        """The bytes of the blocks that a request of so many tokens needs while its last one is computed: the blocks
        with the positions that this token sees, its own among them."""
        if self.kind == "state":
            return self.bytes_per_block
        first = 0 if self.window is None else max(0, num_tokens - self.window)
        return (-(-num_tokens // self.block_size) - first // self.block_size) * self.bytes_per_block

    @property
    def _bits_of_all_heads(self) -> int:
        return _COPIES[self.kind] * self.num_layers * self.num_kv_heads * self.bits_per_head

    @property
    def _bits_per_block(self) -> int:
        return self._bits_of_all_heads * (1 if self.kind == "state" else self.block_size)


# Fields of KVSpec that are whole numbers, and the least each may be.
_LEAST = {
    "num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "block_size": 1, "bits_per_value": 1, "window": 1,
    "bits_per_scale": 0, "bits_per_zero_point": 0, "group_size": 1,
}  # fmt: skip


def _check_spec(spec: KVSpec) -> None:
    if not isinstance(spec.kind, str) or spec.kind not in _COPIES:
        raise ValueError(f"kind: expected one of {', '.join(_COPIES)}, got {spec.kind!r}")
    for name, least in _LEAST.items():
        value = getattr(spec, name)
        if value is None and name in ("window", "group_size"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    if len(spec.layers) > spec.num_layers:
        raise ValueError(f"layers: expected at most {spec.num_layers} (num_layers), or none, got {spec.layers}")
    if spec.bits_per_zero_point and not spec.bits_per_scale:
        raise ValueError(
            f"bits_per_zero_point: expected 0 without scales (bits_per_scale 0), got {spec.bits_per_zero_point}"
        )
    if spec.group_size is not None and spec.head_dim % spec.group_size:
        raise ValueError(f"group_size: expected a divisor of head_dim {spec.head_dim}, got {spec.group_size}")
    if spec.kind == "latent" and spec.num_kv_heads != 1:
        raise ValueError(f"num_kv_heads: expected 1, since heads share a latent, got {spec.num_kv_heads}")
    if spec.kind == "state" and spec.window is not None:
        raise ValueError(f"window: expected None, since a state has no positions, got {spec.window}")
    if spec._bits_per_block % 8:
        raise ValueError(
            f"expected a block of whole bytes, got {spec._bits_per_block} bits: choose a block_size, group_size or "
            "widths that make it a multiple of 8"
        )


class BlockPair(NamedTuple):
    """The contents of block src go to block dst."""

    src: BlockId
    dst: BlockId


class Page(NamedTuple):
    """The keys and values of consecutive tokens in a block, and their key in a page store: see `page_keys` in
    features/transfer/stored.py. part: which page of the block it is."""

    key: bytes
    block: BlockId
    part: int = 0


class PageTransfer(NamedTuple):
    """Pages in transfer between the device and a page store. A transfer begins with a step and ends with the reply to
    that step or a later one. Until then nothing else may write to its pages, and its blocks have an owner."""

    id: int
    pages: tuple[Page, ...]


class TransferEnd(NamedTuple):
    """The end of a `PageTransfer`. error: why the pages did not arrive; None if they did."""

    id: int
    error: str | None = None


@dataclass(frozen=True)
class Transfers:
    """What must be moved before a step writes anything, in this order: out to the host, within the device, in again.

    Loads and saves only begin before the step writes; `Reply.transfers` says when they ended.
    """

    swap_out: tuple[BlockPair, ...] = ()  # device -> host
    copies: tuple[BlockPair, ...] = ()  # device -> device (copy-on-write)
    swap_in: tuple[BlockPair, ...] = ()  # host -> device
    evicted: tuple[BlockId, ...] = ()  # nothing to move: blocks of the prefix cache that were given to other requests
    loads: tuple[PageTransfer, ...] = ()  # store -> device
    saves: tuple[PageTransfer, ...] = ()  # device -> store
    cancelled: tuple[int, ...] = ()  # transfers that are no longer wanted; each of them ends, too

    @property
    def is_work(self) -> bool:
        """Whether these transfers need a step, even one without rows."""
        return bool(self.swap_out or self.copies or self.swap_in or self.loads or self.saves or self.cancelled)
