"""One step for the scheduler: requests by name, what is computed of each, and what came back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from reference_impl.interfaces.blocks import TransferEnd, Transfers
from reference_impl.interfaces.request import TokenLogprobs

if TYPE_CHECKING:
    from reference_impl.interfaces.collectives import RankTime


class Row(NamedTuple):
    """One request's share of a step: it computes tokens [start, start + num_tokens).

    samples: true when the row reaches the request's last token, so that its logits choose the next one; false for a
    held request that computes its tokens again, where what follows is given.
    num_drafts: how many draft tokens are computed behind them: `drafts` or, where that is empty, those of the worker's
    proposer. Drafts that equal what their position samples are kept, up to the first that does not: a row that samples
    gives 1 to 1 + num_drafts tokens.
    """

    request_id: str
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
class StepPlan:
    """One forward pass, as scheduled."""

    step_id: int
    rows: tuple[Row, ...]
    preempted: tuple[str, ...] = ()
    transfers: Transfers = field(default_factory=Transfers)
    admitted: tuple[tuple[str, int], ...] = ()  # (request, tokens it found in the prefix cache)
    num_undrafted: int = 0  # rows that could have drafts and have none, since they would lose (adaptive_drafts)
    acceptance: str = "exact"  # how drafts are verified; "typical" is lossy: texts are not those of plain decoding
    keeps_up: bool = True  # whether a draft model computes the step's tokens, too, so that it can go on
    num_draft_levels: int = 0  # of a draft tree, at most; 0: drafts are chains

    @property
    def num_tokens(self) -> int:
        """The tokens of all rows, with drafts."""
        return sum(row.length for row in self.rows)


@dataclass
class StepOutput:
    """What came back of a step. tokens: {request id: sampled tokens, in order}, more than one only where drafts were
    verified. Times in seconds on the engine's clock."""

    tokens: dict[str, tuple[int, ...]]
    logprobs: dict[str, tuple[TokenLogprobs, ...]]
    started_at: float
    finished_at: float
    attention: tuple[str, ...] = ()  # what computed it, by the backend's own names
    transfers: tuple[TransferEnd, ...] = ()  # this one and the next: see `Reply`
    layers_moved: Mapping[int, int] = field(default_factory=dict)
    drafting: float = 0.0
    ranks: tuple[RankTime, ...] = ()
