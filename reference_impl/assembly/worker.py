"""The worker with all features. A step that needs none of them is computed by the core's own run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference_impl.assembly.sampler import sample
from reference_impl.core.batch import HostBatch
from reference_impl.core.decoder import Decoder
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.worker import StepRun
from reference_impl.features.asked_sampler.worker import AskedRun, AskingWorker
from reference_impl.features.biases.worker import BiasRun, BiasWorker, FloorRun
from reference_impl.features.failing.worker import ExplainingWorker
from reference_impl.features.grammars.worker import MaskRun, MaskWorker
from reference_impl.features.graphs.worker import GraphRun, GraphWorker
from reference_impl.features.penalties.worker import PenaltyRun, PenaltyWorker
from reference_impl.features.pooling.worker import PoolRun, PoolWorker
from reference_impl.features.scoring.worker import ScoreRun, ScoreWorker
from reference_impl.features.speculative.draft_graphs import DraftGraphWorker
from reference_impl.features.speculative.draft_model import DraftModel
from reference_impl.features.speculative.feature_graphs import FeatureGraphRun, FeatureGraphWorker
from reference_impl.features.speculative.growth import Growth
from reference_impl.features.speculative.lookahead import Shape
from reference_impl.features.speculative.lookahead_worker import LookaheadRun, LookaheadWorker
from reference_impl.features.speculative.masked import MaskedDraftRun
from reference_impl.features.speculative.model_worker import Draft, ModelDraftRun
from reference_impl.features.speculative.tree import Tree
from reference_impl.features.speculative.tree_head_worker import TreeHeadRun, TreeHeadWorker
from reference_impl.features.speculative.worker import DraftRun, DraftWorker
from reference_impl.features.transfer.worker import PageWorker
from reference_impl.interfaces import (
    AttentionBackend,
    Clock,
    KVCache,
    KVSpec,
    LayeredPageStore,
    PageStore,
    Proposer,
    Sampler,
    Step,
)


class FullRun(MaskedDraftRun, DraftRun, BiasRun, PenaltyRun, FloorRun, MaskRun, ScoreRun, PoolRun, GraphRun, AskedRun):
    """In this order: guesses are part of the batch; scores are biased, penalised, then masked; a prompt's scores need
    all logits, which come of hidden states; a graph stands for the forward pass, and maybe for sampling."""

    worker: LocalExecutor

    def needs_logits(self) -> bool:
        w, slots = self.worker, self.batch.slots
        free = w.counts.places.keys().isdisjoint(slots) and w.biased.isdisjoint(slots)
        return not free or w.typical or "draft.unseeded" in self.batch.arrays or super().needs_logits()


class LocalExecutor(
    DraftWorker,
    BiasWorker,
    PenaltyWorker,
    MaskWorker,
    ScoreWorker,
    PoolWorker,
    GraphWorker,
    AskingWorker,
    ExplainingWorker,
):
    """One model on one device. sampler: any; one that can be launched (`TorchSampler`) lets steps overlap.

    max_num_seqs: requests that run at a time. max_len: positions of one. proposer: as of `DraftWorker`.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        attention: AttentionBackend,
        kv_specs: Sequence[KVSpec],
        clock: Clock,
        sampler: Sampler = sample,
        *,
        max_num_seqs: int,
        max_len: int,
        proposer: Proposer | None = None,
    ):
        parts = (model, kv_cache, attention, kv_specs, clock, sampler)
        super().__init__(*parts, max_num_seqs=max_num_seqs, max_len=max_len, proposer=proposer)

    def run_of(self, step: Step, batch: HostBatch, now: float) -> StepRun:
        """The core's run, unless the step, an open request or the worker needs a feature."""
        if step.transfers.loads or step.transfers.saves:
            raise ValueError(
                f"step {step.step_id} loads or saves pages and this worker has no store: see Parts.page_store"
            )
        special = self.counts.places or self.biased or self.scored or self.pooled  # slots that ask for more than tokens
        asks = not isinstance(self.sampler, TorchSampler)
        moved = self.has_bounds and self.reads_starts(step)
        if special or batch.drafts or step.takes_masks or self.graphs is not None or asks or moved:
            return FullRun(self, step, batch, now)
        self.stats.eager_steps += bool(step.rows)
        return StepRun(self, step, batch, now)


class StoringExecutor(PageWorker, LocalExecutor):
    """With a page store, too."""


class GuessingRun(ModelDraftRun, FullRun):
    worker: GuessingExecutor


class FeatureGuessingRun(FeatureGraphRun, FullRun):
    worker: FeatureGuessingExecutor


class FeatureGuessingExecutor(FeatureGraphWorker, LocalExecutor):
    """With a feature head, or Medusa heads, too: they are given the hidden states of all rows, behind the model."""

    def run_of(self, step: Step, batch: HostBatch, now: float) -> StepRun:
        keeps_up = step.rows and (step.keeps_up or batch.drafts)
        return FeatureGuessingRun(self, step, batch, now) if keeps_up else super().run_of(step, batch, now)


class TreeGuessingRun(TreeHeadRun, FeatureGuessingRun):
    worker: TreeGuessingExecutor


class TreeGuessingExecutor(TreeHeadWorker, FeatureGuessingExecutor):
    """Whose guesses are trees."""

    def run_of(self, step: Step, batch: HostBatch, now: float) -> StepRun:
        return TreeGuessingRun(self, step, batch, now) if step.rows else super().run_of(step, batch, now)


class LookaheadGuessingRun(LookaheadRun, FullRun):
    worker: LookaheadExecutor


class LookaheadExecutor(LookaheadWorker, LocalExecutor):
    """Whose guesses are its own, by lookahead."""

    def run_of(self, step: Step, batch: HostBatch, now: float) -> StepRun:
        return LookaheadGuessingRun(self, step, batch, now) if batch.drafts else super().run_of(step, batch, now)


class GuessingExecutor(DraftGraphWorker, LocalExecutor):
    """With a draft model, too: it computes all rows. Or with the model's own first layers, which compute those that get
    guesses."""

    def run_of(self, step: Step, batch: HostBatch, now: float) -> StepRun:
        keeps_up = bool(batch.drafts) if self.draft.own_cache is None else step.rows and (step.keeps_up or batch.drafts)
        return GuessingRun(self, step, batch, now) if keeps_up else super().run_of(step, batch, now)


class StoringFeatureExecutor(PageWorker, FeatureGuessingExecutor):
    """With a page store, and what guesses without a cache of its own."""


class StoringGuessingExecutor(PageWorker, GuessingExecutor):
    """The same."""


class StoringLookaheadExecutor(PageWorker, LookaheadExecutor):
    """With a page store, and lookahead."""


def make_worker(
    model: Decoder, kv_cache: KVCache, attention: AttentionBackend, kv_specs: Sequence[KVSpec], clock: Clock,
    sampler: Sampler = sample, *, max_num_seqs: int, max_len: int, proposer: Proposer | None = None,
    page_store: PageStore | LayeredPageStore | None = None, draft: Draft | None = None,
    tree: Tree | Growth | None = None, lookahead: Shape | None = None,
) -> LocalExecutor:  # fmt: skip
    """page_store: for the loads and saves of a step's transfers; draft: instead of a proposer, and without a store if
    it has a cache of its own; tree: of a feature head's guesses; lookahead: instead of both. The others as of
    `LocalExecutor`."""
    options: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_len": max_len}
    options |= {"proposer": proposer} if draft is None else {"draft": draft}
    kinds: tuple[type[LocalExecutor], type[LocalExecutor]] = (LocalExecutor, StoringExecutor)
    if isinstance(draft, DraftModel):
        kinds = GuessingExecutor, StoringGuessingExecutor
    elif draft is not None:
        kinds = FeatureGuessingExecutor, StoringFeatureExecutor
    if lookahead is not None:
        kinds, options["lookahead"], tree = (LookaheadExecutor, StoringLookaheadExecutor), lookahead, None
    if page_store is not None:
        options["page_store"] = page_store
    kind = kinds[page_store is not None]
    if tree is not None:
        kind, options["tree"] = TreeGuessingExecutor, tree
    return kind(model, kv_cache, attention, kv_specs, clock, sampler, **options)
