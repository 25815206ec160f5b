"""Drafts by a draft model, heads, or the target's first layers, made before the model runs. A draft model computes
steps without drafts, too, unless they say that it need not keep up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from reference_impl.core.batch import HostBatch
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.staging import to_host
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import DraftPositions
from reference_impl.features.grammars.masks import masked, usable
from reference_impl.features.graphs.graphs import Recorder
from reference_impl.features.graphs.worker import GraphWorker
from reference_impl.features.speculative.draft_graphs import PassGraphs, decoder_of_passes
from reference_impl.features.speculative.draft_model import DraftModel, arrays_of
from reference_impl.features.speculative.draft_scores import (
    DraftScores,
    moved_as_the_targets,
    not_numbers,
    texts_before,
)
from reference_impl.features.speculative.drafts import take_drafts
from reference_impl.features.speculative.feature_head import FeatureDraft
from reference_impl.features.speculative.medusa import MedusaDraft, one_by_one
from reference_impl.features.speculative.rejection import places
from reference_impl.features.speculative.sources import Source
from reference_impl.features.speculative.step_source import StepSource
from reference_impl.interfaces import Sampler, StepRow, Transfers

Draft: TypeAlias = DraftModel | FeatureDraft | MedusaDraft


class ModelSource(Source):
    """Makes drafts by a model. draft: the draft model, the head or the heads at work."""

    is_model = True
    most_inner = 0  # nodes of a tree that have children

    def __init__(self, draft: Draft, sampler: Sampler | TorchSampler):
        self.draft: Draft = draft
        # A sampler that is asked may do anything; drafts are drawn as ours would.
        self.draws = sampler if isinstance(sampler, TorchSampler) else TorchSampler()

    @property
    def keeps_up(self) -> bool:  # type: ignore[override]
        """Whether the draft has to compute steps without drafts, too; early exit, in the target's cache, does not."""
        return not isinstance(self.draft, DraftModel) or self.draft.own_cache is not None

    def is_needed(self, run: StepRun) -> bool:
        return self.keeps_up and bool(run.step.rows) and run.step.keeps_up

    def of(self, run: StepRun) -> StepSource:
        return ModelStep(self)

    def move_blocks(self, transfers: Transfers) -> None:
        if self.draft.own_cache is not None:
            self.draft.own_cache.transfer(transfers)

    def use_graphs(self, worker: GraphWorker, recorder: Recorder, max_rows: int, max_len: int) -> None:
        if isinstance(self.draft, MedusaDraft) or (self.makes_trees and not self.most_inner):
            return
        if decoder_of_passes(self.draft) is not None:
            self.graphs = PassGraphs(
                self.draft, worker.model, worker.slots, worker.stats, recorder, max_rows, max_len, self.most_inner
            )


class ModelStep(StepSource):
    passes: Sequence[HostBatch] = ()
    seconds: float = 0.0  # of drafting, on a CPU
    broken: Tensor | None = None  # how many drafts came of logits that are not numbers, on the device

    def __init__(self, source: ModelSource):
        self.source = source

    def lay_out(self, run: StepRun, rows: Sequence[StepRow]) -> None:
        draft, draws, slots, arrays = self.source.draft, self.source.draws, run.worker.slots, run.batch.arrays
        number = run.step.step_id
        if "draft.tokens" in arrays:
            raise ValueError(
                f"step {number} names drafts, and this worker's draft model makes them: leave out one of "
                "Parts.draft_model and what names them"
            )
        if not run.step.keeps_up:
            if run.batch.drafts:
                raise ValueError(f"step {number} has rows with drafts, of a model that it does not keep up")
            return
        self.passes = draft.lay_out(rows, slots)
        if self.ask_masks is not None and isinstance(draft, MedusaDraft):
            self.passes = one_by_one(self.passes)
        arrays.update(arrays_of(self.passes, draft.distance, draws, places(arrays)))

    def draft(self, run: StepRun) -> Tensor | None:
        source, slots, q = self.source, run.worker.slots, None
        if self.passes:
            replay = None if source.graphs is None else source.graphs.replay_of_passes()
            with self.timed(run):
                q = source.draft.propose(self.passes, run.tensors, slots, source.draws, self.scores_for(run), replay)
        if run.batch.drafts:
            run.tensors["draft.tokens"] = take_drafts(slots, run.tensors)
        return q

    def scores_for(self, run: StepRun) -> DraftScores:
        """The function that gives the scores which drafts are drawn from: see draft_scores.py. It raises ValueError for
        logits of another shape, from a model that is not what its config says."""

        def scores(logits: Tensor, slots: Sequence[int], positions: Tensor, before: int | Tensor) -> Tensor:
            w, vocab_size = run.worker, run.worker.model.config.vocab_size
            if logits.shape != (expected := (len(slots), vocab_size)):
                raise ValueError(
                    f"{type(self.source.draft.model).__name__}.logits: expected {list(expected)}, a row for each of "
                    f"{len(slots)} drafts and a column for each token of the target's vocabulary, got "
                    f"{list(logits.shape)}: its weights are not those of its config"
                )
            broken = not_numbers(logits)
            self.broken = broken if self.broken is None else self.broken + broken
            at = DraftPositions(slots, [w.slots.host[slot] for slot in slots], positions, before, w.slots)
            found = moved_as_the_targets(run, logits, at)
            if self.ask_masks is None:
                return found
            rows = {row.slot: number for number, row in enumerate(run.step.rows)}
            texts = texts_before(slots, positions, before, w.slots)
            masks = self.ask_masks([(rows[slot], text) for slot, text in zip(slots, texts, strict=True)])
            return masked(found, usable(masks, vocab_size))

        return scores

    def ended(self, run: StepRun) -> None:
        if self.broken is not None:
            on_host = to_host(self.broken)  # read when the step is collected
            run.reports["broken_drafts"] = lambda: int(on_host)

    @contextmanager
    def timed(self, run: StepRun) -> Iterator[None]:
        """Times the draft's work within the block: its seconds go into `Reply.drafting`."""
        clock, reports = run.worker.clock, run.reports
        if run.worker.model.device.type == "cuda":  # what is launched here runs later
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            yield
            ended.record()
            before = reports.get("drafting", float)
            reports["drafting"] = lambda: before() + began.elapsed_time(ended) / 1e3
            return
        started = clock.now()
        yield
        self.seconds += clock.now() - started
        reports["drafting"] = lambda: self.seconds
