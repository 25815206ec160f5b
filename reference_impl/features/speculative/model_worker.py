"""A worker whose guesses come from a draft model, heads, or the target's first layers. Extends `Worker.submit` (blocks
are moved in both caches), `DraftRun.add_arrays` and `compute` (guesses are made before the model runs; a draft model
computes steps without any, too, unless they say that it need not keep up)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from reference_impl.core.batch import HostBatch, lay_out
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.staging import to_host
from reference_impl.core.worker import StepRun
from reference_impl.features.grammars.guesses import GuessesLater
from reference_impl.features.grammars.masks import masked, usable
from reference_impl.features.speculative.draft_model import DraftModel, Replay, ReplayNodes, arrays_of
from reference_impl.features.speculative.drafts import take_drafts
from reference_impl.features.speculative.feature_head import FeatureDraft
from reference_impl.features.speculative.guess_scores import ScoringWorker, not_numbers, texts_before
from reference_impl.features.speculative.medusa import MedusaDraft, one_by_one
from reference_impl.features.speculative.rejection import places
from reference_impl.features.speculative.worker import DraftRun, DraftWorker
from reference_impl.interfaces import Step

Draft: TypeAlias = DraftModel | FeatureDraft | MedusaDraft


class ModelDraftWorker(DraftWorker, ScoringWorker):
    """draft: what guesses, where a step's rows have drafts."""

    def __init__(self, *args: Any, draft: Draft, **options: Any):
        super().__init__(*args, **options)
        self.draft = draft
        own = () if draft.attention is None else (draft.attention,)
        self.has_bounds = self.needs_lengths(self.attention, *own)
        # A sampler that is asked may do anything; guesses are drawn as ours would.
        self.draws = self.sampler if isinstance(self.sampler, TorchSampler) else TorchSampler()

    @property
    def makes_drafts(self) -> bool:
        return True

    def replay_of_passes(self) -> Replay | None:
        """As `DraftModel.guess` takes it."""
        return None

    def replay_of_nodes(self) -> ReplayNodes | None:
        """As `guess_tree` takes it."""
        return None

    @torch.inference_mode()
    def submit(self, step: Step) -> StepRun:
        moves, cache = step.transfers, self.draft.own_cache
        if cache is not None and (moves.swap_out or moves.copies or moves.swap_in):
            cache.transfer(moves)
        if not isinstance(step, GuessesLater):
            return super().submit(step)
        super().submit(replace(step, rows=()))
        run = self.run_of(step, lay_out(step.rows, self.slots), self.clock.now())
        run.end()  # it waits for masks; `guesses` stages and computes it
        return run


class ModelDraftRun(DraftRun):
    worker: ModelDraftWorker
    passes: Sequence[HostBatch] = ()
    drafting: float = 0.0  # seconds, on a CPU
    broken_guesses: Tensor | None = None  # how many came of logits that are not numbers, on the device

    def add_arrays(self) -> None:
        super().add_arrays()
        w = self.worker
        if "draft.tokens" in self.batch.arrays:
            raise ValueError(
                f"step {self.step.step_id} names drafts, and this worker's draft model makes them: leave out one of "
                "Parts.draft_model and what names them"
            )
        if not self.step.keeps_up:
            if self.batch.drafts:
                raise ValueError(f"step {self.step.step_id} has rows with drafts, of a model that it does not keep up")
            return
        self.passes = w.draft.lay_out(self.rows, w.slots)
        if w.ask_masks is not None and isinstance(w.draft, MedusaDraft):
            self.passes = one_by_one(self.passes)
        self.batch.arrays.update(arrays_of(self.passes, w.draft.distance, w.draws, places(self.batch.arrays)))

    def compute(self) -> None:
        w = self.worker
        if self.passes:
            with self.watched():
                self.q = w.draft.guess(
                    self.passes, self.tensors, w.slots, w.draws, self.guess_scores, w.replay_of_passes()
                )
        if self.batch.drafts:
            self.tensors["draft.tokens"] = take_drafts(w.slots, self.tensors)
        super().compute()

    def guess_scores(self, logits: Tensor, slots: Sequence[int], positions: Tensor, before: int | Tensor) -> Tensor:
        """As `GuessScores`. ValueError for logits of another shape, of a model that is not what its config says."""
        w = self.worker
        if logits.shape != (expected := (len(slots), w.model.config.vocab_size)):
            raise ValueError(
                f"{type(w.draft.model).__name__}.logits: expected {list(expected)}, a row for each of {len(slots)} "
                f"guesses and a column for each token of the target's vocabulary, got {list(logits.shape)}: its "
                "weights are not those of its config"
            )
        broken = not_numbers(logits)
        self.broken_guesses = broken if self.broken_guesses is None else self.broken_guesses + broken
        scores = w.guess_scores(logits, slots, positions, before)
        if w.ask_masks is None:
            return scores
        rows = {row.slot: at for at, row in enumerate(self.step.rows)}
        texts = texts_before(slots, positions, before, w.slots)
        masks = w.ask_masks([(rows[slot], text) for slot, text in zip(slots, texts, strict=True)])
        return masked(scores, usable(masks, logits.shape[1]))

    def end(self) -> None:
        if self.broken_guesses is not None:
            on_host = to_host(self.broken_guesses)  # read when the step is collected
            self.reports["broken_guesses"] = lambda: int(on_host)
        super().end()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What is computed within is the draft's: its seconds go into `Reply.drafting`."""
        device, clock = self.worker.model.device, self.worker.clock
        if device.type == "cuda":  # what is launched here runs later
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            yield
            ended.record()
            before = self.reports.get("drafting", float)
            self.reports["drafting"] = lambda: before() + began.elapsed_time(ended) / 1e3
            return
        started = clock.now()
        yield
        self.drafting += clock.now() - started
        self.reports["drafting"] = lambda: self.drafting
