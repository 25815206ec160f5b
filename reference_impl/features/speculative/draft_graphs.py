"""Passes of a draft model, a feature head or early exit as CUDA graphs, beside those of the steps.

A pass is captured if every row has one token: the model and its logits, in all passes of a step but the first, in which
a draft model has rows of two tokens or more, and a head only draws. For a head's tree it is a pass over inner nodes,
whose tokens and hidden states are copied to where the graph reads them, and which all get logits. The graph does not
change scores, draw drafts or write them, so a pass may be computed twice, as a capture does.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from reference_impl.core.batch import HostBatch
from reference_impl.core.slots import Slots
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
from reference_impl.features.graphs.worker import Stats
from reference_impl.features.speculative.draft_model import DraftModel, Replay, ReplayNodes
from reference_impl.features.speculative.feature_head import FeatureDraft
from reference_impl.interfaces import takes_bounds


class PassGraphs:
    """The CUDA graphs of a draft's passes. most_inner: how many nodes of a row's tree have children; 0: drafts are a
    chain. target: the model, which may be watched; stats: the worker's; others: see `GraphWorker.use_graphs`."""

    def __init__(
        self, draft: DraftModel | FeatureDraft, target: Any, slots: Slots, stats: Stats, recorder: Recorder,
        max_rows: int, max_len: int, most_inner: int = 0,
    ):  # fmt: skip
        self.draft, self.target, self.slots, self.stats = draft, target, slots, stats
        self.makes_trees, self.replayed_passes = bool(most_inner), 0
        self._hidden: Tensor | None = None  # of the pass that was computed last
        if self.makes_trees:
            # Of a pass over a tree: tokens, the hidden states of their parents, and what they see.
            assert isinstance(draft, FeatureDraft)
            numbers = slots.computed.new_zeros(2, WIDEST_TREES)
            self._nodes = numbers[0], draft.ahead.new_zeros(WIDEST_TREES, draft.ahead.shape[1]), numbers[1]
        this = weakref.proxy(self)  # in a cycle, caches would live until the garbage collector runs
        self.graphs = Graphs(
            lambda *given: this._pass(*given), lambda: (), slots.num_slots, max_rows, max_len, target.device, recorder,
            num_drafts=most_inner - 1 if self.makes_trees else 0, hidden=lambda: this._hidden, trees=self.makes_trees,
        )  # fmt: skip

    def _pass(self, host: HostBatch, tensors: Mapping[str, Tensor], samples: bool) -> Tensor:
        draft = self.draft
        if "ancestors" in tensors:
            assert isinstance(draft, FeatureDraft)
            tokens, before, ancestors = (each[: len(tensors["token_slots"])] for each in self._nodes)
            hidden = draft.run_nodes(host, {**tensors, "ancestors": ancestors}, self.slots, tokens, before)
        else:
            hidden = draft.run(host, dict(tensors), self.slots)
        self._hidden = hidden
        return draft.model.logits(hidden).to(draft.logits_dtype)

    def replay_of_nodes(self) -> ReplayNodes | None:
        """The replay that `propose_tree` takes; None: nothing is replayed now."""
        return None if self.target.watched else self._replayed_nodes

    def _replayed_nodes(
        self, batch: HostBatch, tokens: Tensor, before: Tensor, ancestors: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        num, arrays, rows = len(tokens), batch.arrays, np.repeat(np.arange(len(batch.slots)), batch.query_lens)
        arrays = arrays | {"sampling_slots": arrays["token_slots"], "sampling_lens": arrays["offset"]}
        batch = replace(batch, arrays=arrays | {"logits_indices": np.arange(num)}, sampling=tuple(rows.tolist()))
        key = self.graphs.key(batch, False)
        if key is None:
            return None
        for mine, given in zip(self._nodes, (tokens, before, ancestors), strict=True):
            mine[:num].copy_(given)
            mine[num : key.num_tokens].zero_()
        self.replayed_passes += 1
        logits = self._run_pass(key, padded(batch.arrays, key, self.slots.num_slots))
        return logits[:num], self.graphs.hidden_of(key)[:num]

    def replay_of_passes(self) -> Replay | None:
        """The replay that `DraftModel.propose` takes; None: nothing is replayed now."""
        return None if self.target.watched else self._replayed

    def _replayed(self, batch: HostBatch) -> tuple[Tensor, Tensor] | None:
        key = self.graphs.key(batch, False) if batch.sampling else None
        if key is None or key.tokens_per_row > 1:
            return None
        self.replayed_passes += 1
        logits = self._run_pass(key, padded(batch.arrays, key, self.slots.num_slots))
        num = len(batch.sampling)
        return logits[:num], self.graphs.hidden_of(key)[:num]

    def _run_pass(self, key: GraphKey, arrays: Arrays) -> Tensor:
        graphs = self.graphs
        if key not in graphs:
            decoder = decoder_of_passes(self.draft)
            assert decoder is not None
            decoder.tune(key.num_tokens)
            self.stats.graphs_captured += 1
        return graphs.run(key, arrays)[0]

    def capture_all(self, longest: int | None = None) -> int:
        """Captures the graphs of passes for contexts of up to `longest` positions; None: all. Returns how many."""
        graphs, before = self.graphs, self.stats.graphs_captured
        bound = graphs.max_len if longest is None else longest_bucket(longest, graphs.max_len)
        for key in graphs.keys(False):
            if key.longest <= bound and key.trees == self.makes_trees:
                self._run_pass(key, inert(key, self.slots.num_slots))
        return self.stats.graphs_captured - before


def decoder_of_passes(draft: Any) -> FusedDecoder | None:
    """The decoder of a draft's passes, if a graph may repeat it; None: the draft has no layers, or rows that pad would
    be written to its cache, or its attention takes no bounds."""
    if not isinstance(draft, DraftModel | FeatureDraft):
        return None
    decoder: Any = draft.model.layer if isinstance(draft, FeatureDraft) else draft.model
    fits = isinstance(decoder, FusedDecoder) and writes_and_attends(decoder.kernels, draft.attention) is not None
    return decoder if fits and takes_bounds(draft.attention) else None
