"""What an engine reports: one event for each arrival, each step and each end. Every metric is derived from them.

Times are seconds on the engine's clock. A step is recorded once; per-token times are derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from reference_impl.interfaces.blocks import TransferEnd, Transfers
from reference_impl.interfaces.plan import Row

if TYPE_CHECKING:
    from reference_impl.interfaces.collectives import RankTime


@dataclass(frozen=True)
class RequestArrived:
    time: float
    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True)
class RequestFinished:
    time: float
    request_id: str
    reason: str  # stop | length | abort
    num_output_tokens: int


@dataclass(frozen=True)
class StepDone:
    """One forward pass: what each request computed, which of them got tokens, and what was left."""

    step_id: int
    started_at: float
    finished_at: float
    rows: tuple[Row, ...]
    preempted: tuple[str, ...]
    num_waiting: int
    num_running: int
    num_free_blocks: int  # available: free ones, and cached ones not in use
    transfers: Transfers = field(default_factory=Transfers)
    admitted: tuple[tuple[str, int], ...] = ()  # (request, tokens it found in the prefix cache)
    attention: tuple[str, ...] = ()  # what computed it, as the attention backend says: "flash_attention", "sdpa", ...
    transfers_ended: tuple[TransferEnd, ...] = ()  # of pages, with why if they did not arrive
    num_sampled: tuple[int, ...] = ()  # for each row; () where no drafts were ever verified: 1 for a row that samples
    layers_moved: Mapping[int, int] = field(default_factory=dict)  # see `Reply`
    num_undrafted: int = 0  # see `StepPlan`
    acceptance: str = "exact"  # see `StepPlan`
    num_draft_levels: int = 0  # see `StepPlan`
    ranks: tuple[RankTime, ...] = ()  # see `Reply`

    @property
    def num_new_tokens(self) -> tuple[int, ...]:
        """How many tokens the request of each row got, with those that a stop string then took back."""
        return self.num_sampled or tuple(int(row.samples) for row in self.rows)


Event = RequestArrived | RequestFinished | StepDone


class TakesEvents(Protocol):
    """Takes an engine's events: a trace, or a part of your own."""

    def add(self, event: Event) -> None: ...
