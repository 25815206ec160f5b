"""The worker with all features."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from reference_impl.assembly.sampler import sample
from reference_impl.core.decoder import Decoder
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import WorkerFeature
from reference_impl.features.asked_sampler.worker import SeesRequests
from reference_impl.features.biases.worker import Biases, Exclusions
from reference_impl.features.failing.worker import Explaining
from reference_impl.features.grammars.guesses import AskMasks, Guessed
from reference_impl.features.grammars.worker import Masking, finish
from reference_impl.features.graphs.graphs import Recorder
from reference_impl.features.graphs.worker import GraphWorker
from reference_impl.features.penalties.worker import PenaltyFeature
from reference_impl.features.pooling.worker import Pooling
from reference_impl.features.scoring.worker import PromptScores
from reference_impl.features.speculative.draft_graphs import PassGraphs, decoder_of_passes
from reference_impl.features.speculative.draft_model import DraftModel
from reference_impl.features.speculative.feature_head import FeatureDraft, KeepsHidden
from reference_impl.features.speculative.growth import Growth
from reference_impl.features.speculative.head_source import HeadSource
from reference_impl.features.speculative.lookahead import Shape
from reference_impl.features.speculative.lookahead_source import LookaheadSource
from reference_impl.features.speculative.medusa import MedusaDraft
from reference_impl.features.speculative.model_source import Draft, ModelSource
from reference_impl.features.speculative.sources import Proposed, Source
from reference_impl.features.speculative.tree import Tree
from reference_impl.features.speculative.worker import Drafting, needs_lengths, shown_drafts
from reference_impl.features.transfer.worker import PageMoves
from reference_impl.interfaces import (
    AttentionBackend,
    Clock,
    KVCache,
    KVSpec,
    LayeredPageStore,
    Masks,
    PageStore,
    Proposer,
    Sampler,
)
from reference_impl.interfaces.sampling_fields import BY_SAMPLER


class LocalExecutor(GraphWorker):
    """One model on one device. sampler: any; one that can be launched (`TorchSampler`) lets steps overlap.

    max_num_seqs: requests that run at a time. max_len: positions of one. page_store: for the loads and saves of a
    step's transfers. Of these one makes drafts: proposer; draft, a model or heads, of a head with a tree, or how it is
    grown; lookahead. typical: as of `Drafting`.
    """

    def __init__(
        self, model: Decoder, kv_cache: KVCache, attention: AttentionBackend, kv_specs: Sequence[KVSpec], clock: Clock,
        sampler: Sampler = sample, *, max_num_seqs: int, max_len: int, proposer: Proposer | None = None,
        page_store: PageStore | LayeredPageStore | None = None, draft: Draft | None = None,
        tree: Tree | Growth | None = None, lookahead: Shape | None = None, typical: bool = False,
    ):  # fmt: skip
        tap = None
        if isinstance(draft, FeatureDraft | MedusaDraft):
            draft.model.follow(model)
            tap = KeepsHidden(model)
        computing: Any = tap or model
        super().__init__(
            computing, kv_cache, attention, kv_specs, clock, sampler, max_num_seqs=max_num_seqs, max_len=max_len
        )
        self.tap = tap
        source: Source | None = None if proposer is None else Proposed(proposer)
        if lookahead is not None:
            source = LookaheadSource(lookahead, self.slots)
        elif isinstance(draft, DraftModel):
            source = ModelSource(draft, sampler)
        elif draft is not None and tap is not None:
            source = HeadSource(draft, sampler, tap, tree)
        attends = [attention] if draft is None or draft.attention is None else [attention, draft.attention]
        self.drafting = Drafting(source, needs_lengths(sampler, *attends), typical)
        self.makes_trees, self.tree = self.drafting.source.makes_trees, tree
        self.requests = SeesRequests()
        ends = [token for token in model.config.eos_token_ids if token < model.config.vocab_size]
        # In this order: drafts are part of the batch; scores are biased, penalised, then what is ruled out is, and what
        # a grammar does not allow; a prompt's scores need all logits, which come of hidden states; a sampler that is
        # asked sees what all of them left.
        features: list[WorkerFeature] = [
            self.drafting, Biases(), PenaltyFeature(model.device), Exclusions(ends), Masking(), PromptScores(),
            Pooling(), self.requests, Explaining(model, self.slots),
        ]  # fmt: skip
        if page_store is not None:
            features.append(PageMoves(page_store, kv_cache))
        for feature in features:
            self.hooks.add(feature)
        self.ask(sampler)

    def ask(self, sampler: Sampler | TorchSampler) -> None:
        """Tokens are chosen by this sampler from now on."""
        self.sampler: Any = sampler
        self.requests.every_step = is_asked = not isinstance(sampler, TorchSampler)
        self.max_in_flight = 1 if is_asked else 2  # where it is asked, it is waited for at each step

    @property
    def reads(self) -> Collection[str]:
        """As of `ReadsFields`. A sampler that is asked reads the request itself."""
        return [field.name for field in BY_SAMPLER] if self.requests.every_step else super().reads

    @torch.inference_mode()
    def finish(self, run: StepRun, masks: Masks) -> None:
        """As of `TakesMasks`."""
        finish(run, masks)

    @torch.inference_mode()
    def guesses(self, run: StepRun, ask: AskMasks) -> Sequence[Guessed]:
        """As of `ShowsGuesses`."""
        return shown_drafts(run, ask)

    def use_graphs(self, recorder: Recorder, max_rows: int, max_len: int, num_drafts: int = 0) -> None:
        super().use_graphs(recorder, max_rows, max_len, num_drafts)
        source, tree = self.drafting.source, self.tree
        inner = 0 if tree is None else tree.num_inner
        if not isinstance(source, ModelSource) or isinstance(source.draft, MedusaDraft) or (tree and not inner):
            return
        if decoder_of_passes(source.draft) is not None:
            source.graphs = PassGraphs(
                source.draft, self.model, self.slots, self.stats, recorder, max_rows, max_len, inner
            )

    @property
    def draft(self) -> Draft | None:
        """The model or the heads that make drafts."""
        source = self.drafting.source
        return source.draft if isinstance(source, ModelSource) else None

    @property
    def pass_graphs(self) -> PassGraphs | None:
        """Of what makes the drafts."""
        source = self.drafting.source
        return source.graphs if isinstance(source, ModelSource) else None

    @torch.inference_mode()
    def capture_all(self, longest: int | None = None) -> int:
        """As of `CapturesGraphs`."""
        captured = super().capture_all(longest)
        return captured if self.pass_graphs is None else captured + self.pass_graphs.capture_all(longest)

    def close(self) -> None:
        super().close()  # waits for graphs that run
        if isinstance(self.drafting.source, ModelSource):
            self.drafting.source.graphs = None
