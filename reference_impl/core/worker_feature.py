"""What a worker does besides: biases, penalties, masks, drafts and more are features, in a list.

Of each step that needs it a feature gives a part: what it keeps for this step, with some of these hooks, which are
called for all parts in the order of the worker's features:

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
        """The arrays are in run.tensors."""

    def after_model(self, run: Any) -> None:
        """run.logits has those of all tokens that were asked for."""

    def needs_logits(self, run: Any) -> bool:
        """Whether a graph must not sample by itself: all that follows here works on logits, or on what is drawn."""
        return False

    def waits(self, run: Any) -> bool:
        """Whether sampling has to wait, until `StepRun.end` is called again."""
        return False

    def move_scores(self, run: Any) -> None:
        """May replace run.scores, never run.logits."""

    def chosen(self, run: Any, tokens: Tensor) -> Tensor:
        """tokens [logits] int64: what the sampler chose."""
        return tokens

    def verify(self, run: Any, tokens: Tensor) -> None:
        """May set run.kept."""

    def taken(self, run: Any, tokens: Tensor) -> None:
        """After run.kept is known."""

    def ended(self, run: Any) -> None:
        """All is launched, and the slots' lengths have not grown yet."""


@dataclass(frozen=True)
class DraftPositions:
    """Where a draft model's logits [rows, vocab_size] stand. slots [rows], with their requests; positions [rows]: of
    the tokens that are drawn from them; before: the drafts of this step that come before each of these, as a number,
    of tokens that lie in its slot, or themselves, [rows, number]."""

    slots: Sequence[int]
    requests: Sequence[Opened]
    positions: Tensor
    before: int | Tensor
    tables: Slots


class WorkerFeature:
    """One for a worker. every_step: whether all steps need it. slots: of open requests that do."""

    every_step = False
    slots: Set[int] = frozenset()

    def part(self, run: Any) -> StepPart | None:
        """None: this step does not need it. Asked for a step with drafts or masks, too."""
        return None

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        """A step opens or closes slots, or appends tokens. opened: as step.opened, with all tokens."""

    def move_blocks(self, transfers: Transfers) -> None:
        """The cache's blocks were moved like this."""

    def move_pages(self, step: Step) -> None:
        """Blocks were moved, and the step's rows write to none yet."""

    def move_draft_scores(self, scores: Tensor, at: DraftPositions) -> Tensor:
        """As `StepPart.move_scores`, of a draft model's logits: a new tensor, or the same."""
        return scores

    def explain(self, step: Step, at: int) -> str:
        """Why there is no finite number to sample from for a row of a step."""
        return ""

    def collected(self, reply: Reply) -> Reply:
        """The reply to a step, before it is given back."""
        return reply

    def close(self) -> None:
        """The worker is closed."""


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
