"""What a page's bytes are, whether two workers have the same, and which of them each rank of a layout has.

    page     layer 0 ... layer n - 1, seal
    layer    KV head 0 ... KV head n - 1
    head     keys, values, scales of keys, of values (where the format has scales), token by token

So a tensor-parallel rank has a run of heads in each layer, and a pipeline's stage a run of layers. A rank's part is
these runs, one after another: a page of a model that has only its heads and layers. Ranks of any two layouts exchange
runs of bytes, and no number is converted.

With more ranks than KV heads several ranks have the same one. The first of them writes it, all of them read it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

from reference_impl.features.parallel.shares import head_shares
from reference_impl.features.transfer.seals import SEAL_BYTES
from reference_impl.interfaces import KVSpec
from reference_impl.interfaces.pages import page_tokens_of

LAYOUT = 3  # version of the order of a page's bytes
_LONGEST_NAME = 256  # characters


@dataclass(frozen=True)
class PageFormat:
    """What the pages of a model in a cache are. Workers exchange pages if they have the same, whatever their blocks and
    ranks. fingerprint: of the model, see `ModelFacts`. kv_format: the name of the cache's format. dtype: the model's,
    torch's name. ValueError for anything else, since a peer may say what it likes.

    page_bytes: of a page as stores and transports move it, with its seal.
    """

    fingerprint: str
    kv_format: str
    dtype: str
    num_layers: int
    num_kv_heads: int  # of the whole model
    head_dim: int
    page_tokens: int
    page_bytes: int
    layout: int = LAYOUT

    def __post_init__(self) -> None:
        for each in fields(self):  # their types are texts here, as they stand above
            value = getattr(self, each.name)
            if each.type == "str" and not (isinstance(value, str) and len(value) <= _LONGEST_NAME):
                raise ValueError(f"{each.name}: expected a text of at most {_LONGEST_NAME} characters, got {value!r}")
            if each.type == "int" and not (type(value) is int and 0 < value < 1 << 40):
                raise ValueError(f"{each.name}: expected a whole number of at least 1, got {value!r}")
        heads = self.num_layers * self.num_kv_heads
        if self.page_bytes <= SEAL_BYTES or (self.page_bytes - SEAL_BYTES) % heads:
            raise ValueError(
                f"page_bytes: expected {self.num_layers} layers of {self.num_kv_heads} heads of equal size and a seal "
                f"of {SEAL_BYTES} bytes, got {self.page_bytes}"
            )

    @property
    def head_bytes(self) -> int:
        """The bytes of one head of one layer of a page."""
        return (self.page_bytes - SEAL_BYTES) // (self.num_layers * self.num_kv_heads)

    def check_meets(self, other: PageFormat) -> None:
        """Raises ValueError, with each difference, unless pages of the other are pages of this one."""
        mine, its = asdict(self), asdict(other)
        wrong = [f"{name}: {mine[name]!r} here, {its[name]!r} there" for name in mine if mine[name] != its[name]]
        if wrong:
            raise ValueError(
                "these two workers cannot exchange pages of keys and values; start them from the same checkpoint with "
                f"the same dtype, kv_dtype and version, and blocks of multiples of 16 tokens. {'; '.join(wrong)}"
            )

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes | memoryview) -> PageFormat:
        """ValueError for anything but what `to_json` gives."""
        try:
            said = json.loads(bytes(content))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"expected the format of a worker's pages as JSON: {error}") from None
        names = {each.name for each in fields(cls)}
        if not isinstance(said, dict) or set(said) != names:
            found = sorted(said) if isinstance(said, dict) else type(said).__name__
            raise ValueError(f"expected the format of a worker's pages, with {', '.join(sorted(names))}, got {found}")
        return cls(**said)

    def root(self) -> bytes:
        """What the keys of such pages begin with, so that they differ from those of others in the same store."""
        return b"pages " + repr(self).encode()


def page_format(
    spec: KVSpec, num_layers: int, num_kv_heads: int, *, fingerprint: str, kv_format: str, dtype: str
) -> PageFormat:
    """The format of a model's pages. spec: of a worker's cache, whatever part of the layers and heads it has.
    num_layers, num_kv_heads: the whole model's. ValueError for a cache of anything but keys and values of all tokens.
    """
    if spec.kind != "kv" or spec.window is not None:
        what = spec.kind if spec.window is None else f"a window of {spec.window} tokens"
        raise ValueError(f"pages: expected a cache of keys and values of all tokens, got {what}")
    size = page_tokens_of(spec.block_size)
    whole = replace(spec, num_layers=num_layers, num_kv_heads=num_kv_heads, layers=(), block_size=size)
    return PageFormat(
        fingerprint, kv_format, dtype, num_layers, num_kv_heads, spec.head_dim, size, whole.bytes_per_block + SEAL_BYTES
    )


@dataclass(frozen=True)
class RankPart:
    """What a rank has of each page. is_writer: whether it writes it; ranks with the same heads have one writer."""

    layers: range
    heads: range
    is_writer: bool = True


class Run(NamedTuple):
    """Bytes of a page that lie side by side, in the whole page and in a rank's part of it. Offsets from its start."""

    in_page: int
    in_part: int
    length: int


class Move(NamedTuple):
    """Bytes that go from the part of one rank to the part of another."""

    source: int  # rank
    target: int
    in_source: int
    in_target: int
    length: int


def rank_parts(format: PageFormat, num_heads: int, tensor_ranks: int, stages: Sequence[range]) -> list[RankPart]:
    """The part of each rank of a layout, stage by stage. num_heads: query heads, which say where KV heads are repeated.
    stages: the layers of each, see `stages_of`. ValueError for stages that are not all layers in order, and for a
    number of ranks that does not fit the heads."""
    layers = [layer for stage in stages for layer in stage]
    if layers != [*range(format.num_layers)] or not all(stages):
        raise ValueError(
            f"stages: expected all {format.num_layers} layers in order, in each at least one, got {stages}"
        )
    shares = [keys for _, keys in head_shares(num_heads, format.num_kv_heads, tensor_ranks)]
    heads = [range(share.start, share.start + share.length) for share in shares]
    return [
        RankPart(stage, own, is_writer=heads.index(own) == rank) for stage in stages for rank, own in enumerate(heads)
    ]


def part_bytes(format: PageFormat, part: RankPart) -> int:
    """The bytes of a rank's part of a page, without a seal."""
    return len(part.layers) * len(part.heads) * format.head_bytes


def runs(format: PageFormat, part: RankPart) -> list[Run]:
    """The runs of a page that a rank has, in order, as few as there can be: one where it has all heads."""
    whole, own = format.num_kv_heads * format.head_bytes, len(part.heads) * format.head_bytes
    if len(part.heads) == format.num_kv_heads:
        return [Run(part.layers.start * whole, 0, len(part.layers) * whole)]
    first = part.heads.start * format.head_bytes
    return [Run(layer * whole + first, at * own, own) for at, layer in enumerate(part.layers)]


def moves(format: PageFormat, sources: Sequence[RankPart], targets: Sequence[RankPart]) -> list[Move]:
    """What goes from the ranks of one layout to those of another, so that each target's part is whole: of every byte
    that it reads one move. In order of targets."""
    writers = [(rank, run) for rank, part in enumerate(sources) if part.is_writer for run in runs(format, part)]
    found = []
    for target, part in enumerate(targets):
        for wanted in runs(format, part):
            for source, run in writers:
                first = max(wanted.in_page, run.in_page)
                length = min(wanted.in_page + wanted.length, run.in_page + run.length) - first
                if length > 0:
                    in_source = first - run.in_page + run.in_part
                    in_target = first - wanted.in_page + wanted.in_part
                    found.append(Move(source, target, in_source, in_target, length))
    return found
