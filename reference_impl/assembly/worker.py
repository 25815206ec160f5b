"""The worker with all features."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from reference_impl.assembly.sampler import sample
from reference_impl.core.decoder import Decoder
from reference_impl.core.sampler import TorchSampler
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import WorkerFeature
from reference_impl.features.asked_sampler.worker import SeesRequests
from reference_impl.features.biases.worker import Biases, Exclusions
from reference_impl.features.failing.worker import Explaining
from reference_impl.features.grammars.worker import Masking
from reference_impl.features.graphs.worker import GraphWorker
from reference_impl.features.penalties.worker import PenaltyFeature
from reference_impl.features.pooling.worker import Pooling
from reference_impl.features.scoring.worker import PromptScores
from reference_impl.features.speculative.worker import Drafting
from reference_impl.interfaces import AttentionBackend, Clock, KVCache, KVSpec, Masks, Proposer, Sampler
from reference_impl.interfaces.sampling_fields import BY_SAMPLER

if TYPE_CHECKING:
    from pathlib import Path

    from reference_impl.features.grammars.drafts import AskMasks, Drafted
    from reference_impl.features.graphs.graphs import Recorder
    from reference_impl.features.speculative.draft_graphs import PassGraphs
    from reference_impl.features.speculative.growth import Growth
    from reference_impl.features.speculative.lookahead import Shape
    from reference_impl.features.speculative.model_source import Draft
    from reference_impl.features.speculative.sources import Source
    from reference_impl.features.speculative.tree import Tree
    from reference_impl.interfaces.pages import LayeredPageStore, PageStore


class LocalExecutor(GraphWorker):
    """One model on one device. sampler: any; one that can be launched (`TorchSampler`) lets steps overlap.

    max_num_seqs: requests that run at a time. max_len: positions of one. page_store: for the loads and saves of a
    step's transfers. At most one of these makes drafts: proposer; draft, a model or heads (tree: the shape of a head's
    drafts, or how they grow); lookahead. typical: see `Drafting`.
    """

    def __init__(
        self, model: Decoder, kv_cache: KVCache, attention: AttentionBackend, kv_specs: Sequence[KVSpec], clock: Clock,
        sampler: Sampler | TorchSampler = sample, *, max_num_seqs: int, max_len: int, proposer: Proposer | None = None,
        page_store: PageStore | LayeredPageStore | None = None, draft: Draft | None = None,
        tree: Tree | Growth | None = None, lookahead: Shape | None = None, typical: bool = False,
    ):  # fmt: skip
        self.decoder = model
        tap = None
        source: Source | None = None
        has_bounds, makes_drafts = False, bool(proposer or draft or lookahead)
        if proposer is not None:
            from reference_impl.features.speculative.proposed import Proposed

            source = Proposed(proposer)
        if draft is not None:
            from reference_impl.assembly.drafting import tap_on

            tap = tap_on(model, draft)
        computing: Any = tap or model
        super().__init__(
            computing, kv_cache, attention, kv_specs, clock, sampler, max_num_seqs=max_num_seqs, max_len=max_len
        )
        if makes_drafts:
            from reference_impl.assembly.drafting import needs_lengths, source_of

            others = [] if draft is None or draft.attention is None else [draft.attention]
            has_bounds = needs_lengths(sampler, attention, *others)
            if source is None:
                source = source_of(self.slots, sampler, tap, draft, tree, lookahead)
        self.tap, self.drafting = tap, Drafting(source, has_bounds, typical)
        self.makes_trees = self.drafting.source.makes_trees
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
            from reference_impl.features.transfer.worker import PageMoves

            features.append(PageMoves(page_store, kv_cache))
        for feature in features:
            self.hooks.add(feature)
        self.ask(sampler)

    def ask(self, sampler: Sampler | TorchSampler) -> None:
        """Makes this sampler choose tokens from now on."""
        self.sampler: Any = sampler
        self.requests.every_step = is_asked = not isinstance(sampler, TorchSampler)
        self.max_in_flight = 1 if is_asked else 2  # where it is asked, it is waited for at each step

    @property
    def reads(self) -> Collection[str]:
        """The sampler's fields of SamplingParams that it reads; all for a sampler that is asked, which reads the
        request itself."""
        return [field.name for field in BY_SAMPLER] if self.requests.every_step else super().reads

    @torch.inference_mode()
    def finish(self, run: StepRun, masks: Masks) -> None:
        """Samples a step that waits for masks: see `TakesMasks`."""
        from reference_impl.features.grammars.masks import finish

        finish(run, masks)

    @torch.inference_mode()
    def show_drafts(self, run: StepRun, ask: AskMasks) -> Sequence[Drafted]:
        """The drafts of each row of a step that waits for masks: see `ShowsDrafts`."""
        from reference_impl.features.speculative.draft_part import shown_drafts

        return shown_drafts(run, ask)

    def load_weights(self, folder: Path) -> None:
        """See `UpdatesWeights`."""
        from reference_impl.assembly.new_weights import loaded

        self._new_weights = loaded(self.decoder, folder)

    @torch.inference_mode()
    def use_weights(self) -> None:
        """See `UpdatesWeights`."""
        from reference_impl.assembly.new_weights import take_weights

        take_weights(self.decoder, self._new_weights)
        del self._new_weights

    def use_graphs(self, recorder: Recorder, max_rows: int, max_len: int, num_drafts: int = 0) -> None:
        super().use_graphs(recorder, max_rows, max_len, num_drafts)
        self.drafting.source.use_graphs(self, recorder, max_rows, max_len)

    @property
    def draft(self) -> Draft | None:
        """The model or the heads that make drafts."""
        return self.drafting.source.draft

    @property
    def pass_graphs(self) -> PassGraphs | None:
        """The CUDA graphs of what makes the drafts; None: it has none."""
        return self.drafting.source.graphs

    @torch.inference_mode()
    def capture_all(self, longest: int | None = None) -> int:
        """Captures the graphs of the model and of what makes the drafts: see `CapturesGraphs`."""
        captured = super().capture_all(longest)
        return captured if self.pass_graphs is None else captured + self.pass_graphs.capture_all(longest)

    def close(self) -> None:
        super().close()  # waits for graphs that run
        self.drafting.source.graphs = None
