"""What a worker does besides: biases, penalties, masks, drafts and more are features, in a list.

For each step that needs it, a feature makes a part, which keeps what the feature needs for this step and has some of
these hooks. They are called for all parts in the order of the worker's features:

    lay_out        the batch's arrays, before they are copied to the device
    before_model
                   the forward pass
    after_model
    waits          sampling waits until the worker is told to go on
    move_scores
                   the sampler
    chosen         tokens as they were drawn -> those that stand there
    verify         which of them are their requests'
    taken          they are on their way to the host
    ended

Features and parts know nothing of one another: what two of them need is in the run.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from reference_impl.interfaces import Opened, Reply, Step, Transfers

if TYPE_CHECKING:
    from reference_impl.core.slots import Slots


class StepPart:
    """What a feature does in one step. run: the step's `StepRun`."""

    starts_later = False  # whether `StepRun.start` is called by the feature, and not by `Worker.submit`

    def lay_out(self, run: Any) -> None:
        """May replace run.batch, and add to its arrays."""

    def before_model(self, run: Any) -> None:
        """Called before the forward pass: the arrays are in run.tensors."""

    def after_model(self, run: Any) -> None:
        """Called after the forward pass: run.logits has those of all tokens that were asked for."""

    def needs_logits(self, run: Any) -> bool:
        """Whether a graph must not sample by itself: all that follows here works on logits, or on what is drawn."""
        return False

    def waits(self, run: Any) -> bool:
        """Whether sampling has to wait, until `StepRun.end` is called again."""
        return False

    def move_scores(self, run: Any) -> None:
        """May replace run.scores, never run.logits."""

    def chosen(self, run: Any, tokens: Tensor) -> Tensor:
        """The tokens [logits] int64 that the sampler chose, or others in their place."""
        return tokens

    def verify(self, run: Any, tokens: Tensor) -> None:
        """May set run.kept, which of the sampled tokens follow from those before."""

    def taken(self, run: Any, tokens: Tensor) -> None:
        """Called when run.kept is known and the tokens are on their way to the host."""

    def ended(self, run: Any) -> None:
        """Called when all is launched, before the slots' lengths grow."""


@dataclass(frozen=True)
class DraftPositions:
    """The positions of a draft model's logits [rows, vocab_size]. slots, requests [rows]; positions [rows]: where the
    tokens drawn from them stand; before: the drafts of this step that come before each of these, as their number, if
    they lie in its slot, or as the tokens themselves, [rows, number]."""

    slots: Sequence[int]
    requests: Sequence[Opened]
    positions: Tensor
    before: int | Tensor
    tables: Slots


class WorkerFeature:
    """What a worker does besides. every_step: whether all steps need it. slots: those of open requests that need it."""

    every_step = False
    slots: Set[int] = frozenset()

    def part(self, run: Any) -> StepPart | None:
        """The feature's part for this step; None: the step does not need it. Also asked for steps with drafts or
        masks."""
        return None

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        """Called when a step opens or closes slots, or appends tokens. opened: step.opened, with all tokens."""

    def move_blocks(self, transfers: Transfers) -> None:
        """Called when the cache's blocks were moved."""

    def move_pages(self, step: Step) -> None:
        """Called when blocks were moved, before the step's rows write to any."""

    def move_draft_scores(self, scores: Tensor, at: DraftPositions) -> Tensor:
        """The scores of a draft model, changed as `StepPart.move_scores` changes the target's: a new tensor, or the
        same."""
        return scores

    def explain(self, step: Step, at: int) -> str:
        """Why a row of a step has no finite number to sample from."""
        return ""

    def collected(self, reply: Reply) -> Reply:
        """The reply to a step, or another in its place."""
        return reply

    def close(self) -> None:
        """Called when the worker is closed."""


class ForRequests(WorkerFeature):
    """A feature that some requests ask for."""

    slots: set[int]

    def __init__(self) -> None:
        self.slots = set()

    def is_asked(self, request: Opened) -> bool:
        """Whether this request asks for it."""
        return False

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        self.slots.difference_update(step.closed, [new.slot for new in opened])
        self.slots.update(new.slot for new in opened if self.is_asked(new))
