"""The drafts of one step in a worker: see worker.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from reference_impl.core.batch import lay_out
from reference_impl.core.staging import mark, to_device, to_host
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import StepPart
from reference_impl.features.grammars.drafts import AskMasks, Drafted, DraftsLater
from reference_impl.features.speculative.chain import Chain
from reference_impl.features.speculative.drafts import put_drafts
from reference_impl.features.speculative.sources import NamedDrafts
from reference_impl.features.speculative.verified_trees import VerifiedTrees
from reference_impl.interfaces import StepRow

if TYPE_CHECKING:
    from reference_impl.features.speculative.worker import Drafting


class DraftPart(StepPart):
    """The drafts of a step: made, verified and rolled back. rows: the step's, with their starts as far as the host
    knows them. accepted [R]: how many drafts of each row with drafts are kept. q [E, vocab_size]: the distributions
    that the drafts of `rejection_arrays` were drawn from; None: they were not drawn."""

    rows: Sequence[StepRow] = ()
    accepted: Tensor
    q: Tensor | None = None
    # For a step that waits for masks: the D drafts, [D] on the host, and the function that waits until they are there.
    shown: tuple[Tensor, Callable[[], None]] | None = None

    def __init__(self, drafting: Drafting, run: StepRun):
        self.drafting, self.is_typical = drafting, drafting.typical
        self.source = drafting.source.of(run)
        self.form = VerifiedTrees() if drafting.source.makes_trees else Chain()
        self.starts_later = isinstance(run.step, DraftsLater) and drafting.source.is_model

    def lay_out(self, run: StepRun) -> None:
        self.rows = run.step.rows
        if self.drafting.reads_starts(run):
            starts = starts_of(run)
            if starts != [row.start for row in self.rows]:
                self.rows = [row._replace(start=start) for row, start in zip(self.rows, starts, strict=True)]
                run.batch = lay_out(self.rows, run.worker.slots)
        if run.batch.drafts:
            self.drafting.drafted_in = run.step.step_id
            self._check(run)
            run.drafts_before = self.form.before
        self.form.lay_out(run, self)

    def _check(self, run: StepRun) -> None:
        rows, source = run.step.rows, self.drafting.source
        named = any(row.drafts for row in rows)
        number, vocab = run.step.step_id, run.worker.model.config.vocab_size
        if not named and isinstance(source, NamedDrafts):
            raise ValueError(f"step {number} has rows with drafts; this worker has no proposer: see Parts.proposer")
        for row in rows:
            if row.num_drafts and not row.samples:
                raise ValueError(f"step {number}: a row of slot {row.slot} has drafts and does not sample")
            if named and len(row.drafts) != row.num_drafts:
                raise ValueError(f"step {number}: a row has {row.num_drafts} drafts and names {len(row.drafts)}")
            for token in row.drafts:
                if not 0 <= token < vocab:
                    name = run.worker.slots.host[row.slot].request_id
                    raise ValueError(
                        f"a draft for request {name!r} is token {token}, outside the vocabulary [0, {vocab})"
                    )

    def before_model(self, run: StepRun) -> None:
        self.q = self.source.draft(run)
        if run.batch.drafts:
            put_drafts(run.worker.slots, run.tensors)
            # On their way to the host before the model is launched, if masks depend on them.
            if run.step.takes_masks and self.shown is None:
                self.shown = to_host(run.tensors["draft.tokens"]), mark(run.worker.model.device)

    def after_model(self, run: StepRun) -> None:
        self.source.after_model(run)

    def needs_logits(self, run: StepRun) -> bool:
        return self.is_typical or "draft.unseeded" in run.batch.arrays

    def chosen(self, run: StepRun, tokens: Tensor) -> Tensor:
        return self.form.chosen(run, self, tokens) if run.batch.drafts else tokens

    def verify(self, run: StepRun, tokens: Tensor) -> None:
        if not run.batch.drafts:
            return
        found = self.form.verify(run, self, tokens, self._cut(run))
        self.accepted, run.kept = found.accepted, found.kept
        # The rows' lengths count all drafts as right.
        run.worker.slots.computed.index_add_(0, run.tensors["draft.slots"], found.accepted - run.tensors["draft.num"])

    def _cut(self, run: StepRun) -> Tensor | None:
        """The drafts that the row's grammar forbids, or behind which it has no mask, [D] bool; None: there are none.
        What is sampled before such a draft is the row's last token. It is verified as usual, and may be the draft
        itself: drawing it again where a draft is forbidden would be wrong, since a draft that is not kept leaves less
        of p to draw from (`rejection.py`)."""
        if run.masked is None:
            return None
        places, has_masks = run.masked
        bound = np.array([has_masks[row] for row, num in enumerate(run.batch.drafts) if num])
        cut = bound[run.batch.arrays["draft.row"]] & ~np.isin(self.form.own_logits(run), places)
        return to_device({"cut": cut}, run.worker.slots.device)["cut"] if cut.any() else None

    def taken(self, run: StepRun, tokens: Tensor) -> None:
        self.source.taken(run, self.accepted if run.batch.drafts else None)

    def ended(self, run: StepRun) -> None:
        self.source.ended(run)


def starts_of(run: StepRun) -> list[int]:
    """How many tokens are computed in the slots of the step's rows; waits for the device. This is the first place where
    it is known how many drafts of the step before were right."""
    found: list[int] = run.worker.slots.computed[[row.slot for row in run.step.rows]].tolist()
    return found


def shown_drafts(run: StepRun, ask: AskMasks) -> Sequence[Drafted]:
    """The drafts of each row of a step that waits for masks: see `grammars.drafts.ShowsDrafts`."""
    found = [Drafted()] * len(run.step.rows)
    for part in run.parts:
        if not isinstance(part, DraftPart):
            continue
        if part.starts_later and part.shown is None:
            part.source.ask_masks = ask
            try:
                run.start()
            finally:
                part.source.ask_masks = None
        if part.shown is not None:
            on_host, wait = part.shown
            wait()
            drafted = [row for row, num in enumerate(run.batch.drafts) if num]
            drafts = on_host.split([run.batch.drafts[row] for row in drafted])
            for row, tokens, parents in zip(drafted, drafts, part.form.parents(run), strict=True):
                found[run.batch.order[row]] = Drafted(tokens.tolist(), parents)
    return found
