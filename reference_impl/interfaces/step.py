"""One step for a worker: messages about slots, and the reply. Plain values, which can be pickled."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from reference_impl.interfaces.blocks import BlockId, TransferEnd, Transfers
from reference_impl.interfaces.request import Pooling, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from reference_impl.interfaces.collectives import RankTime


class Opened(NamedTuple):
    """A request gets a slot of the worker, its own until it is closed."""

    slot: int
    request_id: str  # for messages, profiles and an attention backend's own books; nothing is looked up by it
    tokens: array[int]  # "q"; all that are known, less those of `fork_of`
    num_prompt_tokens: int
    num_computed_tokens: int  # of these, keys and values are in the cache
    sampling: SamplingParams
    seed: int
    sample_index: int
    holds: bool  # what is sampled for it is reported, and not part of it
    pooling: Pooling | None = None  # its rows do not sample: what they add to `Reply.pooled`
    # (slot, n): before `tokens` come the first n that this slot had before the step, also if the step closes it; none
    # of them in flight. What a proposer gets has all tokens, and None here.
    fork_of: tuple[int, int] | None = None


class Appended(NamedTuple):
    """Tokens of a slot, from position `start` on, that the worker did not sample."""

    slot: int
    start: int
    tokens: tuple[int, ...]


class Rewound(NamedTuple):
    """A slot is rolled back to fewer computed tokens: the next row computes some again."""

    slot: int
    num_computed_tokens: int


class TableUpdate(NamedTuple):
    """The block table of a slot in a KV group, from index `start` on."""

    slot: int
    group: int
    start: int
    blocks: tuple[BlockId, ...]


class StepRow(NamedTuple):
    """A slot's share of a step, like `Row` for a request. While an earlier step that verifies drafts of this slot runs,
    `start` counts all of them as right; the worker goes by what is in the slot."""

    slot: int
    start: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0
    drafts: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """The number of tokens computed, with drafts."""
        return self.num_tokens + self.num_drafts


@dataclass(frozen=True)
class Step:
    """What a worker gets for one step; it takes effect in the order of the fields. Plain values: it can be pickled.

    An opened request keeps its slot, so nothing about it is sent twice, and the size of a step does not depend on the
    length of its contexts.
    """

    step_id: int
    closed: tuple[int, ...] = ()  # slots whose requests ended, or lost their blocks
    opened: tuple[Opened, ...] = ()
    appended: tuple[Appended, ...] = ()
    rewound: tuple[Rewound, ...] = ()
    tables: tuple[TableUpdate, ...] = ()
    transfers: Transfers = field(default_factory=Transfers)
    rows: tuple[StepRow, ...] = ()
    takes_masks: bool = False  # nothing is sampled before `Masks` arrive
    keeps_up: bool = True  # see `StepPlan`


@dataclass(frozen=True)
class Masks:
    """The second half of a step whose rows sample under a grammar: what may be sampled depends on the tokens of the
    step before, which may still run while this one is submitted."""

    step_id: int
    # For each row a mask (see `Grammar.allowed`); for one with drafts also one behind each draft, one after another.
    # None: anything may be sampled.
    rows: tuple[bytes | None, ...]


@dataclass(frozen=True)
class Reply:
    """What came back of a step. tokens: for each row those that were sampled for it, the drafts that were right and one
    more; logprobs: if requested. Times in seconds on the engine's clock."""

    step_id: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]]  # {row: of its tokens}
    started_at: float
    finished_at: float
    attention: tuple[str, ...] = ()  # what computed it, by the backend's own names
    # {row: (position, reports)}: reports on the prompt tokens behind this position, which the row computed.
    prompt_logprobs: Mapping[int, tuple[int, tuple[TokenLogprobs, ...]]] = field(default_factory=dict)
    # {row: (position, values)}: for a slot with pooling "mean" the sum of the hidden states from this position on that
    # the row computed; with "last" that of the prompt's last token, from the row that computed it. float64, "d".
    pooled: Mapping[int, tuple[int, array[float]]] = field(default_factory=dict)
    transfers: tuple[TransferEnd, ...] = ()  # those that ended since the reply before, whichever step they began with
    # {row: why there is no token for it}: its logits are not all finite. A 0 stands among its tokens.
    errors: Mapping[int, str] = field(default_factory=dict)
    # {transfer: how many more layers of its pages have moved since the reply before}, of those that have not ended.
    layers_moved: Mapping[int, int] = field(default_factory=dict)
    drafting: float = 0.0  # seconds of the step in which a draft model ran
    broken_drafts: int = 0  # drafts from logits that are not numbers
    ranks: tuple[RankTime, ...] = ()  # of each rank, where a model is divided among several
