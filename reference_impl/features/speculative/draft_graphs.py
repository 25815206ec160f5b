"""Passes of a draft model, a feature head or early exit as CUDA graphs, beside those of the steps.

Captured is a pass in which every row has one token: the model and its logits, of the passes of a step all but the
first, in which a draft model has rows of two tokens or more, and a head only draws. Of a head's tree it is a pass over
inner nodes, whose tokens and hidden states are copied to where the graph reads them, and which all get logits. Outside
stays what moves and draws guesses, and writes them. So a pass may be computed twice, as a capture does. Extends
`GraphWorker.use_graphs`, `capture_all` and `close`, and `ModelDraftWorker.replay_of_passes` and `replay_of_nodes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.batch import HostBatch
from reference_impl.core.staging import Arrays
from reference_impl.features.fusion.decoder import FusedDecoder
from reference_impl.features.fusion.kernels import writes_and_attends
from reference_impl.features.graphs.graphs import (
    WIDEST_TREES,
    GraphKey,
    Graphs,
    Recorder,
    inert,
    longest_bucket,
    padded,
)
from reference_impl.features.graphs.worker import GraphWorker
from reference_impl.features.speculative.draft_model import DraftModel, Replay, ReplayNodes
from reference_impl.features.speculative.feature_head import FeatureDraft
from reference_impl.features.speculative.model_worker import ModelDraftWorker
from reference_impl.interfaces import takes_bounds


class DraftGraphWorker(ModelDraftWorker, GraphWorker):
    pass_graphs: Graphs | None = None
    replayed_passes = 0
    _hidden: Tensor | None = None  # of the pass that was computed last
    # Of a pass over a tree: tokens, the hidden states of their parents, and what they see, [WIDEST_TREES, ...].
    _nodes: tuple[Tensor, Tensor, Tensor]
    most_inner = 0  # nodes of a tree that have children

    def use_graphs(self, recorder: Recorder, max_rows: int, max_len: int, num_drafts: int = 0) -> None:
        super().use_graphs(recorder, max_rows, max_len, num_drafts)
        draft = self.draft
        if decoder_of_passes(draft) is None or (self.makes_trees and not self.most_inner):
            return
        if self.makes_trees:
            assert isinstance(draft, FeatureDraft)
            numbers = self.slots.computed.new_zeros(2, WIDEST_TREES)
            self._nodes = numbers[0], draft.ahead.new_zeros(WIDEST_TREES, draft.ahead.shape[1]), numbers[1]
        this = weakref.proxy(self)  # as there
        self.pass_graphs = Graphs(
            lambda *given: this._pass(*given), lambda: (), self.slots.num_slots, max_rows, max_len,
            self.model.device, recorder, num_drafts=self.most_inner - 1 if self.makes_trees else 0,
            hidden=lambda: this._hidden, trees=self.makes_trees,
        )  # fmt: skip

    def _pass(self, host: HostBatch, tensors: Mapping[str, Tensor], samples: bool) -> Tensor:
        draft = self.draft
        assert isinstance(draft, DraftModel | FeatureDraft)
        if "ancestors" in tensors:
            assert isinstance(draft, FeatureDraft)
            tokens, before, ancestors = (each[: len(tensors["token_slots"])] for each in self._nodes)
            hidden = draft.run_nodes(host, {**tensors, "ancestors": ancestors}, self.slots, tokens, before)
        else:
            hidden = draft.run(host, dict(tensors), self.slots)
        self._hidden = hidden
        return draft.model.logits(hidden).to(draft.logits_dtype)

    def replay_of_nodes(self) -> ReplayNodes | None:
        """As of `replay_of_passes`, for passes over the inner nodes of trees."""
        return None if self.pass_graphs is None or self.model.watched else self._replayed_nodes

    def _replayed_nodes(
        self, batch: HostBatch, tokens: Tensor, before: Tensor, ancestors: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        assert self.pass_graphs is not None
        num, arrays, rows = len(tokens), batch.arrays, np.repeat(np.arange(len(batch.slots)), batch.query_lens)
        arrays = arrays | {"sampling_slots": arrays["token_slots"], "sampling_lens": arrays["offset"]}
        batch = replace(batch, arrays=arrays | {"logits_indices": np.arange(num)}, sampling=tuple(rows.tolist()))
        key = self.pass_graphs.key(batch, False)
        if key is None:
            return None
        for mine, given in zip(self._nodes, (tokens, before, ancestors), strict=True):
            mine[:num].copy_(given)
            mine[num : key.num_tokens].zero_()
        self.replayed_passes += 1
        logits = self._run_pass(key, padded(batch.arrays, key, self.slots.num_slots))
        return logits[:num], self.pass_graphs.hidden_of(key)[:num]

    def replay_of_passes(self) -> Replay | None:
        return None if self.pass_graphs is None or self.model.watched else self._replayed

    def _replayed(self, batch: HostBatch) -> tuple[Tensor, Tensor] | None:
        assert self.pass_graphs is not None
        key = self.pass_graphs.key(batch, False) if batch.sampling else None
        if key is None or key.tokens_per_row > 1:
            return None
        self.replayed_passes += 1
        logits = self._run_pass(key, padded(batch.arrays, key, self.slots.num_slots))
        num = len(batch.sampling)
        return logits[:num], self.pass_graphs.hidden_of(key)[:num]

    def _run_pass(self, key: GraphKey, arrays: Arrays) -> Tensor:
        graphs = self.pass_graphs
        assert graphs is not None
        if key not in graphs:
            decoder = decoder_of_passes(self.draft)
            assert decoder is not None
            with graphs.recorder.launches():
                decoder.tune(key.num_tokens)
            self.stats.graphs_captured += 1
        return graphs.run(key, arrays)[0]

    @torch.inference_mode()
    def capture_all(self, longest: int | None = None) -> int:
        captured = super().capture_all(longest)
        graphs, before = self.pass_graphs, self.stats.graphs_captured
        if graphs is not None:
            bound = graphs.max_len if longest is None else longest_bucket(longest, graphs.max_len)
            for key in graphs.keys(False):
                if key.longest <= bound and key.trees == self.makes_trees:
                    self._run_pass(key, inert(key, self.slots.num_slots))
        return captured + self.stats.graphs_captured - before

    def close(self) -> None:
        super().close()  # waits for those that run
        self.pass_graphs = None


def decoder_of_passes(draft: Any) -> FusedDecoder | None:
    """What a pass launches, where a graph may repeat it; None: it has no layers, or rows that pad would be written."""
    if not isinstance(draft, DraftModel | FeatureDraft):
        return None
    decoder: Any = draft.model.layer if isinstance(draft, FeatureDraft) else draft.model
    fits = isinstance(decoder, FusedDecoder) and writes_and_attends(decoder.kernels, draft.attention) is not None
    return decoder if fits and takes_bounds(draft.attention) else None
